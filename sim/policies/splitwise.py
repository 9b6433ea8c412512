"""Splitwise: prompt and token machines that help each other out, KV sent while the prompt is being computed.

arXiv:2311.18677 sections 4.2 to 4.4 and its simulator (Mutinifni/splitwise-sim 3780880: scheduler.py
MixedPoolScheduler, instance.py SplitwiseInstance). At arrival the cluster's scheduler names both machines: for the
prompt the one with the fewest pending tokens, for the tokens the one with the least memory promised. If the best prompt
machine has a long queue, or the best token machine no memory, it looks at the mixed pool, then takes a machine of the
other pool into it, then lets one machine do both. A machine goes back to its own pool when it has no work of the other
kind. On every machine an iteration takes prompts first, whole and in order, then tokens, within a number of tokens and
tasks; tokens left out sit the iteration out, and go first once they have sat out so many. Memory for the whole output
is promised before a token task starts. A short prompt's KV is sent after it, a longer one's layer by layer beside it,
for a constant visible cost.

Chosen here: a machine is taken from the other pool for tokens only if it has the memory (the simulator does not look);
a request that stays on one machine is promised its whole memory with its prompt; ageing counts for token tasks, since
prompts go first anyway; a mixed iteration costs what the profile says, not 1.1 prompts. A machine of a `mixed` pool is
always in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.deployment import Deployment
from sim.engine.dispatch import Machine
from sim.engine.lane import begin
from sim.engine.layout import (
    COHORT,
    DECODE,
    INCOMING,
    ITERATIONS,
    LEAVES,
    MANY,
    N_CHUNKS,
    N_HOLD,
    N_JOIN,
    N_READY,
    N_RUN,
    REPEAT,
    RESERVED,
    RUN_TAIL,
    TOTAL,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk
from sim.engine.pooled import add_join, blocks_of, clear_pooled, execute_pooled, has_kv, promise
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.pools import LONGEST_PROMPT, PooledPolicy
from sim.policies.parts.splitwise_scheduler import Scheduler
from sim.workload.workload import Workload

TOKENS, SIZE, AGE, SLOTS = 0, 1, 2, 3
SIMULATOR = "splitwise-sim:configs/start_state/splitwise.yaml"


@jit
def _sat_out(q: Any, r: Any, i: int) -> int:
    """Iterations that request i has sat out so far."""
    since = q.sat_since[i]
    return int(q.sat_out[i] + (r.iv[ITERATIONS] - since if since >= 0 else 0))


@jit
def _sits(q: Any, r: Any, i: int) -> None:
    """Request i sits this iteration out."""
    if q.sat_since[i] < 0:
        q.sat_since[i] = r.iv[ITERATIONS]


@jit
def _runs(q: Any, r: Any, i: int) -> None:
    """Request i takes part in this iteration."""
    q.sat_out[i] = _sat_out(q, r, i)
    q.sat_since[i] = -1


@jit
def _has_slot(r: Any, a: Any, ki: Any) -> bool:
    return bool(r.iv[N_RUN] + a.iv[N_CHUNKS] + a.iv[N_JOIN] < ki[SLOTS])


@jit
def _join(q: Any, r: Any, a: Any, ki: Any, room: int, age: int) -> bool:
    """Token tasks that have come with their KV and sat out `age` iterations, in order; False if some find no place."""
    known, all_in = a.iv[N_JOIN], True
    i = r.iv[WAIT_HEAD] if r.iv[INCOMING] > 0 else -1
    while i >= 0:
        if has_kv(q, i) and _sat_out(q, r, i) >= age:
            taken = False
            for n in range(known):
                taken = taken or a.join[n] == i
            if not taken and room > 0 and _has_slot(r, a, ki):
                add_join(a, i)
                room -= 1
            elif not taken:
                _sits(q, r, i)
                all_in = False
        i = q.next[i]
    return all_in


@jit
def _prompts(q: Any, r: Any, a: Any, ki: Any, tasks: int) -> int:
    """Whole prompts in order beside so many token tasks, with the memory that they will want here; their tokens."""
    tokens = 0
    i = r.iv[WAIT_HEAD]
    while i >= 0 and tasks + a.iv[N_CHUNKS] < ki[SIZE] and _has_slot(r, a, ki):
        if not has_kv(q, i):
            first = tasks + a.iv[N_CHUNKS] == 0
            if not first and tasks + tokens + q.target[i] > ki[TOKENS]:
                break
            stays = q.hands_over[i] != LEAVES
            blocks = blocks_of(r, q.prompt[i] + q.max_new[i] if stays else q.target[i])
            if r.iv[RESERVED] + blocks > r.iv[TOTAL]:
                break
            promise(q, r, i, blocks)
            add_chunk(a, i, q.target[i], q.target[i])
            tokens += q.target[i]
        i = q.next[i]
    return tokens


@jit
def _hold(q: Any, r: Any, a: Any, ki: Any, excess: int) -> None:
    """Of the batch the last sit out, then of those that sat before the last that have not sat too often yet."""
    i = r.iv[RUN_TAIL]
    while i >= 0 and excess > 0:
        if q.phase[i] == DECODE:
            _sits(q, r, i)
            a.hold[a.iv[N_HOLD]] = i
            a.iv[N_HOLD] += 1
            excess -= 1
        i = q.prev[i]
    for back in range(r.iv[N_READY]):
        i = r.ready[r.iv[N_READY] - 1 - back]
        if excess > 0 and _sat_out(q, r, i) < ki[AGE]:
            _sits(q, r, i)
            a.hold[a.iv[N_HOLD]] = i
            a.iv[N_HOLD] += 1
            excess -= 1
        else:
            _runs(q, r, i)


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One iteration of a machine, whichever pool it is in."""
    iv = r.iv
    clear_pooled(a)
    most = min(ki[SIZE], ki[TOKENS])
    aged = 0
    for n in range(iv[N_READY]):
        aged += 1 if _sat_out(q, r, r.ready[n]) >= ki[AGE] else 0
    _join(q, r, a, ki, most - aged, ki[AGE])
    tasks = aged + a.iv[N_JOIN]
    tokens = tasks + _prompts(q, r, a, ki, tasks)
    room = max(0, min(ki[SIZE] - tasks - a.iv[N_CHUNKS], ki[TOKENS] - tokens))
    excess = iv[COHORT] + iv[N_READY] - aged - room
    _hold(q, r, a, ki, excess)
    all_in = _join(q, r, a, ki, max(0, -excess), 0)
    for n in range(a.iv[N_JOIN]):
        _runs(q, r, a.join[n])
    if tasks + a.iv[N_CHUNKS] + a.iv[N_HOLD] == 0 and all_in:
        # prompts that wait want memory or a slot, which nobody gives back before a task ends
        a.iv[REPEAT] = MANY


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute_pooled(q, r, a, p, 0.0, look_ahead):
            return


class SplitwisePolicy(PooledPolicy):
    """Splitwise: prompt, token and mixed machines."""

    name = "splitwise"
    source = "Splitwise, arXiv:2311.18677 section 4"
    mirrors = "splitwise-sim 3780880 (ISCA'24 artefact)"
    pools = ("prefill", "decode", "mixed")
    mixes = True
    advance = advance
    knobs = {  # noqa: RUF012
        "max_batch_tokens": Knob(2048, "tokens of an iteration; a longer prompt runs alone", SIMULATOR, 1),
        "max_batch_size": Knob(512, "tasks of an iteration", SIMULATOR, 1),
        "max_preemptions": Knob(4, "iterations sat out after which a token task goes first", SIMULATOR, 1),
        "max_prompt_tokens": LONGEST_PROMPT,
        "prompt_queue_tokens": Knob(
            8192,
            "pending tokens beyond which a prompt machine with a queue takes no more",
            "splitwise-sim:configs/applications mixed_pool.yml prompt_max_pending_batch_tokens",
            minimum=0,
        ),
        "overlap_min_tokens": Knob(
            512, "shortest prompt whose KV is sent layer by layer", "arXiv:2311.18677 section 4.3", 0
        ),
        "handover_ms": Knob(
            None,
            "visible time of a layer-wise transfer beside the link's; default 2 ms + 150 MB at the link's rate",
            "arXiv:2311.18677 section 6.2: 5 ms at 50 GB/s, 8 ms at 25 GB/s",
            minimum=0,
        ),
    }

    def max_seqs(self, deployment: Deployment) -> int:
        """Those in the batch and those that sit out."""
        return 2 * int(self["max_batch_size"])

    def max_tokens(self, deployment: Deployment) -> int:
        """An iteration, or the longest prompt alone."""
        return max(int(self["max_batch_tokens"]), self.longest_prompt(deployment))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Tokens and tasks of an iteration, iterations to sit out, requests in all."""
        size = int(self["max_batch_size"])
        return [int(self["max_batch_tokens"]), size, int(self["max_preemptions"]), 2 * size], []

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The whole output is promised, as long as the client says that it may be."""
        if deployment.pool == "prefill":
            return super().required_blocks(workload, deployment)
        tokens = workload.prompt_tokens.astype(np.int64) + workload.max_new_tokens
        return np.asarray(-(-tokens // deployment.block_size), np.int64)

    def dispatcher(self, machines: Sequence[Machine], q: Any, link: Any) -> Scheduler:
        """The cluster's scheduler of a run."""
        return Scheduler(machines, q, link, self.settings)

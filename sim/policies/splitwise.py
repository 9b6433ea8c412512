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

from collections.abc import Iterator, Sequence
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
from sim.policies.pools import LONGEST_PROMPT, PooledPolicy
from sim.workload.workload import Workload

TOKENS, SIZE, AGE, SLOTS = 0, 1, 2, 3
SIMULATOR = "splitwise-sim:configs/start_state/splitwise.yaml"
# visible cost of a hand-over beside the prompt: 5 ms over 400 Gbit/s (H100), 8 ms over 200 (A100), section 6.2
VISIBLE_S, VISIBLE_BYTES = 2e-3, 150e6


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


class _Scheduler:
    """The cluster's scheduler: both machines of a request at its arrival, and which pool each machine is in."""

    def __init__(self, machines: Sequence[Machine], q: Any, link: Any, policy: SplitwisePolicy) -> None:
        self._machines, self._q = machines, q
        self._pool = [machine.pool for machine in machines]
        self._pending = [0] * len(machines)  # prompt tokens and token tasks to do
        self._memory = [0] * len(machines)  # blocks promised, to requests that are yet to come as well
        self._foreign = [0] * len(machines)  # work of the other kind than the machine's own
        self._placed: dict[int, tuple[int, int]] = {}
        self._long = int(policy["prompt_queue_tokens"])
        self._shortest = int(policy["overlap_min_tokens"]) if link.overlap != "none" else None
        given = policy["handover_ms"]
        self._visible_s = VISIBLE_S + VISIBLE_BYTES / link.bytes_per_s if given is None else given / 1e3

    def place(self, i: int) -> tuple[int, int | None]:
        """Own pools first, then the mixed one, then a machine of the other pool, then one machine for both."""
        length, whole = int(self._q.prompt[i]), self._whole(i)
        prompt = next((k for pool in ("prefill", "mixed") for k in self._shortest_queue(pool, length)), None)
        token = next((k for pool in ("decode", "mixed") for k in self._most_memory(pool, whole)), None)
        if prompt is None:
            prompt = next(iter(self._by_pending("decode")), None)
            self._mix(prompt)
        if token is None:
            token = next(self._most_memory("prefill", whole), None)
            self._mix(token)
        if prompt is None or token is None:
            fits = [k for k, machine in enumerate(self._machines) if machine.num_blocks >= whole]
            prompt = token = min(fits, key=lambda k: (self._pending[k], k))
        self._placed[i] = prompt, token
        self._pending[prompt] += length
        self._pending[token] += 1
        self._memory[token] += whole
        if prompt != token:
            self._memory[prompt] += self._machines[prompt].blocks_for(length + 1)
        self._foreign[prompt] += self._machines[prompt].pool == "decode"
        self._foreign[token] += self._machines[token].pool == "prefill"
        return prompt, token

    def _whole(self, i: int) -> int:
        return self._machines[0].blocks_for(int(self._q.prompt[i] + self._q.max_new[i]))

    def _of(self, pool: str) -> list[int]:
        return [k for k, now in enumerate(self._pool) if now == pool]

    def _by_pending(self, pool: str) -> list[int]:
        return sorted(self._of(pool), key=lambda k: (self._pending[k], k))

    def _shortest_queue(self, pool: str, length: int) -> Iterator[int]:
        """The machine with the fewest pending tokens, unless its queue is long."""
        for k in self._by_pending(pool)[:1]:
            if self._machines[k].waiting == 0 or self._pending[k] + length <= self._long:
                yield k

    def _most_memory(self, pool: str, whole: int) -> Iterator[int]:
        """The machine with the least memory promised, unless that would be too much."""
        for k in sorted(self._of(pool), key=lambda k: (self._memory[k], k))[:1]:
            if self._memory[k] + whole <= self._machines[k].num_blocks:
                yield k

    def _mix(self, k: int | None) -> None:
        if k is not None:
            self._pool[k] = "mixed"

    def _done(self, k: int, own: str) -> None:
        """Machine k has done a piece of work; without any of the other kind than its own it goes home."""
        home = self._machines[k].pool
        self._foreign[k] -= home not in (own, "mixed")
        if self._foreign[k] == 0:
            self._pool[k] = home

    def decode_on(self, i: int) -> int:
        """As placed."""
        return self._placed[i][1]

    def may_pull(self, i: int, machine: Machine) -> bool:
        """All that it may grow to must fit beside what is promised to those that are here."""
        return machine.reserved_blocks + self._whole(i) <= machine.num_blocks

    def sends_early(self, i: int) -> bool:
        """Long prompts layer by layer, short ones after the prompt."""
        return self._shortest is not None and bool(self._q.prompt[i] >= self._shortest)

    def handover_s(self, i: int, early: bool) -> float:
        """Synchronising layer by layer shows."""
        return self._visible_s if early else 0.0

    def reserve(self, i: int) -> int:
        """Its whole output."""
        return self._whole(i)

    def prompt_done(self, i: int) -> None:
        """Fewer tokens are pending."""
        prompt, _ = self._placed[i]
        self._pending[prompt] -= int(self._q.prompt[i])
        self._done(prompt, "prefill")

    def moved(self, i: int) -> None:
        """The prompt machine has its memory back."""
        prompt, token = self._placed[i]
        if prompt != token:
            self._memory[prompt] -= self._machines[prompt].blocks_for(int(self._q.prompt[i]) + 1)
            self._placed[i] = token, token

    def finished(self, i: int) -> None:
        """The token machine has its memory back, and the prompt machine if the first token was the last."""
        self.moved(i)
        _, token = self._placed.pop(i)
        self._pending[token] -= 1
        self._memory[token] -= self._whole(i)
        self._done(token, "decode")


class SplitwisePolicy(PooledPolicy):
    """Splitwise: prompt, token and mixed machines."""

    name = "splitwise"
    source = "Splitwise, arXiv:2311.18677 section 4"
    mirrors = "splitwise-sim 3780880 (ISCA'24 artefact)"
    pools = ("prefill", "decode", "mixed")
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

    def dispatcher(self, machines: Sequence[Machine], q: Any, link: Any) -> _Scheduler:
        """The cluster's scheduler of a run."""
        return _Scheduler(machines, q, link, self)

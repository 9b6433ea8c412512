"""Sarathi-Serve: stall-free batching. Every running decode first, then unfinished prompts, then new ones.

Algorithm 3 of arXiv:2403.02310 as sarathi-serve:sarathi/core/scheduler/sarathi_scheduler.py carries it out
(commit 96f9911): the running list is kept by arrival, blocks for the whole prompt are taken at admission above a
1 % watermark, a decode needs a free block at its turn and else evicts the youngest not yet scheduled.
`one_prefill` is the rule of the POD-Attention artefact (vattention:sarathi-lean): one chunk a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.cohort import decode_need, generated_now
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import (
    BLOCK,
    BY_ARRIVAL,
    COHORT,
    FREE,
    GUARD,
    MANY,
    N_CHUNKS,
    N_PARTIAL,
    N_PREEMPT,
    N_READY,
    N_RUN,
    REPEAT,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk, clear_plan, is_victim
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.serial import decodes_in_order
from sim.workload.workload import Workload

BUDGET, SEQS, WATERMARK, ONE_PREFILL = 0, 1, 2, 3


@jit
def _admit(q: Any, r: Any, a: Any, ki: Any, i: int, free: int, budget: int) -> int:
    """Give the head of the queue its chunk and the blocks of its whole prompt; returns these, 0 if it must wait."""
    if budget <= 0 or (ki[ONE_PREFILL] == 1 and a.iv[N_CHUNKS] > 0):
        return 0
    # the evicted recompute what they have generated, too
    target = q.prompt[i] + generated_now(q, r, i)
    need: int = -(-target // r.iv[BLOCK])
    if free - need < ki[WATERMARK]:
        return 0
    add_chunk(a, i, min(target, budget), target)
    return need


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One scheduling step of Sarathi-Serve."""
    iv = r.iv
    clear_plan(a)
    a.iv[GUARD] = 1
    decodes = iv[COHORT] + iv[N_READY]
    free = iv[FREE]
    if decodes > 0:
        free -= decode_need(q, r)
        if free < 1:
            decodes, free = decodes_in_order(q, r, a)
    budget = ki[BUDGET] - decodes
    for n in range(iv[N_PARTIAL]):
        i = r.partial[n]
        if budget <= 0 or (ki[ONE_PREFILL] == 1 and a.iv[N_CHUNKS] > 0):
            break
        if not is_victim(a, i):
            tokens = min(q.target[i] - q.computed[i], budget)
            add_chunk(a, i, tokens, q.target[i])
            budget -= tokens
    running = iv[N_RUN] - a.iv[N_PREEMPT]
    # the evicted stand at the head of the queue, the last one first
    at, i = a.iv[N_PREEMPT] - 1, iv[WAIT_HEAD]
    while (at >= 0 or i >= 0) and running < ki[SEQS]:
        need = _admit(q, r, a, ki, a.preempt[at] if at >= 0 else i, free, budget)
        if need == 0:
            break
        free -= need
        budget -= a.chunk_tokens[a.iv[N_CHUNKS] - 1]
        running += 1
        if at >= 0:
            at -= 1
        else:
            i = q.next[i]
    # the next steps bring nothing else while nothing is left of the budget, or there is nothing to spend it on
    if a.iv[N_PREEMPT] == 0 and (a.iv[N_CHUNKS] == 0 or (a.iv[N_CHUNKS] == 1 and budget == 0)):
        a.iv[REPEAT] = MANY


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class SarathiPolicy(CompiledPolicy):
    """Sarathi-Serve: chunked prefill without stalls."""

    name = "sarathi"
    source = "Sarathi-Serve, arXiv:2403.02310 Algorithm 3"
    mirrors = "sarathi-serve 96f9911 (OSDI'24 artefact)"
    run_order = BY_ARRIVAL
    mixes = True
    knobs = {  # noqa: RUF012
        "token_budget": Knob(
            512, "tokens of a step (chunk_size)", "arXiv:2403.02310 section 5.1 (strict SLO)", minimum=1
        ),
        "max_num_seqs": Knob(128, "most running requests", "sarathi-serve:sarathi/config.py", minimum=1),
        "watermark": Knob(
            0.01,
            "share of the blocks kept free at admission",
            "sarathi-serve block_space_manager",
            minimum=0,
            maximum=1,
        ),
        "one_prefill": Knob(
            False, "one prefill chunk a batch", "vattention:sarathi-lean (POD-Attention artefact)"
        ),
    }
    advance = advance

    def max_tokens(self, deployment: Deployment) -> int:
        """Budget; decodes are never dropped by it, so it grows with the running requests."""
        return max(int(self["token_budget"]), self.max_seqs(deployment))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Budget, sequences, watermark in blocks, one_prefill."""
        return [
            int(self["token_budget"]),
            self.max_seqs(deployment),
            self._watermark_blocks(deployment),
            int(self["one_prefill"]),
        ], []

    def _watermark_blocks(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark, or the one free block that a decode wants, comes on top."""
        return super().required_blocks(workload, deployment) + max(1, self._watermark_blocks(deployment))

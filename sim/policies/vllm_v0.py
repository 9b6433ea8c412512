"""vLLM before v1: prompts first and whole, decodes only when no prompt can be admitted.

Mirrors the default (unchunked) scheduler of vLLM up to 0.6 (vllm:vllm/core/scheduler.py `_schedule_default`), the
baseline that the Sarathi-Serve and POD-Attention papers call vLLM (sarathi-serve:sarathi/core/scheduler/
vllm_scheduler.py): a step is either prompts or decodes; prompts first come first served, nobody skips a blocked head;
a decode needs a free block at its turn and else evicts the youngest. The scheduler drops a prompt that is longer than
the budget; here it is rejected on arrival, and a request that an eviction finds grown beyond it recomputes alone, in
as many steps as the budget asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.cohort import decode_need
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import (
    BLOCK,
    BY_ARRIVAL,
    COHORT,
    DECODE_ALL,
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
from sim.engine.plans import add_chunk, clear_plan
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.serial import decodes_in_order
from sim.workload.workload import Workload

BUDGET, SEQS, WATERMARK = 0, 1, 2


@jit
def _admit(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Whole prompts in order of the queue, while budget, slots and blocks last."""
    if r.iv[N_PARTIAL] > 0:
        i = r.partial[0]
        add_chunk(a, i, min(q.target[i] - q.computed[i], ki[BUDGET]), q.target[i])
        return
    tokens, running, free = 0, r.iv[N_RUN], r.iv[FREE]
    i = r.iv[WAIT_HEAD]
    while i >= 0 and running < ki[SEQS]:
        size = q.target[i]
        need = -(-size // r.iv[BLOCK])
        if free - need < ki[WATERMARK] or (tokens > 0 and tokens + size > ki[BUDGET]):
            return
        add_chunk(a, i, min(size, ki[BUDGET]), size)
        free -= need
        tokens += size
        running += 1
        i = q.next[i]


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One call of the scheduler."""
    clear_plan(a)
    _admit(q, r, a, ki)
    if a.iv[N_CHUNKS] > 0:
        a.iv[DECODE_ALL] = 0
        return
    a.iv[GUARD] = 1
    if r.iv[COHORT] + r.iv[N_READY] > 0 and r.iv[FREE] - decode_need(q, r) < 1:
        decodes_in_order(q, r, a)
    if a.iv[N_PREEMPT] == 0:
        a.iv[REPEAT] = MANY


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class VllmV0Policy(CompiledPolicy):
    """vLLM v0, prefill-prioritising."""

    name = "vllm-v0"
    source = "vllm:vllm/core/scheduler.py; the vLLM of arXiv:2403.02310 and arXiv:2410.18038"
    mirrors = "vLLM 0.4 to 0.6, v0 engine without chunked prefill"
    run_order = BY_ARRIVAL
    knobs = {  # noqa: RUF012
        "max_num_batched_tokens": Knob(
            None,
            "prompt tokens of a step, and the longest prompt; default: the model's context, at least 2048",
            "vllm:vllm/config.py (SchedulerConfig, v0); POD's scripts set 16384 and 65536",
            minimum=1,
        ),
        "max_num_seqs": Knob(256, "most running requests", "vllm:vllm/engine/arg_utils.py (v0)", minimum=1),
        "watermark": Knob(
            0.01,
            "share of the blocks kept free at admission",
            "vllm:vllm/core/block_manager.py",
            minimum=0,
            maximum=1,
        ),
    }
    advance = advance

    def _budget(self, deployment: Deployment) -> int:
        return int(self["max_num_batched_tokens"] or max(deployment.max_context, 2048))

    def max_tokens(self, deployment: Deployment) -> int:
        """The budget, or a decode of everybody."""
        return max(self._budget(deployment), self.max_seqs(deployment))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Budget, sequences, watermark in blocks."""
        return [self._budget(deployment), self.max_seqs(deployment), self._watermark_blocks(deployment)], []

    def _watermark_blocks(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark, or the one free block that a decode wants, comes on top."""
        return super().required_blocks(workload, deployment) + max(1, self._watermark_blocks(deployment))

    def refusals(self, workload: Workload, deployment: Deployment) -> dict[int, str]:
        """Prompts longer than the budget."""
        budget, prompts = self._budget(deployment), workload.prompt_tokens
        why = "a prompt of {} tokens exceeds max_num_batched_tokens = {}"
        return {int(i): why.format(prompts[i], budget) for i in np.flatnonzero(prompts > budget)}

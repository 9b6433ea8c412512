"""vLLM before v1: prompts first and whole, decodes only when no prompt can be admitted.

Mirrors the default (unchunked) scheduler of vLLM up to 0.6 (vllm:vllm/core/scheduler.py `_schedule_default`), the
baseline that the Sarathi-Serve and POD-Attention papers call vLLM (sarathi-serve:sarathi/core/scheduler/
vllm_scheduler.py): a step is either prompts or decodes; prompts first come first served, nobody skips a blocked head;
a decode needs a free block at its turn and else evicts the youngest. The scheduler drops a prompt that is longer than
the budget; here it is rejected on arrival, and a request that an eviction finds grown beyond it recomputes alone, in
as many steps as the budget asks for. With `preemption_mode: swap` victims keep their KV on the host: they come back,
youngest last, before any prompt is admitted, and steps wait for the copies. Where vLLM aborts because the swap space
is full, victims are recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.gpu import load_gpu
from sim.engine.cohort import blocks_now, decode_need
from sim.engine.deployment import Deployment
from sim.engine.lane import begin
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
    ON_HOST,
    REPEAT,
    SWAP,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk
from sim.engine.pooled import add_join, clear_pooled, execute_pooled, has_kv, kv_blocks
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.serial import decodes_in_order
from sim.units import GIB
from sim.workload.workload import Workload

BUDGET, SEQS, WATERMARK, HOST_BLOCKS = 0, 1, 2, 3
COPY_S = 0


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
def _evict(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Victims where a decode finds no free block; to the host, if all of them fit there."""
    decodes_in_order(q, r, a)
    held = 0
    for n in range(a.iv[N_PREEMPT]):
        held += blocks_now(q, r, a.preempt[n])
    a.iv[SWAP] = 1 if r.iv[ON_HOST] + held <= ki[HOST_BLOCKS] else 0


@jit
def _swap_in(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Requests on the host come back in order while slots last, and blocks: one more than theirs, and the watermark."""
    running, free = r.iv[N_RUN], r.iv[FREE] - decode_need(q, r)
    i = r.iv[WAIT_HEAD]
    while i >= 0 and running < ki[SEQS]:
        if has_kv(q, i):
            blocks = kv_blocks(q, r, i)
            if free - blocks - 1 < ki[WATERMARK]:
                return
            add_join(a, i)
            free -= blocks + (1 if q.computed[i] == blocks * r.iv[BLOCK] else 0)
            running += 1
        i = q.next[i]


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One call of the scheduler."""
    clear_pooled(a)
    if r.iv[ON_HOST] == 0:
        _admit(q, r, a, ki)
    if a.iv[N_CHUNKS] > 0:
        a.iv[DECODE_ALL] = 0
        return
    a.iv[GUARD] = 1
    if r.iv[COHORT] + r.iv[N_READY] > 0 and r.iv[FREE] - decode_need(q, r) < 1:
        _evict(q, r, a, ki)
    if a.iv[N_PREEMPT] == 0:
        if r.iv[ON_HOST] > 0:
            _swap_in(q, r, a, ki)
        a.iv[REPEAT] = MANY


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute_pooled(q, r, a, p, kf[COPY_S], look_ahead):
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
        "preemption_mode": Knob(
            "recompute",
            "what a victim loses: its KV (recompute), or the time of two copies (swap)",
            "vllm:vllm/core/scheduler.py _preempt",
            choices=("recompute", "swap"),
        ),
        "swap_space_gib": Knob(
            4.0, "memory of the host for swapped KV, a GPU", "vllm:vllm/config.py (v0)", 0
        ),
        "swap_gb_s": Knob(
            None, "rate of swapping in one direction; default PCIe's of the GPU table", "GPU table", 1
        ),
    }
    advance = advance

    def _budget(self, deployment: Deployment) -> int:
        return int(self["max_num_batched_tokens"] or max(deployment.max_context, 2048))

    def max_tokens(self, deployment: Deployment) -> int:
        """The budget, or a decode of everybody."""
        return max(self._budget(deployment), self.max_seqs(deployment))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Budget, sequences, watermark and swap space in blocks; seconds to copy a block."""
        space = int(self["swap_space_gib"] * GIB) if self._swaps else 0
        integers = [
            self._budget(deployment),
            self.max_seqs(deployment),
            self._watermark_blocks(deployment),
            space // max(1, deployment.block_bytes),
        ]
        rate = self["swap_gb_s"] or load_gpu(deployment.gpu).pcie_gb_s
        return integers, [deployment.block_bytes / (rate * 1e9)]

    @property
    def _swaps(self) -> bool:
        return bool(self["preemption_mode"] == "swap")

    def _watermark_blocks(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark, or the one free block that a decode wants, comes on top; one more to swap in."""
        spare = max(1, self._watermark_blocks(deployment)) + int(self._swaps)
        return super().required_blocks(workload, deployment) + spare

    def refusals(self, workload: Workload, deployment: Deployment) -> dict[int, str]:
        """Prompts longer than the budget."""
        budget, prompts = self._budget(deployment), workload.prompt_tokens
        why = "a prompt of {} tokens exceeds max_num_batched_tokens = {}"
        return {int(i): why.format(prompts[i], budget) for i in np.flatnonzero(prompts > budget)}

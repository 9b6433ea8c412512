"""vLLM v1: one token budget for the running requests in admission order, then for the waiting ones.

Mirrors the scheduler of vLLM early 2026 (vllm:vllm/v1/core/sched/scheduler.py): chunked prefill on, first come
first served, blocks for scheduled tokens only, preemption of the last running request by recompute. Under
`scheduling_policy: priority` the waiting are served by priority and, where blocks are short, the least urgent running
request goes, even if this step has scheduled it already; a waiting request never evicts a running one.
Knobs' defaults: vllm:vllm/config/scheduler.py and vllm/engine/arg_utils.py (get_batch_defaults).
"""

from __future__ import annotations

from typing import Any

from sim.engine.cohort import blocks_now, decode_need, needs_block
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import (
    BLOCK,
    COHORT,
    FREE,
    MANY,
    N_CHUNKS,
    N_HOLD,
    N_PARTIAL,
    N_PREEMPT,
    N_READY,
    N_RUN,
    PREFILL,
    REPEAT,
    RUN_HEAD,
    RUN_TAIL,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk, add_victim, clear_plan, is_victim
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.serial import next_victim, take_back

BUDGET, SEQS, THRESHOLD, WATERMARK, WHOLE_PROMPT, PRIORITY = 0, 1, 2, 3, 4, 5
SOURCE = "vllm:vllm/v1/core/sched/scheduler.py"


@jit
def _wanted(q: Any, i: int, threshold: int, budget: int) -> int:
    tokens = min(q.target[i] - q.computed[i], budget)
    return min(tokens, threshold) if threshold > 0 else tokens


@jit
def _partials_are_last(q: Any, r: Any) -> bool:
    i, count = r.iv[RUN_TAIL], 0
    while i >= 0 and q.phase[i] == PREFILL:
        count += 1
        i = q.prev[i]
    return bool(count == r.iv[N_PARTIAL])


@jit
def _running_in_bulk(q: Any, r: Any, a: Any, ki: Any) -> int:
    """Schedule all running requests at once if order cannot matter; returns the budget left, or -1."""
    iv = r.iv
    decodes = iv[COHORT] + iv[N_READY]
    budget = ki[BUDGET] - decodes
    if budget < 0 or not _partials_are_last(q, r):
        return -1
    free = iv[FREE] - decode_need(q, r)
    for n in range(iv[N_PARTIAL]):
        i = r.partial[n]
        tokens = _wanted(q, i, ki[THRESHOLD], budget)
        if tokens <= 0:
            continue
        free -= -(-(q.computed[i] + tokens) // iv[BLOCK]) - q.blocks[i]
        budget -= tokens
        add_chunk(a, i, tokens, q.computed[i] + tokens)
    if free < 0:
        a.iv[N_CHUNKS] = 0
        return -1
    return budget


@jit
def _running_in_order(q: Any, r: Any, a: Any, ki: Any) -> int:
    """Walk the running list as the scheduler does, evicting where blocks are short."""
    iv = r.iv
    budget, free = ki[BUDGET], iv[FREE]
    evicted = False
    i = iv[RUN_HEAD]
    while i >= 0 and budget > 0 and not evicted:
        if is_victim(a, i):
            i = q.next[i]
            continue
        if q.phase[i] == PREFILL:
            tokens = _wanted(q, i, ki[THRESHOLD], budget)
            need = -(-(q.computed[i] + tokens) // iv[BLOCK]) - q.blocks[i]
        else:
            tokens = 1
            need = needs_block(q, r, i)
        while need > free and not evicted:
            victim = next_victim(q, r, a, ki[PRIORITY] == 1)
            tokens_back, blocks_back = take_back(q, r, a, victim, i)
            budget += tokens_back
            free += blocks_now(q, r, victim) + blocks_back
            add_victim(a, victim)
            evicted = bool(victim == i)
        if not evicted:
            free -= need
            budget -= tokens
            if q.phase[i] == PREFILL:
                add_chunk(a, i, tokens, q.computed[i] + tokens)
        i = q.next[i]
    while i >= 0:
        # the step ended before these: those that decode sit it out
        if q.phase[i] != PREFILL and not is_victim(a, i):
            a.hold[a.iv[N_HOLD]] = i
            a.iv[N_HOLD] += 1
        i = q.next[i]
    return budget


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One scheduling step of vLLM v1."""
    iv = r.iv
    clear_plan(a)
    budget = _running_in_bulk(q, r, a, ki)
    if budget < 0:
        budget = _running_in_order(q, r, a, ki)
    if a.iv[N_PREEMPT] > 0:
        return
    free = iv[FREE] - decode_need(q, r)
    for c in range(a.iv[N_CHUNKS]):
        i = a.chunk_id[c]
        free -= -(-a.chunk_reserve[c] // iv[BLOCK]) - q.blocks[i]
    running = iv[N_RUN]
    i = iv[WAIT_HEAD]
    while i >= 0 and budget > 0 and running < ki[SEQS]:
        tokens = _wanted(q, i, ki[THRESHOLD], budget)
        need = -(-tokens // iv[BLOCK])
        gate = -(-q.target[i] // iv[BLOCK]) if ki[WHOLE_PROMPT] == 1 else need
        spare = ki[WATERMARK] if running > 0 else 0
        if gate + spare > free:
            break
        add_chunk(a, i, tokens, tokens)
        free -= need
        budget -= tokens
        running += 1
        i = q.next[i]
    if a.iv[N_CHUNKS] == 0 and a.iv[N_HOLD] == 0:
        # nothing was admitted and, until a member finishes or a request arrives, nothing will be
        a.iv[REPEAT] = MANY


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class VllmPolicy(CompiledPolicy):
    """vLLM v1, continuous batching with chunked prefill."""

    name = "vllm"
    source = "vLLM v1 scheduler, " + SOURCE
    mirrors = "vLLM v1, early 2026"
    mixes = True
    knobs = {  # noqa: RUF012
        "max_num_batched_tokens": Knob(
            None,
            "token budget of a step; default 8192 on GPUs of 70 GiB and more that are no A100, else 2048",
            "vllm:vllm/engine/arg_utils.py get_batch_defaults",
            minimum=1,
        ),
        "max_num_seqs": Knob(
            None,
            "most running requests; default 1024 on GPUs of 70 GiB and more that are no A100, else 256",
            "vllm:vllm/engine/arg_utils.py get_batch_defaults",
            minimum=1,
        ),
        "long_prefill_token_threshold": Knob(
            0,
            "longest chunk of one prompt in a step; 0 is no limit",
            "vllm:vllm/config/scheduler.py",
            minimum=0,
        ),
        "watermark": Knob(
            0.0,
            "share of the blocks kept free when a waiting request is admitted beside running ones",
            "off in early v1; later kv_cache_manager.py has one of unread default",
            minimum=0,
            maximum=1,
        ),
        "whole_prompt_gate": Knob(
            False,
            "admit only if the whole known sequence would fit, not just its first chunk",
            "off in early v1; a later allocate_slots has it",
        ),
        "scheduling_policy": Knob(
            "fcfs",
            "fcfs, or priority: the queue is served by the requests' priority (lower first), then by arrival, and "
            "the least urgent running request is evicted",
            "vllm:vllm/config/scheduler.py (policy)",
            choices=("fcfs", "priority"),
        ),
    }
    advance = advance

    def _large(self, deployment: Deployment) -> bool:
        from sim.cost.gpu import load_gpu
        from sim.units import GIB

        return load_gpu(deployment.gpu).hbm_bytes >= 70 * GIB and "a100" not in deployment.gpu

    @property
    def wait_order(self) -> str:
        """By the knob."""
        return str(self["scheduling_policy"])

    def max_seqs(self, deployment: Deployment) -> int:
        """`max_num_seqs`, or vLLM's default for this GPU."""
        return int(self["max_num_seqs"] or (1024 if self._large(deployment) else 256))

    def max_tokens(self, deployment: Deployment) -> int:
        """`max_num_batched_tokens`, or vLLM's default for this GPU."""
        return int(self["max_num_batched_tokens"] or (8192 if self._large(deployment) else 2048))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Budget, sequences, threshold, watermark in blocks, gate, order of eviction."""
        return [
            self.max_tokens(deployment),
            self.max_seqs(deployment),
            self["long_prefill_token_threshold"],
            int(self["watermark"] * deployment.num_blocks),
            int(self["whole_prompt_gate"]),
            int(self["scheduling_policy"] == "priority"),
        ], []

"""What a policy expects of a launch on a set of SMs, by the tables that it believes."""

from __future__ import annotations

from typing import Any

from sim.cost.step import decode_attention_s, dense_s, head_s, prefill_attention_s
from sim.engine.cohort import computed_now
from sim.engine.layout import COHORT, CONTEXT, N_JOINING, N_PREEMPT, N_READY
from sim.jit import jit


@jit
def next_batch(r: Any, a: Any) -> int:
    """Requests of the next decode step, the plan's victims left out."""
    iv = r.iv
    # those that have joined the step in flight stand among the ready until it ends
    return int(iv[COHORT] + iv[N_READY] - iv[N_JOINING] - a.iv[N_PREEMPT])


@jit
def next_context(q: Any, r: Any, a: Any) -> int:
    """Context tokens of the next decode step, the one that it computes for each member included."""
    iv = r.iv
    context = iv[CONTEXT] + next_batch(r, a)
    for n in range(iv[N_JOINING], iv[N_READY]):
        context += q.computed[r.ready[n]]
    for n in range(a.iv[N_PREEMPT]):
        context -= computed_now(q, r, a.preempt[n])
    return int(context)


@jit
def prompts_attention_s(q: Any, b: Any, part: int, ids: Any, tokens: Any, n: int) -> float:
    """GPU seconds of the attention of n chunks of `tokens` tokens, each behind what is computed of its request."""
    seconds = -(n - 1) * b.pre_fixed_s[part]
    for c in range(n):
        seconds += prefill_attention_s(b, part, tokens[c], q.computed[ids[c]])
    return float(seconds)


@jit
def pass_s(b: Any, part: int, attention_s: float, tokens: int, n: int, batch: int, context: int) -> float:
    """Seconds of a pass of n chunks with `tokens` tokens in all, and of `batch` decodes with `context` between them.

    `attention_s`: of its chunks. An eager launch: the longer of GPU and host, and what cannot be hidden.
    """
    rows = n + batch
    gpu_s = dense_s(b, part, tokens + batch, False) + head_s(b, part, rows) + attention_s
    gpu_s += decode_attention_s(b, part, batch, context)
    return float(max(gpu_s, b.host_eager_s[rows]) + b.gap_eager_s[rows])

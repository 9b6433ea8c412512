"""Bullet's prefill scheduler over the waiting requests: predicted TTFT, order, and the next batch."""

from __future__ import annotations

from typing import Any

from sim.cost.step import dense_s, prefill_attention_s
from sim.engine.lanes import NEVER
from sim.engine.layout import BLOCK, N_CHUNKS, N_PARTIAL, N_RUN, NOW, WAIT_HEAD
from sim.engine.plans import add_chunk
from sim.jit import jit
from sim.policies.parts.bullet_prices import forget_pass
from sim.policies.parts.bullet_state import (
    ASKED,
    CAP,
    CLASS_LIMITS,
    COSTS,
    DEADLINE,
    DUE_SINCE,
    LIMITS,
    LOOK_AHEAD,
    MISSES,
    ORDER,
    P_ALPHA,
    P_HISTORY,
    P_TOKENS,
    PARTITION,
    QUEUE_LATE,
    SCHEDULER,
    SEQS,
    SLACKS,
    SPARE,
    TOKENS,
)


@jit
def ttft_due_s(q: Any, kf: Any, i: int) -> float:
    """When request i must have its first token: after G_p, the stricter of seconds, and seconds a prompt token.

    Never for one that was evicted and has it.
    """
    if q.generated[i] > 0:
        return NEVER
    at = LIMITS + CLASS_LIMITS * q.slo_class[i]
    return float(q.arrival_s[i] + min(kf[at], kf[at + 1] * q.prompt[i]))


@jit
def _look_ahead(q: Any, r: Any, b: Any, ki: Any, kf: Any, part: int) -> int:
    """First waiting requests in order, with predicted prefill seconds and slack to their TTFT limit; how many."""
    found, ahead, cost = 0, 0.0, 0.0
    predicts = ki[SCHEDULER] == 1 or ki[PARTITION] == 1
    r.policy_i[ASKED] += 1 if predicts else 0
    i = r.iv[WAIT_HEAD]
    while i >= 0 and found < ki[LOOK_AHEAD]:
        if predicts:
            size = q.target[i]
            chunk = min(size, ki[TOKENS])
            cost = dense_s(b, part, chunk, False) + prefill_attention_s(b, part, chunk, 0)
            cost *= r.policy_f[P_ALPHA] * size / chunk
        ahead += cost
        r.policy_i[ORDER + found] = i
        r.policy_f[COSTS + found] = cost
        r.policy_f[SLACKS + found] = ttft_due_s(q, kf, i) - r.fv[NOW] - ahead
        found += 1
        i = q.next[i]
    return found


@jit
def _swap_ahead(r: Any, n: int) -> None:
    """Request n of the look-ahead goes before its predecessor."""
    i, cost = r.policy_i[ORDER + n], r.policy_f[COSTS + n]
    slack = r.policy_f[SLACKS + n] + r.policy_f[COSTS + n - 1]
    r.policy_i[ORDER + n] = r.policy_i[ORDER + n - 1]
    r.policy_f[COSTS + n] = r.policy_f[COSTS + n - 1]
    r.policy_f[SLACKS + n] = r.policy_f[SLACKS + n - 1] - cost
    r.policy_i[ORDER + n - 1] = i
    r.policy_f[COSTS + n - 1] = cost
    r.policy_f[SLACKS + n - 1] = slack


@jit
def _sort(q: Any, r: Any, found: int) -> None:
    """By ascending predicted latency; nobody is passed whose limit that would break, nor a request that was evicted."""
    costs, slacks = r.policy_f, r.policy_f
    for n in range(1, found):
        k = n
        while k > 0:
            cost, slack = costs[COSTS + k], slacks[SLACKS + k - 1]
            if (
                cost >= costs[COSTS + k - 1]
                or 0.0 <= slack < cost
                or q.generated[r.policy_i[ORDER + k - 1]] > 0
            ):
                break
            _swap_ahead(r, k)
            k -= 1


@jit
def _take(q: Any, r: Any, a: Any, kf: Any, i: int, tokens: int) -> None:
    """Plan a chunk of request i."""
    add_chunk(a, i, tokens, q.target[i])
    r.policy_i[P_TOKENS] += tokens
    r.policy_i[P_HISTORY] += q.computed[i]
    due = ttft_due_s(q, kf, i)
    if due < r.policy_f[DEADLINE]:
        r.policy_f[DEADLINE] = due
        r.policy_f[DUE_SINCE] = q.arrival_s[i]


@jit
def next_batch_of_prompts(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any, part: int, free: int) -> None:
    """Plan prompts until the batch's arithmetic intensity reaches the roofline's ridge; the crossing one is kept.

    A prompt longer than a pass may be goes through the layers in pieces, alone. Sets whether the percentile of the
    queue's predicted TTFT misses its limit (`QUEUE_LATE`). `free`: blocks; `part`: where the prompts would run.
    """
    r.policy_i[P_TOKENS] = 0
    r.policy_i[P_HISTORY] = 0
    r.policy_f[DEADLINE] = NEVER
    r.policy_f[DUE_SINCE] = 0.0
    forget_pass(r)
    found = _look_ahead(q, r, b, ki, kf, part)
    if ki[SCHEDULER] == 1:
        _sort(q, r, found)
    late = 0
    for n in range(found):
        if r.policy_f[SLACKS + n] < 0.0:
            late += 1
    r.policy_i[QUEUE_LATE] = 1 if late > kf[MISSES] * found else 0
    if r.iv[N_PARTIAL] > 0:
        i = r.partial[0]
        _take(q, r, a, kf, i, min(q.target[i] - q.computed[i], ki[TOKENS]))
        r.policy_i[P_HISTORY] = q.computed[i]
        return
    running = r.iv[N_RUN]
    for n in range(found):
        i = r.policy_i[ORDER + n]
        size, need = q.target[i], -(-q.target[i] // r.iv[BLOCK])
        tokens = r.policy_i[P_TOKENS]
        full = tokens >= ki[CAP] or running >= ki[SEQS] or (tokens > 0 and tokens + size > ki[TOKENS])
        if full or free - need < ki[SPARE]:
            break
        _take(q, r, a, kf, i, min(size, ki[TOKENS]))
        free -= need
        running += 1
    if a.iv[N_CHUNKS] > 1:
        r.policy_i[P_HISTORY] //= a.iv[N_CHUNKS]

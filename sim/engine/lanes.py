"""Two lanes on one GPU: prefill in layer groups beside decode steps, each on its own set of SMs.

What is in flight on a lane has solo seconds left and a slowdown by its neighbour; both change only when a lane
starts, ends or moves to another SM set, so the next completion is known exactly and nothing is integrated in
small steps. Prefill takes SMs from the bottom, decode from the top; the sets overlap where their sum exceeds the
GPU. A lane changes its set only between launches, as the real mechanisms do.
"""

from __future__ import annotations

from typing import Any

from sim.cost.pairs import pair_factor
from sim.cost.step import (
    decode_attention_s,
    decode_attention_sm,
    decode_pass_s,
    decode_pass_sm,
    dense_s,
    dense_sm,
    head_s,
    head_sm,
    prefill_attention_s,
    prefill_attention_sm,
    step_s,
)
from sim.engine.cohort import fail, preempt
from sim.engine.layout import (
    BLOCK,
    BUSY_S,
    COHORT,
    CONTENTION_SM_S,
    CONTEXT,
    D_LAUNCH,
    D_PART,
    DECISIONS,
    DECODE,
    DECODE_ITEM,
    DECODE_KV,
    DECODE_LANE,
    DENSE_TOKENS,
    DUE,
    E_BLOCKS,
    E_LANE,
    E_TABLE,
    EAGER_LAUNCHES,
    ERROR,
    FLAGGED,
    FREE,
    GPU_S,
    GRAPH_LAUNCHES,
    HEAD_ROWS,
    HOST_BOUND_S,
    HOST_SM_S,
    IDLE_LANE_SM_S,
    IN_CHUNKS,
    IN_DECODE,
    IN_TOKENS,
    INBOX_NEXT,
    ITERATIONS,
    KV_BLOCK_S,
    LANE_BATCH,
    LANE_BUSY,
    LANE_CONTEXT,
    LANE_FACTOR,
    LANE_FLOATS,
    LANE_GPU,
    LANE_HELD,
    LANE_HOST,
    LANE_INTEGERS,
    LANE_KIND,
    LANE_LAYERS,
    LANE_LEFT,
    LANE_PART,
    LANE_SINCE,
    LANE_SM,
    LANE_SOLO,
    LANE_START,
    LANES,
    LANES_F,
    LAYERS_DONE,
    LOG_CAP,
    LOG_STEPS,
    MIXED_ITEM,
    MODEL_LAYERS,
    N_CHUNKS,
    N_DONE,
    N_LOG,
    N_PREEMPT,
    N_READY,
    N_RUN,
    N_STEPLOG,
    N_WAIT,
    NOW,
    P_LAYERS,
    P_MIXED,
    P_PART,
    PAIRS,
    PREFILL_ITEM,
    PREFILL_KV,
    PREFILL_LANE,
    SM_S,
    SMS,
    STEP,
    TAIL_SM_S,
    TO_BACK,
    TOTAL,
    WAITING,
)
from sim.engine.queues import push_waiting
from sim.engine.steps import commit_chunk, commit_decode, form_cohort, log_step, off_coverage, take_chunk
from sim.jit import jit

NEVER = 1e300


@jit
def lane_end(r: Any, lane: int) -> float:
    """When the lane's launch ends at its present rate; far off if it is idle."""
    if r.iv[LANES + lane * LANE_INTEGERS + LANE_BUSY] == 0:
        return NEVER
    f = LANES_F + lane * LANE_FLOATS
    end: float = r.fv[f + LANE_SINCE] + r.fv[f + LANE_LEFT] * r.fv[f + LANE_FACTOR]
    return end


@jit
def next_end(r: Any) -> float:
    """The next completion on either lane."""
    return min(lane_end(r, PREFILL_LANE), lane_end(r, DECODE_LANE))


@jit
def lane_idle(r: Any, lane: int) -> bool:
    """Is nothing in flight on the lane?"""
    return bool(r.iv[LANES + lane * LANE_INTEGERS + LANE_BUSY] == 0)


@jit
def begin_lanes(q: Any, r: Any, x: Any, limit: float) -> bool:
    """Commit what ends and take what arrives before `limit`; True if a decision is due before `limit`.

    At equal times: completions (prefill lane first), arrivals, the decision.
    """
    iv, fv = r.iv, r.fv
    while iv[ERROR] == 0:
        coming = iv[INBOX_NEXT] < len(r.inbox)
        arrival = q.arrival_s[r.inbox[iv[INBOX_NEXT]]] if coming else NEVER
        end = next_end(r)
        if end <= fv[NOW] and end < limit:
            commit_lanes(q, r, x, end)
        elif arrival <= fv[NOW] and arrival < limit:
            i = r.inbox[iv[INBOX_NEXT]]
            iv[INBOX_NEXT] += 1
            accept_lanes(q, r, x, i, arrival)
        elif iv[N_LOG] >= LOG_CAP or iv[N_DONE] >= LOG_CAP or iv[N_STEPLOG] >= LOG_CAP:
            return False
        elif iv[DUE] == 1 and iv[N_WAIT] + iv[N_RUN] > 0 and fv[NOW] < limit:
            return True
        else:
            coming_next = min(end, arrival)
            if coming_next >= min(limit, NEVER):
                return False
            _move_to(r, coming_next)
    return False


@jit
def accept_lanes(q: Any, r: Any, x: Any, i: int, now: float) -> None:
    """Request i arrives; an idle lane may start with it, a busy one goes on."""
    settle_lanes(q, r, x, now)
    _move_to(r, now)
    q.phase[i] = WAITING
    push_waiting(q, r, i, False, now)
    if lane_idle(r, PREFILL_LANE) or lane_idle(r, DECODE_LANE):
        r.iv[DUE] = 1


@jit
def settle_lanes(q: Any, r: Any, x: Any, t: float) -> None:
    """Commit every launch that ends at or before t."""
    end = next_end(r)
    while end <= t and end < NEVER:
        commit_lanes(q, r, x, end)
        end = next_end(r)


@jit
def _move_to(r: Any, t: float) -> None:
    """Let time pass until t: KV use and the SM-seconds that each lane holds."""
    iv, fv = r.iv, r.fv
    seconds = t - fv[NOW]
    if seconds <= 0.0:
        return
    fv[NOW] = t
    held = 0
    for lane in range(2):
        if not lane_idle(r, lane):
            held += r.policy_sms[iv[LANES + lane * LANE_INTEGERS + LANE_PART]]
    if held == 0:
        return
    fv[BUSY_S] += seconds
    fv[KV_BLOCK_S] += (iv[TOTAL] - iv[FREE]) * seconds
    covered = min(held, iv[SMS])
    fv[IDLE_LANE_SM_S] += (iv[SMS] - covered) * seconds
    for lane in range(2):
        if not lane_idle(r, lane):
            sms = r.policy_sms[iv[LANES + lane * LANE_INTEGERS + LANE_PART]]
            fv[LANES_F + lane * LANE_FLOATS + LANE_HELD] += seconds * sms * covered / held


@jit
def commit_lanes(q: Any, r: Any, x: Any, end: float) -> None:
    """Commit what ends at `end`, the prefill lane first."""
    end = max(end, r.fv[NOW])  # a change of rates may round an end to just before now
    _move_to(r, end)
    for lane in range(2):
        if lane_end(r, lane) <= end:
            _commit_lane(q, r, lane, end)
    r.iv[DUE] = 1
    _set_rates(r, x)


@jit
def _commit_lane(q: Any, r: Any, lane: int, end: float) -> None:
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    kind, layers, batch = iv[n + LANE_KIND], iv[n + LANE_LAYERS], iv[n + LANE_BATCH]
    _account(r, lane, end)
    if iv[LOG_STEPS] == 1:
        tokens = iv[IN_TOKENS] if kind != DECODE_ITEM else 0
        spent = (end - fv[f + LANE_START]) / fv[f + LANE_SOLO]
        sms = r.policy_sms[iv[n + LANE_PART]]
        log_step(q, r, fv[f + LANE_START], end, lane, sms, layers, tokens, batch, spent)
    iv[n + LANE_BUSY] = 0
    if kind != PREFILL_ITEM:
        iv[IN_DECODE] = 0
        commit_decode(q, r, end)
    if kind != DECODE_ITEM:
        iv[LAYERS_DONE] += layers
        if iv[LAYERS_DONE] == iv[MODEL_LAYERS]:
            # once a pass: its layer groups together read each weight once
            iv[EAGER_LAUNCHES] += 1
            iv[DENSE_TOKENS] += iv[IN_TOKENS]
            iv[HEAD_ROWS] += iv[IN_CHUNKS]
            for c in range(iv[IN_CHUNKS]):
                commit_chunk(q, r, r.chunk_id[c], r.chunk_tokens[c], end)
            iv[IN_CHUNKS] = 0
            iv[IN_TOKENS] = 0
            iv[LAYERS_DONE] = 0


@jit
def _account(r: Any, lane: int, end: float) -> None:
    """Split the SM-seconds that the launch held: contention, host, active, and the rest in waves' tails."""
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    taken, solo, gpu_s = end - fv[f + LANE_START], fv[f + LANE_SOLO], fv[f + LANE_GPU]
    held = fv[f + LANE_HELD]
    share = held / taken if taken > 0.0 else 0.0
    contention = min(held, max(0.0, taken - solo) * share)
    host = min(held - contention, max(0.0, solo - gpu_s) * share)
    active = min(held - contention - host, fv[f + LANE_SM])
    fv[CONTENTION_SM_S] += contention
    fv[HOST_SM_S] += host
    fv[SM_S] += active
    fv[TAIL_SM_S] += held - contention - host - active
    fv[GPU_S] += gpu_s
    fv[HOST_BOUND_S] += fv[f + LANE_HOST]
    iv[ITERATIONS] += 1
    batch = iv[n + LANE_BATCH]
    iv[DENSE_TOKENS] += batch
    iv[HEAD_ROWS] += batch
    if batch > 0:
        iv[DECODE_KV] += iv[n + LANE_CONTEXT]
    if iv[n + LANE_KIND] == DECODE_ITEM:
        iv[GRAPH_LAUNCHES] += 1


@jit
def _set_rates(r: Any, x: Any) -> None:
    """Slowdowns of what is in flight now; work done so far is banked where a rate changes."""
    iv, fv = r.iv, r.fv
    both = not lane_idle(r, PREFILL_LANE) and not lane_idle(r, DECODE_LANE)
    config, history, tokens = 0, 0, iv[IN_TOKENS]
    if both:
        a, b = LANES + LANE_PART, LANES + LANE_INTEGERS + LANE_PART
        config = x.config[iv[a] * len(x.sms) + iv[b]]
        history = iv[LANES + LANE_CONTEXT] // max(1, iv[IN_CHUNKS])
    n = LANES + LANE_INTEGERS
    batch = iv[n + LANE_BATCH]
    mean = iv[n + LANE_CONTEXT] // batch if both else 0
    for lane in range(2):
        if lane_idle(r, lane):
            continue
        f = LANES_F + lane * LANE_FLOATS
        factor = 1.0
        if both:
            table = x.factor_prefill if lane == PREFILL_LANE else x.factor_decode
            slow = pair_factor(x, table, config, tokens, history, batch, mean)
            # only the GPU's part of a launch is slowed by the neighbour
            factor = 1.0 + (slow - 1.0) * min(1.0, fv[f + LANE_GPU] / fv[f + LANE_SOLO])
        if factor != fv[f + LANE_FACTOR]:
            fv[f + LANE_LEFT] -= (fv[NOW] - fv[f + LANE_SINCE]) / fv[f + LANE_FACTOR]
            fv[f + LANE_SINCE] = fv[NOW]
            fv[f + LANE_FACTOR] = factor


@jit
def prefill_pass_s(q: Any, r: Any, p: Any, part: int, batch: int) -> float:
    """Solo GPU seconds of the open prefill batch on a partition, all layers, without the LM head.

    `batch` decodes ride in its linear layers; their attention is not in it.
    """
    iv = r.iv
    seconds = dense_s(p, part, iv[IN_TOKENS] + batch, False)
    for c in range(iv[IN_CHUNKS]):
        seconds += prefill_attention_s(p, part, r.chunk_tokens[c], q.computed[r.chunk_id[c]])
    seconds -= (iv[IN_CHUNKS] - 1) * p.pre_fixed_s[part]
    return float(seconds)


@jit
def _prefill_pass_sm(q: Any, r: Any, p: Any, part: int, batch: int) -> float:
    iv = r.iv
    sm_s = dense_sm(p, part, iv[IN_TOKENS] + batch, False)
    for c in range(iv[IN_CHUNKS]):
        sm_s += prefill_attention_sm(p, part, r.chunk_tokens[c], q.computed[r.chunk_id[c]])
    return float(sm_s)


@jit
def _start(r: Any, p: Any, lane: int, kind: int, part: int, gpu_s: float, sm_s: float, host_s: float) -> None:
    """`gpu_s`, `sm_s`: of the GPU; `host_s`: whole time if the host were the longer side."""
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    gap_s = p.gap_graph_s[0] if kind == DECODE_ITEM else p.gap_eager_s[0]
    solo = step_s(p, gpu_s, host_s, gap_s, iv[ITERATIONS] + lane)
    iv[n + LANE_BUSY] = 1
    iv[n + LANE_KIND] = kind
    iv[n + LANE_PART] = part
    fv[f + LANE_START] = fv[NOW]
    fv[f + LANE_SINCE] = fv[NOW]
    fv[f + LANE_LEFT] = solo
    fv[f + LANE_SOLO] = solo
    fv[f + LANE_GPU] = gpu_s
    fv[f + LANE_HOST] = max(0.0, host_s - gpu_s)
    fv[f + LANE_SM] = sm_s
    fv[f + LANE_FACTOR] = 1.0
    fv[f + LANE_HELD] = 0.0


@jit
def _open_prefill(q: Any, r: Any, a: Any) -> None:
    """Take the plan's chunks as the prefill batch that runs through the layers."""
    iv = r.iv
    tokens = 0
    for c in range(a.iv[N_CHUNKS]):
        take_chunk(q, r, a, c)
        if iv[ERROR] != 0:
            return
        size, history = r.chunk_tokens[c], q.computed[r.chunk_id[c]]
        tokens += size
        iv[PAIRS] += size * history + size * (size + 1) // 2
        iv[PREFILL_KV] += size + history
    iv[IN_CHUNKS] = a.iv[N_CHUNKS]
    iv[IN_TOKENS] = tokens
    iv[LAYERS_DONE] = 0


@jit
def _join_decodes(q: Any, r: Any, a: Any, p: Any, lane: int) -> int:
    """Form the cohort and hold the blocks of its step; returns its size."""
    iv = r.iv
    form_cohort(q, r, a)
    batch: int = iv[COHORT]
    if batch == 0:
        return 0
    need = r.block_phase[iv[STEP] % iv[BLOCK]]
    if need > iv[FREE]:
        fail(r, E_BLOCKS, r.heap_id[0])
        return 0
    if batch > p.max_seqs:
        fail(r, E_TABLE, r.heap_id[0])
        return 0
    iv[FREE] -= need
    iv[IN_DECODE] = 1
    n = LANES + lane * LANE_INTEGERS
    iv[n + LANE_BATCH] = batch
    iv[n + LANE_CONTEXT] = iv[CONTEXT] + batch
    return batch


@jit
def _launch_prefill(q: Any, r: Any, a: Any, p: Any) -> None:
    iv = r.iv
    if iv[IN_CHUNKS] == 0:
        _open_prefill(q, r, a)
    if iv[ERROR] != 0 or iv[IN_CHUNKS] == 0:
        return
    part, layers = a.iv[P_PART], min(a.iv[P_LAYERS], iv[MODEL_LAYERS] - iv[LAYERS_DONE])
    share = layers / iv[MODEL_LAYERS]
    last = iv[LAYERS_DONE] + layers == iv[MODEL_LAYERS]
    n = LANES + PREFILL_LANE * LANE_INTEGERS
    iv[n + LANE_LAYERS] = layers
    iv[n + LANE_BATCH] = 0
    batch = 0
    if a.iv[P_MIXED] == 1:
        batch = _join_decodes(q, r, a, p, PREFILL_LANE)
    rows = iv[IN_CHUNKS] + batch
    if iv[IN_TOKENS] + batch > p.max_tokens or rows > p.max_seqs:
        fail(r, E_TABLE, r.chunk_id[0])
    if iv[ERROR] != 0:
        return
    if iv[LAYERS_DONE] == 0:
        context = iv[n + LANE_CONTEXT] if batch > 0 else 0
        iv[FLAGGED] += off_coverage(q, r, p, iv[IN_TOKENS], batch, context)
    kind = MIXED_ITEM if batch > 0 else PREFILL_ITEM
    gpu_s = prefill_pass_s(q, r, p, part, batch) * share
    sm_s = _prefill_pass_sm(q, r, p, part, batch) * share
    if last:
        gpu_s += head_s(p, part, rows)
        sm_s += head_sm(p, part, rows)
    if kind == MIXED_ITEM:
        gpu_s += decode_attention_s(p, part, batch, iv[n + LANE_CONTEXT])
        sm_s += decode_attention_sm(p, part, batch, iv[n + LANE_CONTEXT])
    else:
        # a pure prefill has no decode context: the field holds the batch's history for the slowdown
        history = 0
        for c in range(iv[IN_CHUNKS]):
            history += q.computed[r.chunk_id[c]]
        iv[n + LANE_CONTEXT] = history
    _start(r, p, PREFILL_LANE, kind, part, gpu_s, sm_s, p.host_eager_s[rows] * share)


@jit
def _launch_decode(q: Any, r: Any, a: Any, p: Any) -> None:
    batch = _join_decodes(q, r, a, p, DECODE_LANE)
    if batch == 0:
        return
    n = LANES + DECODE_LANE * LANE_INTEGERS
    part, context = a.iv[D_PART], r.iv[n + LANE_CONTEXT]
    r.iv[n + LANE_LAYERS] = r.iv[MODEL_LAYERS]
    r.iv[FLAGGED] += off_coverage(q, r, p, 0, batch, context)
    gpu_s = decode_pass_s(p, part, batch, context)
    sm_s = decode_pass_sm(p, part, batch, context)
    _start(r, p, DECODE_LANE, DECODE_ITEM, part, gpu_s, sm_s, p.host_graph_s[batch])


@jit
def _check_lanes(q: Any, r: Any, a: Any, x: Any) -> None:
    """Busy lanes, undeclared pairs of sets and victims in flight are the policy's mistakes."""
    iv = r.iv
    prefill, decode = a.iv[P_LAYERS] > 0, a.iv[D_LAUNCH] == 1
    p_idle, d_idle = lane_idle(r, PREFILL_LANE), lane_idle(r, DECODE_LANE)
    if (prefill and not p_idle) or (decode and not d_idle):
        fail(r, E_LANE, 0)
    if prefill and a.iv[P_MIXED] == 1:
        # a mixed pass owns the GPU and goes through all layers at once
        if not d_idle or decode or iv[LAYERS_DONE] > 0 or a.iv[P_LAYERS] < iv[MODEL_LAYERS]:
            fail(r, E_LANE, 0)
    elif prefill or decode:
        p_part = a.iv[P_PART] if prefill else iv[LANES + LANE_PART]
        d_part = a.iv[D_PART] if decode else iv[LANES + LANE_INTEGERS + LANE_PART]
        both = (prefill or not p_idle) and (decode or not d_idle)
        if both and x.config[p_part * len(x.sms) + d_part] < 0:
            fail(r, E_LANE, 0)
    in_decode = iv[IN_DECODE] == 1
    for n in range(a.iv[N_PREEMPT]):
        i = a.preempt[n]
        if in_decode and q.phase[i] == DECODE:
            fail(r, E_LANE, i)
        for c in range(iv[IN_CHUNKS]):
            if r.chunk_id[c] == i:
                fail(r, E_LANE, i)


@jit
def execute_lanes(q: Any, r: Any, a: Any, p: Any, x: Any) -> bool:
    """Carry out the plan on the idle lanes. False if nothing is in flight afterwards."""
    iv = r.iv
    iv[DECISIONS] += 1
    iv[DUE] = 0
    _check_lanes(q, r, a, x)
    if iv[ERROR] != 0:
        return False
    for n in range(a.iv[N_PREEMPT]):
        preempt(q, r, a.preempt[n], a.iv[TO_BACK] == 0, r.fv[NOW])
    # decode first: its graph is launched in well under a millisecond, a prefill takes longer to launch
    if a.iv[D_LAUNCH] == 1 and iv[COHORT] + iv[N_READY] > 0:
        _launch_decode(q, r, a, p)
    if iv[ERROR] == 0 and a.iv[P_LAYERS] > 0:
        _launch_prefill(q, r, a, p)
    if iv[ERROR] != 0:
        return False
    _set_rates(r, x)
    return not (lane_idle(r, PREFILL_LANE) and lane_idle(r, DECODE_LANE))

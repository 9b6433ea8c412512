"""The lane: one thing running at a time. Launch a plan, price it, commit what has ended.

A launch may be a burst: several steps of the same plan, priced at once. Only their ends are recorded; nothing is
committed before someone asks for the state at a time (`settle`) and an arrival cuts the burst at the first
boundary at or after it (`accept`). Step by step and in bursts the same additions happen in the same order,
so the results are the same to the bit.
"""

from __future__ import annotations

from typing import Any

from sim.cost.clock import decode_factor, pass_factor, spent_after
from sim.cost.step import (
    chunked_pass_s,
    decode_attention_s,
    decode_attention_sm,
    dense_s,
    dense_sm,
    fallback_code,
    fused_saving_s,
    head_s,
    head_sm,
    overhang_s,
    overhang_sm,
    prefill_attention_s,
    prefill_attention_sm,
    step_s,
)
from sim.engine.cohort import fail, preempt
from sim.engine.layout import (
    AHEAD_SPENT,
    BLOCK,
    BURST,
    BURST_CAP,
    BUSY,
    BUSY_S,
    COHORT,
    COMMITTED,
    CONTEXT,
    DECISIONS,
    DECODE_ALL,
    DECODE_KV,
    DENSE_TOKENS,
    E_BLOCKS,
    E_TABLE,
    EAGER_LAUNCHES,
    ERROR,
    FAST_PATHS,
    FLAGGED,
    FREE,
    GPU_S,
    GRAPH_LAUNCHES,
    GUARD,
    HANDED_BLOCKS,
    HEAD_ROWS,
    HEAT_AT,
    HOST_BOUND_S,
    IN_CHUNKS,
    IN_DECODE,
    IN_FALLBACK,
    IN_HOST_S,
    IN_SM_S,
    IN_TOKENS,
    INBOX_NEXT,
    ITERATIONS,
    KV_BLOCK_S,
    LOG_CAP,
    LOG_STEPS,
    METER_CAP,
    METER_DUE,
    METER_END,
    MODEL_LAYERS,
    N_CHUNKS,
    N_DONE,
    N_LOG,
    N_METER,
    N_PREEMPT,
    N_READY,
    N_RUN,
    N_STEPLOG,
    N_WAIT,
    NOW,
    OVERHANG,
    PAIRS,
    PREFILL_KV,
    REPEAT,
    SMS,
    SPENT,
    STEP,
    STEP_START,
    TO_BACK,
    TOTAL,
    WAITING,
    WHOLE_GPU,
)
from sim.engine.meter import read_after, read_before
from sim.engine.queues import push_waiting
from sim.engine.ragged import measure_overhang
from sim.engine.sm_time import count_step
from sim.engine.steps import commit_chunk, commit_decode, form_cohort, log_step, off_coverage, take_chunk
from sim.jit import jit


@jit
def begin(q: Any, r: Any, p: Any, limit: float) -> bool:
    """Commit what ends and take what arrives before `limit`; True if a decision is then due before `limit`.

    At equal times completions come first, then arrivals, then the decision.
    """
    iv = r.iv
    while iv[ERROR] == 0:
        coming = iv[INBOX_NEXT] < len(r.inbox)
        arrival = q.arrival_s[r.inbox[iv[INBOX_NEXT]]] if coming else limit
        if iv[BUSY] == 1:
            end = r.ends[iv[BURST] - 1]
            if end < min(arrival, limit):
                settle(q, r, p, end)
            elif coming and arrival < limit:
                _take_inbox(q, r, p)
            else:
                return False
        elif coming and arrival <= r.fv[NOW] and arrival < limit:
            _take_inbox(q, r, p)
        elif max(iv[N_LOG], iv[N_DONE], iv[N_STEPLOG]) >= LOG_CAP or iv[N_METER] >= METER_CAP:
            return False
        elif iv[N_WAIT] + iv[N_RUN] > 0 and r.fv[NOW] < limit:
            return True
        elif coming and arrival < limit:
            _take_inbox(q, r, p)
        else:
            return False
    return False


@jit
def _take_inbox(q: Any, r: Any, p: Any) -> None:
    i = r.inbox[r.iv[INBOX_NEXT]]
    r.iv[INBOX_NEXT] += 1
    accept(q, r, p, i, q.arrival_s[i])


@jit
def accept(q: Any, r: Any, p: Any, i: int, now: float) -> None:
    """Request i arrives, and the next plan sees it."""
    interrupt(q, r, p, now)
    q.phase[i] = WAITING
    push_waiting(q, r, i, False, now)


@jit
def interrupt(q: Any, r: Any, p: Any, now: float) -> None:
    """Something has changed: a burst in flight is cut at this or its next boundary, so that the plan there sees it."""
    settle(q, r, p, now)
    if r.iv[BUSY] == 1:
        done = r.iv[COMMITTED]
        if done > 0 and r.ends[done - 1] == now:
            r.iv[BURST] = done
            r.iv[BUSY] = 0
            r.fv[NOW] = now
        else:
            r.iv[BURST] = done + 1
    elif now > r.fv[NOW]:
        r.fv[NOW] = now


@jit
def settle(q: Any, r: Any, p: Any, t: float) -> None:
    """Bring the state to time t: commit every step in flight that ends at or before it."""
    iv = r.iv
    if iv[BUSY] == 0:
        return
    while iv[COMMITTED] < iv[BURST] and r.ends[iv[COMMITTED]] <= t:
        _commit_step(q, r, p, r.ends[iv[COMMITTED]])
    if iv[COMMITTED] == iv[BURST]:
        iv[BUSY] = 0
        r.fv[NOW] = r.ends[iv[BURST] - 1]


@jit
def _commit_step(q: Any, r: Any, p: Any, end: float) -> None:
    iv, fv = r.iv, r.fv
    n = iv[COMMITTED]
    start = fv[STEP_START]
    seconds = end - start
    batch = iv[COHORT] if iv[IN_DECODE] == 1 else 0
    chunks, tokens = iv[IN_CHUNKS], iv[IN_TOKENS]
    context = iv[CONTEXT] + batch if batch > 0 else 0
    gpu_s, host_s = r.step_gpu_s[n], fv[IN_HOST_S]
    metered = end >= fv[METER_DUE]
    if metered and (start > fv[METER_END] or start == 0.0):
        read_before(r, start)
    if batch > 0:
        iv[FREE] -= r.block_phase[iv[STEP] % iv[BLOCK]]
    if chunks == 0:
        attention = _decodes_sm(r, p, batch, context) * r.step_hot[n]
        sm_s = fv[IN_SM_S] * r.step_hot[n] + attention
        iv[GRAPH_LAUNCHES] += 1
    else:
        sm_s, attention = r.step_sm_s[n], r.step_attention_sm_s[n]
        iv[EAGER_LAUNCHES] += 1
        if batch > 0 and p.mix_on == 1:
            iv[FAST_PATHS + iv[IN_FALLBACK]] += 1
    iv[ITERATIONS] += 1
    iv[FLAGGED] += off_coverage(q, r, p, tokens, batch, context)
    iv[DENSE_TOKENS] += tokens + batch
    iv[HEAD_ROWS] += chunks + batch
    iv[DECODE_KV] += context
    fv[BUSY_S] += seconds
    fv[GPU_S] += gpu_s
    if host_s > gpu_s:
        fv[HOST_BOUND_S] += host_s - gpu_s
    sms = iv[SMS]
    count_step(r, sms * seconds, sms * max(0.0, seconds - gpu_s), sm_s, attention, chunks > 0, 1.0)
    fv[KV_BLOCK_S] += (iv[TOTAL] - iv[FREE] - iv[HANDED_BLOCKS]) * seconds
    if iv[LOG_STEPS] == 1:
        log_step(q, r, start, end, 0, iv[SMS], iv[MODEL_LAYERS], tokens, batch, context, 1.0, 0)
    if batch > 0:
        commit_decode(q, r, end)
    for c in range(chunks):
        i, size = r.chunk_id[c], r.chunk_tokens[c]
        keys = size + q.computed[i]
        iv[PAIRS] += size * keys - size * (size - 1) // 2
        iv[PREFILL_KV] += keys
        commit_chunk(q, r, i, size, end)
    if metered:
        read_after(r, end)
    fv[METER_END] = end
    fv[STEP_START] = end
    fv[SPENT], fv[HEAT_AT] = r.step_spent[n], end
    iv[COMMITTED] = n + 1


@jit
def _decodes_sm(r: Any, p: Any, batch: int, context: int) -> float:
    """SM-seconds of the attention of the cohort, which is `batch`."""
    sm_s = decode_attention_sm(p, WHOLE_GPU, batch, context)
    return float(sm_s + overhang_sm(p, WHOLE_GPU, batch, r.iv[OVERHANG]))


@jit
def count_in_flight(q: Any, r: Any, p: Any, now: float) -> None:
    """Add what the step in flight has used until `now`: for a copy of the state, since its commit adds the whole."""
    iv, fv = r.iv, r.fv
    if iv[BUSY] == 0 or now <= fv[STEP_START]:
        return
    n, start = iv[COMMITTED], fv[STEP_START]
    end, gpu_s = r.ends[n], r.step_gpu_s[n]
    batch = iv[COHORT] if iv[IN_DECODE] == 1 else 0
    if iv[IN_CHUNKS] == 0:
        attention = _decodes_sm(r, p, batch, iv[CONTEXT] + batch) * r.step_hot[n]
        sm_s = fv[IN_SM_S] * r.step_hot[n] + attention
    else:
        sm_s, attention = r.step_sm_s[n], r.step_attention_sm_s[n]
    held, host = iv[SMS] * (end - start), iv[SMS] * max(0.0, end - start - gpu_s)
    count_step(r, held, host, sm_s, attention, iv[IN_CHUNKS] > 0, (now - start) / (end - start))
    fv[BUSY_S] += now - start


@jit
def execute(q: Any, r: Any, a: Any, p: Any, look_ahead: float) -> bool:
    """Carry out the plan: evict, admit, allocate, price, launch. False if nothing was launched."""
    iv, fv = r.iv, r.fv
    now = fv[NOW]
    iv[DECISIONS] += 1
    for n in range(a.iv[N_PREEMPT]):
        preempt(q, r, a.preempt[n], a.iv[TO_BACK] == 0, now)
    tokens, chunks = 0, a.iv[N_CHUNKS]
    for c in range(chunks):
        take_chunk(q, r, a, c)
        if iv[ERROR] != 0:
            return False
        tokens += r.chunk_tokens[c]
        if tokens > p.max_tokens:
            fail(r, E_TABLE, r.chunk_id[c])
            return False
    batch = 0
    if a.iv[DECODE_ALL] == 1 and iv[COHORT] + iv[N_READY] > 0:
        form_cohort(q, r, a)
        batch = iv[COHORT]
        measure_overhang(q, r, p, chunks == 0)
        need = r.block_phase[iv[STEP] % iv[BLOCK]]
        if need > iv[FREE]:
            fail(r, E_BLOCKS, r.heap_id[0] if batch > 0 else 0)
    if iv[ERROR] != 0 or chunks + batch == 0:
        return False
    if tokens + batch > p.max_tokens or chunks + batch > p.max_seqs:
        fail(r, E_TABLE, r.chunk_id[0] if chunks > 0 else r.heap_id[0])
        return False
    iv[IN_DECODE] = 1 if batch > 0 else 0
    iv[IN_CHUNKS] = chunks
    iv[IN_TOKENS] = tokens
    fv[STEP_START] = now
    iv[BUSY] = 1
    iv[COMMITTED] = 0
    if chunks == 0:
        _price_decodes(r, a, p, batch, now, look_ahead)
    else:
        _price_chunks(q, r, a, p, batch, now, look_ahead)
    return True


@jit
def _most_steps(q: Any, r: Any, a: Any, batch: int) -> int:
    """How often the plan may repeat unasked: until a member finishes; with chunks, of one prompt only, to the last that
    is as large, and in blocks that are held already."""
    iv = r.iv
    steps: int = min(a.iv[REPEAT], BURST_CAP)
    if batch > 0:
        steps = min(steps, r.heap_key[0] - iv[STEP])
    if iv[IN_CHUNKS] > 0 and steps > 1:
        i, size = r.chunk_id[0], r.chunk_tokens[0]
        last = min(q.target[i], q.blocks[i] * iv[BLOCK])
        steps = min(steps, (last - q.computed[i]) // size) if iv[IN_CHUNKS] == 1 else 1
    return max(1, steps)


@jit
def _price_chunks(q: Any, r: Any, a: Any, p: Any, batch: int, now: float, look_ahead: float) -> None:
    """Prices and ends of the steps with the plan's chunks, one or several."""
    iv = r.iv
    steps = _most_steps(q, r, a, batch)
    context, step, free = iv[CONTEXT] + batch, iv[STEP], iv[FREE]
    rows = iv[IN_CHUNKS] + batch
    host_s, gap_s = p.host_eager_s[rows], p.gap_eager_s[rows]
    r.fv[IN_HOST_S] = host_s
    iv[IN_FALLBACK] = fallback_code(p, iv[IN_CHUNKS]) if batch > 0 and p.mix_on == 1 else 0
    _rest(r, p, now)
    end, n, done = now, 0, 0
    while True:
        free -= r.block_phase[(step + n) % iv[BLOCK]]
        _price_chunked(q, r, p, n, done, batch, context)
        if p.heat_on == 1:
            _heat_chunked(r, p, n, iv[IN_TOKENS] + batch)
        seconds = step_s(p, r.step_gpu_s[n], host_s, gap_s, iv[ITERATIONS] + n)
        end += seconds
        if p.heat_on == 1:
            _spend(r, p, n, p.heat_draw[iv[IN_TOKENS] + batch], seconds)
        r.ends[n] = end
        n += 1
        if n >= steps or end >= look_ahead:
            break
        if free - r.block_phase[(step + n) % iv[BLOCK]] < a.iv[GUARD]:
            break
        context += batch
        done += iv[IN_TOKENS]
    iv[BURST] = n


@jit
def _rest(r: Any, p: Any, now: float) -> None:
    """What the launch finds spent, with nothing run since the last step."""
    fv = r.fv
    fv[AHEAD_SPENT] = fv[SPENT]
    if p.heat_on == 1 and now > fv[HEAT_AT]:
        fv[AHEAD_SPENT] = spent_after(p, fv[SPENT], 0.0, 0.0, now - fv[HEAT_AT])


@jit
def _spend(r: Any, p: Any, n: int, draw: float, seconds: float) -> None:
    """What is spent behind step n of so many seconds, in which the GPU draws so much."""
    gpu_s = r.step_gpu_s[n]
    r.fv[AHEAD_SPENT] = spent_after(p, r.fv[AHEAD_SPENT], draw, gpu_s, (seconds - gpu_s) * p.heat_gap)
    r.step_spent[n] = r.fv[AHEAD_SPENT]


@jit
def _heat_chunked(r: Any, p: Any, n: int, tokens: int) -> None:
    """Step n of the launch at the clock that it finds."""
    spent_s, gpu_s = r.fv[AHEAD_SPENT], r.step_gpu_s[n]
    factor = pass_factor(p, spent_s, p.heat_draw[tokens], p.heat_gain[tokens], gpu_s)
    r.step_gpu_s[n] *= factor
    r.step_sm_s[n] *= factor
    r.step_attention_sm_s[n] *= factor


@jit
def _price_chunked(q: Any, r: Any, p: Any, n: int, done: int, batch: int, context: int) -> None:
    """Price step n of the launch, before which `done` tokens of its chunk are computed."""
    iv = r.iv
    chunks, tokens = iv[IN_CHUNKS], iv[IN_TOKENS]
    prefill_s, prefill_sm, pairs = 0.0, 0.0, 0
    for c in range(chunks):
        size, history = r.chunk_tokens[c], q.computed[r.chunk_id[c]] + done
        prefill_s += prefill_attention_s(p, WHOLE_GPU, size, history)
        prefill_sm += prefill_attention_sm(p, WHOLE_GPU, size, history)
        pairs += size * history + size * (size + 1) // 2
    over = iv[OVERHANG]
    r.step_gpu_s[n] = chunked_pass_s(p, WHOLE_GPU, chunks, tokens, pairs, prefill_s, batch, context, over)
    sm_s = dense_sm(p, WHOLE_GPU, tokens + batch, False) + head_sm(p, WHOLE_GPU, chunks + batch) + prefill_sm
    attention = 0.0
    if batch > 0:
        attention = _decodes_sm(r, p, batch, context)
        if p.mix_on == 1:
            # what runs beside prefill does not hold SMs of its own
            apart_s = prefill_s + decode_attention_s(p, WHOLE_GPU, batch, context)
            apart_s += overhang_s(p, WHOLE_GPU, batch, over)
            saved = fused_saving_s(p, chunks, tokens, pairs, batch, context, apart_s)
            attention -= min(attention, max(0.0, saved) * iv[SMS])
        sm_s += attention
    r.step_attention_sm_s[n] = attention
    r.step_sm_s[n] = sm_s


@jit
def _price_decodes(r: Any, a: Any, p: Any, batch: int, now: float, look_ahead: float) -> None:
    """Prices and ends of the decode steps that the plan may repeat: until a member finishes, blocks run out or
    look-ahead."""
    iv = r.iv
    context, step, free = iv[CONTEXT] + batch, iv[STEP], iv[FREE]
    host_s, gap_s = p.host_graph_s[batch], p.gap_graph_s[batch]
    steps = min(a.iv[REPEAT], BURST_CAP, r.heap_key[0] - step)
    # but for attention, all steps of a batch are alike
    fixed_s = dense_s(p, WHOLE_GPU, batch, True) + head_s(p, WHOLE_GPU, batch)
    over_s = overhang_s(p, WHOLE_GPU, batch, iv[OVERHANG])
    r.fv[IN_SM_S] = dense_sm(p, WHOLE_GPU, batch, True) + head_sm(p, WHOLE_GPU, batch)
    r.fv[IN_HOST_S] = host_s
    _rest(r, p, now)
    end, n = now, 0
    while True:
        free -= r.block_phase[(step + n) % iv[BLOCK]]
        gpu_s = fixed_s + (decode_attention_s(p, WHOLE_GPU, batch, context) + over_s)
        if p.heat_on == 1:
            r.step_hot[n] = decode_factor(p, r.fv[AHEAD_SPENT])
            gpu_s *= r.step_hot[n]
        seconds = step_s(p, gpu_s, host_s, gap_s, iv[ITERATIONS] + n)
        end += seconds
        r.step_gpu_s[n] = gpu_s
        if p.heat_on == 1:
            _spend(r, p, n, -p.heat_rest[batch], seconds)
        r.ends[n] = end
        n += 1
        context += batch
        if n >= steps or end >= look_ahead:
            break
        if free - r.block_phase[(step + n) % iv[BLOCK]] < a.iv[GUARD]:
            break
    iv[BURST] = n

"""Launches on two lanes: check the plan, open or park a prefill batch, price, start."""

from __future__ import annotations

from typing import Any

from sim.cost.step import (
    decode_attention_s,
    decode_attention_sm,
    decode_pass_s,
    decode_pass_sm,
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
from sim.engine.cohort import fail
from sim.engine.heat import lanes_rate, launch_heat, settle_heat
from sim.engine.layout import (
    BLOCK,
    CHAIN_AT,
    CHAIN_BLOCKS,
    CHAIN_CAP,
    CHAIN_LEFT,
    CHAIN_WIDTH,
    COHORT,
    CONTEXT,
    D_DELAY_NS,
    D_LAUNCH,
    D_PART,
    D_STEPS,
    DECODE,
    DECODE_ITEM,
    DECODE_LANE,
    E_BLOCKS,
    E_LANE,
    E_TABLE,
    E_TWICE,
    ERROR,
    FAST_PATHS,
    FLAGGED,
    FREE,
    IN_CHUNKS,
    IN_DECODE,
    IN_FALLBACK,
    IN_TOKENS,
    ITERATIONS,
    LANE_ATTENTION,
    LANE_BATCH,
    LANE_BESIDE,
    LANE_BUSY,
    LANE_CHUNKS,
    LANE_CLASHED,
    LANE_CONTEXT,
    LANE_FACTOR,
    LANE_FASTER,
    LANE_FLOATS,
    LANE_GPU,
    LANE_HELD,
    LANE_HOST,
    LANE_HOT,
    LANE_INTEGERS,
    LANE_KIND,
    LANE_LAYERS,
    LANE_LEFT,
    LANE_LENT,
    LANE_PART,
    LANE_REASON,
    LANE_SINCE,
    LANE_SM,
    LANE_SOLO,
    LANE_START,
    LANE_SWITCH,
    LANE_TOKENS,
    LANES,
    LANES_F,
    LAYERS_DONE,
    LEND,
    MIXED_ITEM,
    MODEL_LAYERS,
    N_CHUNKS,
    N_PREEMPT,
    NOW,
    OVERHANG,
    OVERRUN_BLOCKS,
    P_DELAY_NS,
    P_LAYERS,
    P_MIXED,
    P_PART,
    PAIRS,
    PARK,
    PARKED,
    PARKED_LAYERS,
    PARKED_TOKENS,
    PREFILL_ITEM,
    PREFILL_KV,
    PREFILL_LANE,
    REASON,
    SMS,
    STEP,
    SWITCH_S,
    UNPOLLED,
    WHOLE_GPU,
)
from sim.engine.ragged import measure_overhang
from sim.engine.steps import form_cohort, off_coverage, take_chunk
from sim.jit import jit


@jit
def check_lanes(q: Any, r: Any, a: Any, x: Any) -> None:
    """Busy lanes, undeclared pairs of sets and victims in flight are the policy's mistakes."""
    iv = r.iv
    prefill, decode = a.iv[P_LAYERS] > 0, a.iv[D_LAUNCH] == 1
    p_busy = iv[LANES + LANE_BUSY] == 1
    d_busy = iv[LANES + LANE_INTEGERS + LANE_BUSY] == 1
    if (prefill and (p_busy or iv[UNPOLLED] == 1)) or (decode and d_busy):
        fail(r, E_LANE, 0)
    if prefill and a.iv[P_MIXED] == 1:
        # a mixed pass owns the GPU and goes through all layers at once
        if d_busy or decode or iv[LAYERS_DONE] > 0 or a.iv[P_LAYERS] < iv[MODEL_LAYERS]:
            fail(r, E_LANE, 0)
    elif prefill or decode:
        p_part = a.iv[P_PART] if prefill else iv[LANES + LANE_PART]
        d_part = a.iv[D_PART] if decode else iv[LANES + LANE_INTEGERS + LANE_PART]
        both = (prefill or p_busy) and (decode or d_busy)
        if both and x.config[p_part * len(x.sms) + d_part] < 0:
            fail(r, E_LANE, 0)
    if a.iv[PARK] == 1 and (p_busy or iv[PARKED] > 0 or a.iv[N_CHUNKS] == 0):
        fail(r, E_LANE, 0)
    if a.iv[D_STEPS] > CHAIN_CAP:
        fail(r, E_LANE, 0)
    in_decode = iv[IN_DECODE] == 1
    for n in range(a.iv[N_PREEMPT]):
        i = a.preempt[n]
        if in_decode and q.phase[i] == DECODE:
            fail(r, E_LANE, i)
        for c in range(iv[IN_CHUNKS]):
            if r.chunk_id[c] == i:
                fail(r, E_LANE, i)
        for c in range(iv[PARKED]):
            if r.park_id[c] == i:
                fail(r, E_LANE, i)


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
def start_item(r: Any, lane: int, solo: float, gpu_s: float, host_s: float, sm_s: float, att: float) -> None:
    """Put an item on a lane, which takes `solo` seconds alone: `gpu_s` of the GPU, `host_s` more for the host.

    `sm_s`, `att`: SM-seconds active, and of those in decode attention.
    """
    fv = r.fv
    f = LANES_F + lane * LANE_FLOATS
    r.iv[LANES + lane * LANE_INTEGERS + LANE_BUSY] = 1
    fv[f + LANE_START] = fv[NOW]
    fv[f + LANE_SINCE] = fv[NOW]
    fv[f + LANE_LEFT] = solo
    fv[f + LANE_SOLO] = solo
    fv[f + LANE_GPU] = gpu_s
    fv[f + LANE_HOST] = host_s
    fv[f + LANE_SM] = sm_s
    fv[f + LANE_ATTENTION] = att
    fv[f + LANE_FACTOR] = 1.0
    fv[f + LANE_SWITCH] = 0.0
    fv[f + LANE_HELD] = 0.0
    fv[f + LANE_CLASHED] = 0.0
    fv[f + LANE_LENT] = 0.0
    fv[f + LANE_BESIDE] = 0.0


@jit
def _start(
    r: Any,
    a: Any,
    p: Any,
    lane: int,
    kind: int,
    part: int,
    gpu_s: float,
    sm_s: float,
    att: float,
    host_s: float,
    gap_s: float,
) -> None:
    """`host_s`: whole time if the host were the longer side; `gap_s` more in any case, and what the plan says.

    A lane that moves to another SM set pays for it.
    """
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    hot = 1.0
    if p.heat_on == 1:
        settle_heat(r, fv[NOW])
        hot = launch_heat(r, p, lane, part, gpu_s)
        gpu_s, sm_s, att = gpu_s * hot, sm_s * hot, att * hot
    delay = 1e-9 * (a.iv[P_DELAY_NS] if lane == PREFILL_LANE else a.iv[D_DELAY_NS])
    solo = step_s(p, gpu_s, host_s, gap_s, iv[ITERATIONS] + lane) + delay
    moved = iv[n + LANE_PART] >= 0 and iv[n + LANE_PART] != part
    switch = fv[SWITCH_S] if moved else 0.0
    iv[n + LANE_KIND] = kind
    iv[n + LANE_PART] = part
    iv[n + LANE_REASON] = a.iv[REASON]
    start_item(r, lane, solo + switch, gpu_s, max(0.0, host_s - gpu_s) + delay, sm_s, att)
    fv[f + LANE_SWITCH] = switch
    fv[f + LANE_FASTER] = 1.0
    fv[f + LANE_HOT] = hot
    lanes_rate(r)


@jit
def _park(r: Any, a: Any) -> None:
    """Set the open prefill batch aside; it goes on when the plan's chunks are done."""
    iv = r.iv
    for c in range(iv[IN_CHUNKS]):
        r.park_id[c] = r.chunk_id[c]
        r.park_tokens[c] = r.chunk_tokens[c]
        for n in range(a.iv[N_CHUNKS]):
            if a.chunk_id[n] == r.chunk_id[c]:
                fail(r, E_TWICE, r.chunk_id[c])
    iv[PARKED] = iv[IN_CHUNKS]
    iv[PARKED_TOKENS] = iv[IN_TOKENS]
    iv[PARKED_LAYERS] = iv[LAYERS_DONE]
    iv[IN_CHUNKS] = 0


@jit
def resume_parked(r: Any) -> None:
    """The parked batch is the open one again, if there is one; else none is open."""
    iv = r.iv
    for c in range(iv[PARKED]):
        r.chunk_id[c] = r.park_id[c]
        r.chunk_tokens[c] = r.park_tokens[c]
    iv[IN_CHUNKS] = iv[PARKED]
    iv[IN_TOKENS] = iv[PARKED_TOKENS]
    iv[LAYERS_DONE] = iv[PARKED_LAYERS]
    iv[PARKED] = 0
    iv[PARKED_TOKENS] = 0
    iv[PARKED_LAYERS] = 0


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
def _join_decodes(q: Any, r: Any, a: Any, p: Any, lane: int, steps: int) -> int:
    """Form the cohort and hold the blocks of its next `steps` steps; returns its size."""
    iv = r.iv
    form_cohort(q, r, a)
    batch: int = iv[COHORT]
    if batch == 0:
        return 0
    now = r.block_phase[iv[STEP] % iv[BLOCK]]
    ahead = 0
    for k in range(1, steps):
        ahead += r.block_phase[(iv[STEP] + k) % iv[BLOCK]]
    if now + ahead > iv[FREE]:
        fail(r, E_BLOCKS, r.heap_id[0])
        return 0
    if batch > p.max_seqs:
        fail(r, E_TABLE, r.heap_id[0])
        return 0
    iv[FREE] -= now + ahead
    iv[CHAIN_BLOCKS] = ahead
    iv[CHAIN_LEFT] = steps - 1
    iv[CHAIN_AT] = 0
    iv[IN_DECODE] = 1
    measure_overhang(q, r, p, lane == DECODE_LANE)
    n = LANES + lane * LANE_INTEGERS
    iv[n + LANE_BATCH] = batch
    iv[n + LANE_CONTEXT] = iv[CONTEXT] + batch
    return batch


@jit
def _fused_saving_s(q: Any, r: Any, p: Any, part: int, batch: int, context: int) -> float:
    """Seconds that the open batch's pass with decodes saves by attention in another mode; counts fallbacks."""
    iv = r.iv
    if p.mix_on == 0:
        return 0.0
    iv[IN_FALLBACK] = fallback_code(p, iv[IN_CHUNKS])
    iv[FAST_PATHS + iv[IN_FALLBACK]] += 1
    pairs, apart_s = 0, decode_attention_s(p, part, batch, context)
    apart_s += overhang_s(p, part, batch, iv[OVERHANG])
    for c in range(iv[IN_CHUNKS]):
        size, history = r.chunk_tokens[c], q.computed[r.chunk_id[c]]
        pairs += size * history + size * (size + 1) // 2
        apart_s += prefill_attention_s(p, part, size, history)
    return float(fused_saving_s(p, iv[IN_CHUNKS], iv[IN_TOKENS], pairs, batch, context, apart_s))


@jit
def launch_prefill(q: Any, r: Any, a: Any, p: Any) -> None:
    """The next layers of the open batch, or of the plan's chunks; with the decodes aboard if the plan says so."""
    iv = r.iv
    if a.iv[PARK] == 1 and iv[IN_CHUNKS] > 0:
        _park(r, a)
    if iv[ERROR] == 0 and iv[IN_CHUNKS] == 0:
        _open_prefill(q, r, a)
    if iv[ERROR] != 0 or iv[IN_CHUNKS] == 0:
        return
    part, layers = a.iv[P_PART], min(a.iv[P_LAYERS], iv[MODEL_LAYERS] - iv[LAYERS_DONE])
    share = layers / iv[MODEL_LAYERS]
    last = iv[LAYERS_DONE] + layers == iv[MODEL_LAYERS]
    n = LANES + PREFILL_LANE * LANE_INTEGERS
    iv[n + LANE_LAYERS] = layers
    iv[n + LANE_TOKENS] = iv[IN_TOKENS]
    iv[n + LANE_CHUNKS] = iv[IN_CHUNKS]
    iv[n + LANE_BATCH] = 0
    batch = 0
    if a.iv[P_MIXED] == 1:
        batch = _join_decodes(q, r, a, p, PREFILL_LANE, 1)
    rows = iv[IN_CHUNKS] + batch
    if iv[IN_TOKENS] + batch > p.max_tokens or rows > p.max_seqs:
        fail(r, E_TABLE, r.chunk_id[0])
    if iv[ERROR] != 0:
        return
    if iv[LAYERS_DONE] == 0:
        context = iv[n + LANE_CONTEXT] if batch > 0 else 0
        iv[FLAGGED] += off_coverage(q, r, p, iv[IN_TOKENS], batch, context)
    kind = MIXED_ITEM if batch > 0 else PREFILL_ITEM
    iv[IN_FALLBACK] = 0
    gpu_s = prefill_pass_s(q, r, p, part, batch) * share
    sm_s, att = _prefill_pass_sm(q, r, p, part, batch) * share, 0.0
    if last:
        gpu_s += head_s(p, part, rows)
        sm_s += head_sm(p, part, rows)
    if kind == MIXED_ITEM:
        gpu_s += decode_attention_s(p, part, batch, iv[n + LANE_CONTEXT])
        gpu_s += overhang_s(p, part, batch, iv[OVERHANG])
        att = decode_attention_sm(p, part, batch, iv[n + LANE_CONTEXT])
        att += overhang_sm(p, part, batch, iv[OVERHANG])
        saved = _fused_saving_s(q, r, p, part, batch, iv[n + LANE_CONTEXT])
        gpu_s -= saved
        att -= min(att, max(0.0, saved) * iv[SMS])
        sm_s += att
    else:
        # a pure prefill has no decode context: the field holds the batch's history for the slowdown
        history = 0
        for c in range(iv[IN_CHUNKS]):
            history += q.computed[r.chunk_id[c]]
        iv[n + LANE_CONTEXT] = history
    # a pass in groups has one pass's host time and gap
    host_s, gap_s = p.host_eager_s[rows] * share, p.gap_eager_s[rows] * share
    if layers < iv[MODEL_LAYERS]:
        gap_s += p.gap_group_s
    _start(r, a, p, PREFILL_LANE, kind, part, gpu_s, sm_s, att, host_s, gap_s)


@jit
def launch_decode(q: Any, r: Any, a: Any, p: Any) -> None:
    """A step of all that can decode, and the steps launched ahead behind it."""
    iv, steps = r.iv, max(1, a.iv[D_STEPS])
    batch = _join_decodes(q, r, a, p, DECODE_LANE, steps)
    if batch == 0:
        return
    n = LANES + DECODE_LANE * LANE_INTEGERS
    part, context = a.iv[D_PART], iv[n + LANE_CONTEXT]
    iv[n + LANE_LAYERS] = iv[MODEL_LAYERS]
    iv[n + LANE_TOKENS] = 0
    iv[n + LANE_CHUNKS] = 0
    iv[FLAGGED] += off_coverage(q, r, p, 0, batch, context)
    over, over_sm = overhang_s(p, part, batch, iv[OVERHANG]), overhang_sm(p, part, batch, iv[OVERHANG])
    gpu_s = decode_pass_s(p, part, batch, context) + over
    sm_s = decode_pass_sm(p, part, batch, context) + over_sm
    att = decode_attention_sm(p, part, batch, context) + over_sm
    host_s, gap_s = p.host_graph_s[batch], p.gap_graph_s[batch]
    _start(r, a, p, DECODE_LANE, DECODE_ITEM, part, gpu_s, sm_s, att, host_s, gap_s)
    if a.iv[LEND] == 1:
        whole = decode_pass_s(p, WHOLE_GPU, batch, context)
        whole += overhang_s(p, WHOLE_GPU, batch, iv[OVERHANG])
        r.fv[LANES_F + DECODE_LANE * LANE_FLOATS + LANE_FASTER] = max(1.0, gpu_s / whole)
    for k in range(1, steps):
        _price_ahead(r, p, k, part, batch, context + k * batch)


@jit
def _price_ahead(r: Any, p: Any, k: int, part: int, batch: int, context: int) -> None:
    """Step k of those launched at once; the host has launched it while an earlier one ran."""
    at = (k - 1) * CHAIN_WIDTH
    over_sm = overhang_sm(p, part, batch, r.iv[OVERHANG])
    hot = r.fv[LANES_F + DECODE_LANE * LANE_FLOATS + LANE_HOT]
    gpu_s = (decode_pass_s(p, part, batch, context) + overhang_s(p, part, batch, r.iv[OVERHANG])) * hot
    r.chain[at] = step_s(p, gpu_s, 0.0, 0.0, r.iv[ITERATIONS] + DECODE_LANE + k)
    r.chain[at + 1] = gpu_s
    r.chain[at + 2] = (decode_pass_sm(p, part, batch, context) + over_sm) * hot
    r.chain[at + 3] = (decode_attention_sm(p, part, batch, context) + over_sm) * hot


@jit
def start_next_of_chain(r: Any) -> None:
    """The decode lane goes on with the next of the steps that were launched at once."""
    iv = r.iv
    n = LANES + DECODE_LANE * LANE_INTEGERS
    at = iv[CHAIN_AT] * CHAIN_WIDTH
    iv[CHAIN_AT] += 1
    iv[CHAIN_LEFT] -= 1
    iv[CHAIN_BLOCKS] -= r.block_phase[iv[STEP] % iv[BLOCK]]
    iv[n + LANE_CONTEXT] += iv[n + LANE_BATCH]
    start_item(r, DECODE_LANE, r.chain[at], r.chain[at + 1], 0.0, r.chain[at + 2], r.chain[at + 3])


@jit
def end_chain(r: Any) -> None:
    """The last step launched ahead has ended: what members that are done held until then is free."""
    iv = r.iv
    iv[FREE] += iv[CHAIN_BLOCKS] + iv[OVERRUN_BLOCKS]
    iv[CHAIN_BLOCKS] = 0
    iv[OVERRUN_BLOCKS] = 0

"""Two lanes on one GPU: prefill in layer groups beside decode steps, each on its own set of SMs.

What is in flight on a lane has solo seconds left and a slowdown by its neighbour; both change only when a lane
starts, ends or moves to another SM set, so the next completion is known exactly and nothing is integrated in
small steps. Prefill takes SMs from the bottom, decode from the top; the sets overlap where their sum exceeds the
GPU. A lane changes its set only between launches, as the real mechanisms do, and pays for it then.

Decode steps that are launched ahead (`D_STEPS`) follow each other without the host: tokens appear at the end of each
step, but who is done stays in the batch, and keeps its blocks, until the last of them. An open prefill batch may be
parked for one other (`PARK`) and goes on when that is done. Where a scheduler learns of a finished pass only between
two decode steps (`P_POLL`), its tokens appear then.
"""

from __future__ import annotations

from typing import Any

from sim.cost.pairs import pair_factor
from sim.engine.cohort import preempt
from sim.engine.heat import lanes_rate, settle_heat
from sim.engine.launches import (
    check_lanes,
    end_chain,
    launch_decode,
    launch_prefill,
    resume_parked,
    start_next_of_chain,
)
from sim.engine.layout import (
    BUSY_S,
    CHAIN_LEFT,
    COHORT,
    D_LAUNCH,
    DECISIONS,
    DECODE_ITEM,
    DECODE_KV,
    DECODE_LANE,
    DENSE_TOKENS,
    DUE,
    EAGER_LAUNCHES,
    ERROR,
    FREE,
    GPU_S,
    GRAPH_LAUNCHES,
    HEAD_ROWS,
    HOST_BOUND_S,
    IDLE_LANE_SM_S,
    IN_CHUNKS,
    IN_DECODE,
    IN_TOKENS,
    INBOX_NEXT,
    ITERATIONS,
    KV_BLOCK_S,
    LANE_ATTENTION,
    LANE_BATCH,
    LANE_BESIDE,
    LANE_BUSY,
    LANE_CHUNKS,
    LANE_CLASH,
    LANE_CLASHED,
    LANE_COMMITS,
    LANE_CONTEXT,
    LANE_FACTOR,
    LANE_FASTER,
    LANE_FLOATS,
    LANE_GPU,
    LANE_HELD,
    LANE_HOST,
    LANE_INTEGERS,
    LANE_KIND,
    LANE_LAYERS,
    LANE_LEFT,
    LANE_LENDS,
    LANE_LENT,
    LANE_PART,
    LANE_REASON,
    LANE_SINCE,
    LANE_SM,
    LANE_SOLO,
    LANE_START,
    LANE_SWITCH,
    LANE_TOKENS,
    LANE_TOOK,
    LANES,
    LANES_F,
    LAYERS_DONE,
    LEND,
    LENDING,
    LOG_CAP,
    LOG_STEPS,
    METER_CAP,
    METER_DUE,
    METER_END,
    MIXED_ITEM,
    MODEL_LAYERS,
    N_DONE,
    N_LOG,
    N_METER,
    N_PREEMPT,
    N_READY,
    N_RUN,
    N_STEPLOG,
    N_WAIT,
    NOW,
    P_LAYERS,
    P_POLL,
    POLLED,
    PREFILL_ITEM,
    PREFILL_LANE,
    SMS,
    TO_BACK,
    TOTAL,
    UNPOLLED,
    WAITING,
)
from sim.engine.meter import read_idle_lanes, read_lanes
from sim.engine.queues import push_waiting
from sim.engine.sm_time import add_launch, split_launch
from sim.engine.steps import commit_chunk, commit_decode, log_step
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


# What a policy can observe of the launch that ended last on a lane, until it launches the next one there:
# `last_launch(r, lane, LANE_KIND)`, `LANE_PART`, `LANE_LAYERS`, `LANE_TOKENS` and `LANE_CHUNKS` (of prompts),
# `LANE_BATCH`, `LANE_CONTEXT` (sum over the decodes; of a prefill item the history of its chunks).


@jit
def launches_done(r: Any, lane: int) -> int:
    """Launches that have ended on the lane so far; each step launched ahead counts."""
    return int(r.iv[LANES + lane * LANE_INTEGERS + LANE_COMMITS])


@jit
def last_launch(r: Any, lane: int, field: int) -> int:
    """A field of the launch that ended last on the lane, see above."""
    return int(r.iv[LANES + lane * LANE_INTEGERS + field])


@jit
def last_launch_s(r: Any, lane: int) -> float:
    """Seconds that it took, slowdown, host time and a change of the SM set included."""
    return float(r.fv[LANES_F + lane * LANE_FLOATS + LANE_TOOK])


@jit
def last_beside_s(r: Any, lane: int) -> float:
    """Seconds of those in which the other lane was busy too."""
    return float(r.fv[LANES_F + lane * LANE_FLOATS + LANE_BESIDE])


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
        elif max(iv[N_LOG], iv[N_DONE], iv[N_STEPLOG]) >= LOG_CAP or iv[N_METER] >= METER_CAP:
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
    """Let time pass until t: KV use, and the SM-seconds that each lane holds, loses, lends and borrows."""
    iv, fv = r.iv, r.fv
    seconds = t - fv[NOW]
    if seconds <= 0.0:
        return
    fv[NOW] = t
    held, busy = 0, 0
    for lane in range(2):
        if not lane_idle(r, lane):
            held += r.policy_sms[iv[LANES + lane * LANE_INTEGERS + LANE_PART]]
            busy += 1
    if busy == 0:
        return
    fv[BUSY_S] += seconds
    fv[KV_BLOCK_S] += (iv[TOTAL] - iv[FREE]) * seconds
    covered = min(held, iv[SMS])
    fv[IDLE_LANE_SM_S] += (iv[SMS] - covered) * seconds
    for lane in range(2):
        if not lane_idle(r, lane):
            f = LANES_F + lane * LANE_FLOATS
            if held <= iv[SMS]:
                sms = float(r.policy_sms[iv[LANES + lane * LANE_INTEGERS + LANE_PART]])
            else:
                sms = _sms_got(r, lane)
            fv[f + LANE_HELD] += seconds * sms
            if busy == 2:
                fv[f + LANE_BESIDE] += seconds
                fv[f + LANE_CLASHED] += seconds * fv[f + LANE_CLASH]
                fv[f + LANE_LENT] += seconds * fv[f + LANE_LENDS]


@jit
def _sms_got(r: Any, lane: int) -> float:
    """SMs of a lane whose set overlaps with the other's: as the two get on with their work, but all of its own."""
    mine, other = LANES + lane * LANE_INTEGERS, LANES + (1 - lane) * LANE_INTEGERS
    sms, beside = r.policy_sms[r.iv[mine + LANE_PART]], r.policy_sms[r.iv[other + LANE_PART]]
    weight = sms / r.fv[LANES_F + lane * LANE_FLOATS + LANE_FACTOR]
    against = beside / r.fv[LANES_F + (1 - lane) * LANE_FLOATS + LANE_FACTOR]
    got = r.iv[SMS] * weight / (weight + against)
    return float(min(max(got, float(r.iv[SMS] - beside)), float(sms)))


@jit
def commit_lanes(q: Any, r: Any, x: Any, end: float) -> None:
    """Commit what ends at `end`, the prefill lane first. A decision is due where a lane becomes idle."""
    end = max(end, r.fv[NOW])  # a change of rates may round an end to just before now
    _move_to(r, end)
    if end >= r.fv[METER_DUE]:
        read_lanes(q, r, end)
    r.fv[METER_END] = end
    settle_heat(r, end)
    for lane in range(2):
        if lane_end(r, lane) <= end:
            _commit_lane(q, r, lane, end)
            if lane_idle(r, lane):
                r.iv[DUE] = 1
    lanes_rate(r)
    _set_rates(r, x)


@jit
def _commit_lane(q: Any, r: Any, lane: int, end: float) -> None:
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    kind, layers, batch = iv[n + LANE_KIND], iv[n + LANE_LAYERS], iv[n + LANE_BATCH]
    taken = end - fv[f + LANE_START]
    _split_lane(r, lane, taken, 1.0)
    add_launch(r, 1.0)
    _count_lane(r, lane)
    if iv[LOG_STEPS] == 1:
        tokens = iv[n + LANE_TOKENS]
        spent = taken / fv[f + LANE_SOLO]
        sms = r.policy_sms[iv[n + LANE_PART]]
        context = iv[n + LANE_CONTEXT] if batch > 0 else 0
        reason = iv[n + LANE_REASON]
        log_step(q, r, fv[f + LANE_START], end, lane, sms, layers, tokens, batch, context, spent, reason)
    iv[n + LANE_BUSY] = 0
    iv[n + LANE_COMMITS] += 1
    fv[f + LANE_TOOK] = taken
    if kind != PREFILL_ITEM:
        commit_decode(q, r, end)
        if iv[CHAIN_LEFT] > 0:
            start_next_of_chain(r)
            return
        end_chain(r)
        iv[IN_DECODE] = 0
        if iv[UNPOLLED] == 1:
            _finish_pass(q, r, end)
    if kind != DECODE_ITEM:
        iv[LAYERS_DONE] += layers
        if iv[LAYERS_DONE] == iv[MODEL_LAYERS]:
            if iv[POLLED] == 1 and not lane_idle(r, DECODE_LANE):
                iv[UNPOLLED] = 1
            else:
                _finish_pass(q, r, end)


@jit
def _finish_pass(q: Any, r: Any, end: float) -> None:
    """The open prefill batch has gone through all layers, and the scheduler knows: its tokens appear."""
    iv = r.iv
    # once a pass: its layer groups together read each weight once
    iv[EAGER_LAUNCHES] += 1
    iv[DENSE_TOKENS] += iv[IN_TOKENS]
    iv[HEAD_ROWS] += iv[IN_CHUNKS]
    for c in range(iv[IN_CHUNKS]):
        commit_chunk(q, r, r.chunk_id[c], r.chunk_tokens[c], end)
    iv[UNPOLLED] = 0
    resume_parked(r)


@jit
def _split_lane(r: Any, lane: int, taken: float, done: float) -> None:
    """Split the SM-seconds that the lane's launch has held in `taken` seconds, `done` of its solo work."""
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    held = fv[f + LANE_HELD]
    share = held / taken if taken > 0.0 else 0.0  # SMs, less than the set's where others use them too
    switch = fv[f + LANE_SWITCH]
    host = max(0.0, fv[f + LANE_SOLO] - switch - fv[f + LANE_GPU])
    lent = fv[f + LANE_LENT] if lane == PREFILL_LANE else 0.0
    split_launch(
        r,
        held,
        fv[f + LANE_CLASHED] * share,
        switch * done * share,
        host * done * share,
        fv[f + LANE_SM] * done,
        fv[f + LANE_ATTENTION] * done,
        iv[n + LANE_KIND] == MIXED_ITEM,
        lent,
        fv[f + LANE_LENT] - lent,
    )


@jit
def count_lanes_in_flight(r: Any, now: float) -> None:
    """Add what the launches in flight have used until `now`: for a copy of the state, since a commit adds the whole."""
    fv = r.fv
    _move_to(r, now)
    for lane in range(2):
        if not lane_idle(r, lane):
            f = LANES_F + lane * LANE_FLOATS
            left = fv[f + LANE_LEFT] - (now - fv[f + LANE_SINCE]) / fv[f + LANE_FACTOR]
            _split_lane(r, lane, now - fv[f + LANE_START], 1.0 - left / fv[f + LANE_SOLO])
            add_launch(r, 1.0)


@jit
def _count_lane(r: Any, lane: int) -> None:
    """Counters of a launch that has ended."""
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    fv[GPU_S] += fv[f + LANE_GPU]
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
def _on_gpu(part: float, slow: float) -> float:
    """Share of a launch's time that it is on the GPU: `part` of its time alone, stretched by its own slowdown."""
    return part * slow / (1.0 + part * (slow - 1.0))


@jit
def _set_rates(r: Any, x: Any) -> None:
    """Slowdowns of what is in flight now."""
    iv, fv = r.iv, r.fv
    if lane_idle(r, PREFILL_LANE) or lane_idle(r, DECODE_LANE):
        for lane in range(2):
            if not lane_idle(r, lane):
                _set_rate(r, lane, 1.0, 0.0)
        return
    n, m = LANES, LANES + LANE_INTEGERS
    config = x.config[iv[n + LANE_PART] * len(x.sms) + iv[m + LANE_PART]]
    tokens, history = iv[n + LANE_TOKENS], iv[n + LANE_CONTEXT] // max(1, iv[n + LANE_CHUNKS])
    batch = iv[m + LANE_BATCH]
    mean = iv[m + LANE_CONTEXT] // batch
    whole = pair_factor(x, x.factor_prefill, config, tokens, history, batch, mean)
    slow_decode = pair_factor(x, x.factor_decode, config, tokens, history, batch, mean)
    # only the GPU's part of a launch is slowed by the neighbour, and only while that is on the GPU, too
    f = LANES_F
    part = min(1.0, fv[f + LANE_GPU] / fv[f + LANE_SOLO])
    beside = min(1.0, fv[f + LANE_FLOATS + LANE_GPU] / fv[f + LANE_FLOATS + LANE_SOLO])
    slow = 1.0 + (whole - 1.0) * _on_gpu(beside, slow_decode)
    slow_decode = 1.0 + (slow_decode - 1.0) * _on_gpu(part, whole)
    factor = 1.0 + (slow - 1.0) * part
    _set_rate(r, PREFILL_LANE, factor, (slow - 1.0) * part / factor)
    fv[f + LANE_LENDS] = 0.0
    f += LANE_FLOATS
    slow, part, speed = slow_decode, beside, 1.0
    if iv[LENDING] == 1:
        # prefill's tails, spread over its solo time, work for decode as so many SMs more
        idle = max(0.0, fv[LANES_F + LANE_GPU] * r.policy_sms[iv[n + LANE_PART]] - fv[LANES_F + LANE_SM])
        sms = r.policy_sms[iv[m + LANE_PART]]
        speed = min(fv[f + LANE_FASTER], 1.0 + idle / (fv[LANES_F + LANE_SOLO] * factor * sms))
        factor = 1.0 + (slow / speed - 1.0) * part
        _set_rate(r, DECODE_LANE, factor, (slow - 1.0) * part / speed / factor)
        fv[f + LANE_LENDS] = (speed - 1.0) * sms * (slow / speed * part / factor)
        fv[LANES_F + LANE_LENDS] = fv[f + LANE_LENDS]
        return
    factor = 1.0 + (slow - 1.0) * part
    _set_rate(r, DECODE_LANE, factor, (slow - 1.0) * part / factor)
    fv[f + LANE_LENDS] = 0.0


@jit
def _set_rate(r: Any, lane: int, factor: float, clash: float) -> None:
    """Seconds per solo second from now on, and the share of them that the neighbour costs; bank the work done."""
    fv = r.fv
    f = LANES_F + lane * LANE_FLOATS
    fv[f + LANE_CLASH] = clash
    if factor != fv[f + LANE_FACTOR]:
        fv[f + LANE_LEFT] -= (fv[NOW] - fv[f + LANE_SINCE]) / fv[f + LANE_FACTOR]
        fv[f + LANE_SINCE] = fv[NOW]
        fv[f + LANE_FACTOR] = factor


@jit
def execute_lanes(q: Any, r: Any, a: Any, p: Any, x: Any) -> bool:
    """Carry out the plan on the idle lanes. False if nothing is in flight afterwards."""
    iv = r.iv
    iv[DECISIONS] += 1
    iv[DUE] = 0
    if r.fv[NOW] >= r.fv[METER_DUE] and lane_idle(r, PREFILL_LANE) and lane_idle(r, DECODE_LANE):
        read_idle_lanes(r)
    iv[LENDING] = a.iv[LEND]
    if a.iv[P_LAYERS] > 0:
        iv[POLLED] = a.iv[P_POLL]
    check_lanes(q, r, a, x)
    if iv[ERROR] != 0:
        return False
    for n in range(a.iv[N_PREEMPT]):
        preempt(q, r, a.preempt[n], a.iv[TO_BACK] == 0, r.fv[NOW])
    # decode first: its graph is launched in well under a millisecond, a prefill takes longer to launch
    if a.iv[D_LAUNCH] == 1 and iv[COHORT] + iv[N_READY] > 0:
        launch_decode(q, r, a, p)
    if iv[ERROR] == 0 and a.iv[P_LAYERS] > 0:
        launch_prefill(q, r, a, p)
    if iv[ERROR] != 0:
        return False
    _set_rates(r, x)
    return not (lane_idle(r, PREFILL_LANE) and lane_idle(r, DECODE_LANE))

"""Bullet's decisions: Algorithm 1 of arXiv:2504.19516 and the launches that follow from it."""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    D_DELAY_NS,
    D_LAUNCH,
    D_PART,
    FINISHED_COUNT,
    FREE,
    IN_CHUNKS,
    LEND,
    MODEL_LAYERS,
    N_CHUNKS,
    N_HOLD,
    N_PARTIAL,
    N_PREEMPT,
    N_READY,
    N_WAIT,
    NOW,
    P_DELAY_NS,
    P_LAYERS,
    P_PART,
    REASON,
)
from sim.engine.plans import is_victim
from sim.jit import jit
from sim.policies.parts.bullet_prices import (
    decode_part,
    decode_s,
    decode_solo_s,
    pass_gap_s,
    pass_solo_s,
    prefill_part,
    prefill_s,
    slowdown,
)
from sim.policies.parts.bullet_queue import next_batch_of_prompts
from sim.policies.parts.bullet_split import balanced, least_decode
from sim.policies.parts.bullet_state import (
    ALONE,
    ASKED,
    BALANCED,
    BATCH,
    BLOCKED,
    CONTEXT_SUM,
    D_SLOW,
    D_SOLO,
    D_SPLIT,
    DEADLINE,
    GROUP,
    HANDED_OVER,
    HANDOFF_NS,
    HANDOVER,
    IDEAL,
    KEPT,
    LAYER,
    LESS_DECODE,
    LESS_PREFILL,
    OFF,
    ONLINE,
    OVERLAP,
    OVERLAP_MASKS,
    P_SLOW,
    P_SOLO,
    P_SPLIT,
    PARTITION,
    PAUSED,
    QUEUE_LATE,
    REUSE,
    SCHEDULER,
    SPLIT,
    SPLITS,
    SYNC_NS,
    WHOLE,
    deciding_ns,
    start,
)
from sim.policies.parts.bullet_track import allowed_s, find_tail, observe
from sim.policies.parts.predict import next_batch, next_context
from sim.policies.parts.two_lanes import (
    clear_lanes,
    decodable,
    has_prefill,
    layers_left,
    make_room,
    may_decode,
    may_prefill,
)

REACH = 3  # splits by which a side may move while the other runs on its own
SAME_SLOWDOWN = 0.05  # relative change of a slowdown below which a launch still compares with its prediction


@jit
def hold_fresh(q: Any, r: Any, a: Any, ki: Any) -> int:
    """Requests whose hand-over from the prefill process is under way sit this step out.

    Returns nanoseconds to wait for the last of them if there is nobody else to decode.
    """
    if ki[HANDOFF_NS] == 0:
        return 0
    handoff, last = 1e-9 * ki[HANDOFF_NS], 0.0
    for n in range(r.iv[N_READY]):
        i = r.ready[n]
        left = q.last_s[i] + handoff - r.fv[NOW]
        if left > 0.0 and not is_victim(a, i):
            a.hold[a.iv[N_HOLD]] = i
            a.iv[N_HOLD] += 1
            last = max(last, left)
    if next_batch(r, a) > a.iv[N_HOLD]:
        return 0
    a.iv[N_HOLD] = 0
    return int(1e9 * last)


@jit
def note_decode(q: Any, r: Any, a: Any) -> None:
    """The decode step at hand: in flight, or about to be launched."""
    batch, context = next_batch(r, a), next_context(q, r, a)
    for n in range(a.iv[N_HOLD]):
        batch -= 1
        context -= q.computed[a.hold[n]] + 1
    r.policy_i[BATCH] = batch
    r.policy_i[CONTEXT_SUM] = context


@jit
def plan_prompts(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any, free: int) -> None:
    """The next prefill batch, if prompts wait; not again while the pool is as full as when none found blocks."""
    iv = r.iv
    if iv[N_WAIT] + iv[N_PARTIAL] == 0 or a.iv[N_PREEMPT] > 0:
        return
    if r.policy_i[BLOCKED] == iv[FINISHED_COUNT] + 1 and r.policy_i[BATCH] > 0:
        return
    beside = r.policy_i[BATCH] > 0
    part = prefill_part(ki, r.policy_i[SPLIT] if beside else WHOLE)
    next_batch_of_prompts(q, r, a, b, ki, kf, part, free)
    r.policy_i[BLOCKED] = iv[FINISHED_COUNT] + 1 if a.iv[N_CHUNKS] == 0 else 0


@jit
def next_layers(r: Any, ki: Any) -> int:
    """Layers of the next prefill launch."""
    left = layers_left(r)
    return min(ki[GROUP], left) if ki[GROUP] > 0 else left


@jit
def ttft_met(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any) -> bool:
    """Do the open batch's requests meet TTFT on the present split? Of a new batch: does the queue's percentile?"""
    if r.iv[IN_CHUNKS] == 0:
        return bool(r.policy_i[QUEUE_LATE] == 0)
    s = r.policy_i[SPLIT]
    left = prefill_s(q, r, a, b, y, ki, layers_left(r), prefill_part(ki, s), decode_part(ki, s))
    return bool(r.fv[NOW] + left <= r.policy_f[DEADLINE])


@jit
def may_pause(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, allowed: float) -> bool:
    """Does TPOT bear a prefill launch on all SMs before the next decode step, on the present split?"""
    pause = prefill_s(q, r, a, b, y, ki, next_layers(r, ki), prefill_part(ki, WHOLE), -1)
    return bool(pause + decode_s(r, b, y, ki, r.policy_i[SPLIT]) <= allowed)


@jit
def decide(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any, decodes: bool) -> int:
    """Algorithm 1 for a prefill and a decode step at hand: sets the split in force, returns why."""
    find_tail(q, r, kf)
    allowed = allowed_s(r)
    met = ttft_met(q, r, a, b, y, ki)
    late = not met or r.policy_i[QUEUE_LATE] == 1
    if ki[SCHEDULER] == 1 and decodes and late and may_pause(q, r, a, b, y, ki, allowed):
        return PAUSED
    if ki[PARTITION] == 0:
        return KEPT
    s, why = least_decode(r, b, y, ki, allowed), LESS_DECODE
    if s > r.policy_i[SPLIT] or s == ki[SPLITS] - 1:
        why = LESS_PREFILL
        if not met:
            s, why = balanced(q, r, a, b, y, ki), BALANCED
    r.policy_i[SPLIT] = within_reach(r, ki, s)
    return why


@jit
def within_reach(r: Any, ki: Any, s: int) -> int:
    """The split nearest to s that decode can move to while prefill runs on its present set."""
    held = r.policy_i[P_SPLIT]
    if may_prefill(r) or held == WHOLE:
        return s
    most = held + REACH if ki[OVERLAP_MASKS] == 1 else held
    return int(min(max(s, held - REACH), most))


@jit
def hands_over(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any) -> bool:
    """Are these the last layers of a prefill that nothing follows, and does TTFT bear decode on all SMs?"""
    held = r.policy_i[P_SPLIT]
    if r.iv[IN_CHUNKS] == 0 or layers_left(r) > ki[HANDOVER] or r.iv[N_WAIT] > 0 or ki[OVERLAP_MASKS] == 0:
        return False
    if held == WHOLE or may_prefill(r) or ki[PARTITION] == 0 or ki[REUSE] == OFF:
        return False
    left = prefill_s(q, r, a, b, y, ki, layers_left(r), prefill_part(ki, held), prefill_part(ki, WHOLE))
    return bool(r.fv[NOW] + left <= r.policy_f[DEADLINE])


NOT_NOW = -2


@jit
def decode_split(r: Any, ki: Any, why: int, beside: bool) -> int:
    """Where the decode step goes: a split, WHOLE, or NOT_NOW."""
    if why == PAUSED:
        return NOT_NOW
    if ki[PARTITION] == 0 or why == HANDED_OVER:
        return WHOLE
    if not beside:
        return WHOLE if ki[REUSE] >= LAYER else int(r.policy_i[SPLIT])
    # a prefill that runs on all SMs gives way at its next launch where masks are kept apart, or both would be whole
    apart = ki[OVERLAP_MASKS] == 0 or ki[REUSE] == OVERLAP
    if apart and not may_prefill(r) and r.policy_i[P_SPLIT] == WHOLE:
        return NOT_NOW
    return int(r.policy_i[SPLIT])


@jit
def prefill_split(r: Any, ki: Any, why: int, beside: bool) -> int:
    """Where the prefill's next layers go: a split, WHOLE, or NOT_NOW."""
    if ki[PARTITION] == 0:
        return WHOLE
    if not beside or why == PAUSED:
        return WHOLE if ki[REUSE] >= LAYER else int(r.policy_i[SPLIT])
    if not may_decode(r):
        held = r.policy_i[D_SPLIT]
        if held != WHOLE:
            return int(held)
        if ki[OVERLAP_MASKS] == 0:
            return NOT_NOW
    return int(r.policy_i[SPLIT])


@jit
def expect(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any) -> None:
    """Note what is believed of the launches in the plan, for alpha to be compared with."""
    f = r.policy_f
    p_split, d_split = r.policy_i[P_SPLIT], r.policy_i[D_SPLIT]
    p_part, d_part = prefill_part(ki, p_split), decode_part(ki, d_split)
    prefill, decode = a.iv[P_LAYERS] > 0, a.iv[D_LAUNCH] == 1
    both = (prefill or not may_prefill(r)) and (decode or not may_decode(r))
    if prefill:
        share = a.iv[P_LAYERS] / r.iv[MODEL_LAYERS]
        whole = pass_solo_s(q, r, a, b, p_part) + pass_gap_s(r, a, b)
        f[P_SOLO] = whole * share + 1e-9 * a.iv[P_DELAY_NS]
        f[P_SLOW] = 1.0
    if decode:
        f[D_SOLO] = decode_solo_s(r, b, d_part) + b.gap_graph_s[r.policy_i[BATCH]] + 1e-9 * a.iv[D_DELAY_NS]
        f[D_SLOW] = 1.0
    if both and prefill:
        f[P_SLOW] = slowdown(r, y, ki, y.factor_prefill, p_part, d_part)
    elif both and decode:
        f[P_SLOW] = _changed(f[P_SLOW], slowdown(r, y, ki, y.factor_prefill, p_part, d_part))
    if both and decode:
        f[D_SLOW] = slowdown(r, y, ki, y.factor_decode, p_part, d_part)
    elif both and prefill:
        f[D_SLOW] = _changed(f[D_SLOW], slowdown(r, y, ki, y.factor_decode, p_part, d_part))


@jit
def _changed(before: float, now: float) -> float:
    """Slowdown of a launch in flight whose neighbour starts: below 0 if that tells nothing any more."""
    if before == 1.0:
        return now
    return before if abs(now - before) < SAME_SLOWDOWN * before else -1.0


@jit
def plan(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any) -> None:
    """Launch what is idle, on the sets of the split in force; a decision comes first where both phases have work."""
    clear_lanes(a)
    start(r, ki)
    observe(r, ki, kf)
    free, wait_ns = r.iv[FREE], 0
    decodes, prefills = may_decode(r) and decodable(r) > 0, may_prefill(r)
    if decodes:
        free = make_room(q, r, a)
        wait_ns = hold_fresh(q, r, a, ki)
    note_decode(q, r, a)
    decodes = decodes and r.policy_i[BATCH] > 0
    fresh = prefills and r.iv[IN_CHUNKS] == 0
    if fresh:
        plan_prompts(q, r, a, b, ki, kf, free)
    prefills = prefills and has_prefill(r, a)
    beside, why = has_prefill(r, a) and r.policy_i[BATCH] > 0, ALONE
    if beside:
        why = KEPT
        # prefill predicts at each of its boundaries, also where decode's launch in flight leaves it no choice
        r.policy_i[ASKED] += ki[PARTITION] if prefills and not decodes else 0
        if decodes and hands_over(q, r, a, b, y, ki):
            why = HANDED_OVER
        elif (decodes or (fresh and prefills)) and ki[PARTITION] + ki[SCHEDULER] > 0:
            why = decide(q, r, a, b, y, ki, kf, decodes)
    p_split = prefill_split(r, ki, why, beside) if prefills else NOT_NOW
    d_split = decode_split(r, ki, why, beside) if decodes else NOT_NOW
    launch(r, a, ki, p_split, d_split, wait_ns)
    a.iv[REASON] = why
    if ki[ONLINE] == 1:
        expect(q, r, a, b, y, ki)


@jit
def launch(r: Any, a: Any, ki: Any, p_split: int, d_split: int, wait_ns: int) -> None:
    """Write both launches into the plan, with the time that deciding takes; `wait_ns`: of a hand-over to decode."""
    a.iv[LEND] = 1 if ki[REUSE] == IDEAL else 0
    masks = 0
    if p_split != NOT_NOW:
        masks += 1 if p_split != r.policy_i[P_SPLIT] else 0
        r.policy_i[P_SPLIT] = p_split
        a.iv[P_LAYERS] = next_layers(r, ki)
        a.iv[P_PART] = prefill_part(ki, p_split)
    if d_split != NOT_NOW:
        masks += 1 if d_split != r.policy_i[D_SPLIT] else 0
        r.policy_i[D_SPLIT] = d_split
        a.iv[D_LAUNCH] = 1
        a.iv[D_PART] = decode_part(ki, d_split)
    spent_ns = deciding_ns(r, ki, masks)
    a.iv[P_DELAY_NS] = spent_ns + ki[SYNC_NS]
    a.iv[D_DELAY_NS] = max(spent_ns, wait_ns)

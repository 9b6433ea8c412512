"""Which split of the SMs Bullet takes: greedily, by trying all, or directly.

Two questions. *Least decode*: the smallest decode set whose step takes no longer than allowed; ReduceDecodeSM and
ReducePrefillSM come to it from either side. *Balanced* (SetBalancedSM): the split at which both phases are equally
badly off, that is, the worse one least so. Badly off: slower than alone on all SMs, or, by limit, TTFT and TPOT over
theirs.

The closed form prices the smallest or largest decode set and the one at the bandwidth inflection. A price holds the
batch's linear layers and attention, each with the waves that it leaves unfilled on that set. Of these one part is bound
by what the SMs can do or draw, and falls as 1 / D; the other, attention and weights beyond the inflection, launches,
unfilled waves, does not. So t(D) = fixed + work / D on either side of the inflection, and the batch's own shares of
attention and of wave loss stand in `fixed` and `work`, which two prices a, b give:
work = (t_a - t_b) / (1 / D_a - 1 / D_b), fixed = t_b - work / D_b.
Least decode: D = work / (allowed - fixed), rounded up to a set that exists. Where more than one set lies between a and
b, the price of that answer replaces one of them, and the law is solved again: a price or two more, not one for every
set. Balanced: the prefill's law is fixed' + work' / (N - D), and the split is where the two laws cross.
"""

from __future__ import annotations

import math
from typing import Any

from sim.engine.layout import NOW
from sim.jit import jit
from sim.policies.parts.bullet_prices import decode_part, decode_s, decode_solo_s, prefill_part, prefill_s
from sim.policies.parts.bullet_state import (
    ASKED,
    BALANCE,
    BATCH,
    BY_SLOWDOWN,
    CLOSED_FORM,
    CONTEXT_SUM,
    D_ALPHA,
    DEADLINE,
    DUE_SINCE,
    EXHAUSTIVE,
    KNEE,
    PARTS,
    SEARCH,
    SPLIT,
    SPLITS,
    WHOLE,
)
from sim.policies.parts.bullet_track import tpot_ratio
from sim.policies.parts.two_lanes import layers_left

PROBE_BATCH, PROBE_CONTEXT = 32, 32 * 1024


@jit
def decode_sms(r: Any, ki: Any, s: int) -> int:
    """SMs of decode in split s, ascending in s."""
    return int(r.policy_sms[ki[PARTS + ki[SPLITS] + s]])


@jit
def _prefill_sms(r: Any, ki: Any, s: int) -> int:
    return int(r.policy_sms[ki[PARTS + s]])


@jit
def least_decode(r: Any, b: Any, y: Any, ki: Any, allowed: float) -> int:
    """The split with the smallest decode set whose step takes at most `allowed` seconds; the last one if none does."""
    last = ki[SPLITS] - 1
    if ki[SEARCH] == CLOSED_FORM:
        return _least_directly(r, b, y, ki, allowed)
    if ki[SEARCH] == EXHAUSTIVE:
        best = last
        for n in range(ki[SPLITS]):
            if decode_s(r, b, y, ki, last - n) <= allowed:
                best = last - n
        return int(best)
    s = r.policy_i[SPLIT]
    if decode_s(r, b, y, ki, s) > allowed:
        while s < last:
            s += 1
            if s == last or decode_s(r, b, y, ki, s) <= allowed:
                break
    else:
        while s > 0 and decode_s(r, b, y, ki, s - 1) <= allowed:
            s -= 1
    return int(s)


@jit
def _least_directly(r: Any, b: Any, y: Any, ki: Any, allowed: float) -> int:
    low, high = 0, ki[SPLITS] - 1
    knee = find_knee(r, b, y, ki)
    t = decode_s(r, b, y, ki, knee)
    if t > allowed:
        low, t_low = knee, t
        t_high = decode_s(r, b, y, ki, high)
    else:
        high, t_high = knee, t
        t_low = decode_s(r, b, y, ki, low)
    if t_low <= allowed or low == high:
        return int(low)
    if t_high > allowed:
        return int(high)
    while True:
        d_low, d_high = decode_sms(r, ki, low), decode_sms(r, ki, high)
        work = (t_low - t_high) / (1.0 / d_low - 1.0 / d_high)
        s = _at_least(r, ki, low + 1, high, work / (allowed - (t_high - work / d_high)))
        if high - low <= 2:
            return s
        # the law's own answer lies between two sets: one price tells on which side of it the batch stands
        s = min(max(s, low + 1), high - 1)
        t = decode_s(r, b, y, ki, s)
        if t > allowed:
            low, t_low = s, t
        else:
            high, t_high = s, t


@jit
def _at_least(r: Any, ki: Any, s: int, last: int, sms: float) -> int:
    """The first split from s to last whose decode set has that many SMs."""
    while s < last and decode_sms(r, ki, s) < sms:
        s += 1
    return int(s)


@jit
def find_knee(r: Any, b: Any, y: Any, ki: Any) -> int:
    """The split at the bandwidth inflection: where a typical decode step is furthest below fixed + work / D.

    Looked up once; it belongs to the profile, not to a decision.
    """
    if r.policy_i[KNEE] >= 0:
        return int(r.policy_i[KNEE])
    batch, context, asked = r.policy_i[BATCH], r.policy_i[CONTEXT_SUM], r.policy_i[ASKED]
    r.policy_i[BATCH] = min(PROBE_BATCH, b.max_seqs)
    r.policy_i[CONTEXT_SUM] = PROBE_CONTEXT // PROBE_BATCH * r.policy_i[BATCH]
    last = ki[SPLITS] - 1
    t_low, t_high = decode_s(r, b, y, ki, 0), decode_s(r, b, y, ki, last)
    u_low, u_high = 1.0 / decode_sms(r, ki, 0), 1.0 / decode_sms(r, ki, last)
    knee, most = 0, -1.0
    for s in range(ki[SPLITS]):
        share = (1.0 / decode_sms(r, ki, s) - u_high) / (u_low - u_high) if u_low > u_high else 0.0
        line = t_high + (t_low - t_high) * share
        below = (line - decode_s(r, b, y, ki, s)) / line
        if below > most:
            knee, most = s, below
    r.policy_i[KNEE] = knee
    r.policy_i[BATCH] = batch
    r.policy_i[CONTEXT_SUM] = context
    r.policy_i[ASKED] = asked
    return int(knee)


@jit
def prefill_ratio(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, s: int) -> float:
    """How badly off prefill is on split s: the rest of its pass over the same alone on all SMs; or, by limit, TTFT of
    the most urgent request of the batch over its limit."""
    layers = layers_left(r)
    left = prefill_s(q, r, a, b, y, ki, layers, prefill_part(ki, s), decode_part(ki, s))
    if ki[BALANCE] == BY_SLOWDOWN:
        return float(left / prefill_s(q, r, a, b, y, ki, layers, prefill_part(ki, WHOLE), -1))
    since = r.policy_f[DUE_SINCE]
    return float((r.fv[NOW] + left - since) / (r.policy_f[DEADLINE] - since))


@jit
def decode_ratio(r: Any, b: Any, y: Any, ki: Any, s: int) -> float:
    """The same for decode: its step over the same alone on all SMs; or TPOT of the tail over its limit."""
    step = decode_s(r, b, y, ki, s)
    if ki[BALANCE] == BY_SLOWDOWN:
        alone = decode_solo_s(r, b, decode_part(ki, WHOLE)) + b.gap_graph_s[r.policy_i[BATCH]]
        return float(step / (r.policy_f[D_ALPHA] * alone))
    return tpot_ratio(r, step)


@jit
def _larger_ratio(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, s: int) -> float:
    return float(max(prefill_ratio(q, r, a, b, y, ki, s), decode_ratio(r, b, y, ki, s)))


@jit
def balanced(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any) -> int:
    """The split at which the larger of the two ratios is least."""
    if ki[SEARCH] == CLOSED_FORM:
        return _balanced_directly(q, r, a, b, y, ki)
    last = ki[SPLITS] - 1
    if ki[SEARCH] == EXHAUSTIVE:
        best, least = 0, math.inf
        for s in range(ki[SPLITS]):
            ratio = _larger_ratio(q, r, a, b, y, ki, s)
            if ratio < least:
                best, least = s, ratio
        return best
    s = r.policy_i[SPLIT]
    here = _larger_ratio(q, r, a, b, y, ki, s)
    for way in (1, -1):
        while 0 <= s + way <= last:
            there = _larger_ratio(q, r, a, b, y, ki, s + way)
            if there >= here:
                break
            s += way
            here = there
    return int(s)


@jit
def _balanced_directly(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any) -> int:
    low, high, last = 0, find_knee(r, b, y, ki), ki[SPLITS] - 1
    p_high, d_high = prefill_ratio(q, r, a, b, y, ki, high), decode_ratio(r, b, y, ki, high)
    if p_high < d_high:
        # decode is worse off at the knee: the balance lies beyond it
        low, high, p_low, d_low = high, last, p_high, d_high
        p_high, d_high = prefill_ratio(q, r, a, b, y, ki, high), decode_ratio(r, b, y, ki, high)
    else:
        p_low, d_low = prefill_ratio(q, r, a, b, y, ki, low), decode_ratio(r, b, y, ki, low)
    if p_high <= d_high:
        return int(high)
    if p_low >= d_low or low == high:
        return int(low)
    while True:
        s = _crossing(r, ki, low, high, p_low, p_high, d_low, d_high)
        if high - low <= 2:
            return s
        s = min(max(s, low + 1), high - 1)
        p_s, d_s = prefill_ratio(q, r, a, b, y, ki, s), decode_ratio(r, b, y, ki, s)
        if p_s < d_s:
            low, p_low, d_low = s, p_s, d_s
        else:
            high, p_high, d_high = s, p_s, d_s


@jit
def _crossing(
    r: Any, ki: Any, low: int, high: int, p_low: float, p_high: float, d_low: float, d_high: float
) -> int:
    """The set between two at which the worse of the ratios is least, by the laws through their values there."""
    sms, rest = decode_sms(r, ki, low), _prefill_sms(r, ki, low)
    work = (d_low - d_high) / (1.0 / sms - 1.0 / decode_sms(r, ki, high))
    other = (p_high - p_low) / (1.0 / _prefill_sms(r, ki, high) - 1.0 / rest)
    fixed, beside = d_low - work / sms, p_low - other / rest
    s, d = low, d_low
    while s < high:
        p_next = beside + other / _prefill_sms(r, ki, s + 1)
        d_next = fixed + work / decode_sms(r, ki, s + 1)
        if p_next >= d_next:
            return int(s + 1 if p_next < d else s)
        s += 1
        d = d_next
    return int(s)

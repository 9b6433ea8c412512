"""What Bullet observes: the tail of the running requests' TPOT, and how launches compare with what it believed."""

from __future__ import annotations

from typing import Any

from sim.engine.lanes import last_beside_s, last_launch_s, launches_done
from sim.engine.layout import COHORT, DECODE, DECODE_LANE, N_READY, NOW, PREFILL_LANE, READY, STEP
from sim.jit import jit
from sim.policies.parts.bullet_state import (
    CLASS_LIMITS,
    D_ALPHA,
    D_SEEN,
    D_SLOW,
    D_SOLO,
    LIMITS,
    MISSES,
    ONLINE,
    ORDER,
    P_ALPHA,
    P_SEEN,
    P_SLOW,
    P_SOLO,
    SCAN_AT,
    SCRATCH_SIZE,
    SLACKS,
    TAIL_BASE,
    TAIL_LIMIT,
    TAIL_SINCE,
    WEIGHT,
)

SCANNED_A_STEP = 32  # members looked at per decode step, on average


@jit
def tpot_limit_s(q: Any, kf: Any, i: int) -> float:
    """G_d of request i."""
    return float(kf[LIMITS + CLASS_LIMITS * q.slo_class[i] + 2])


@jit
def _tokens_base(q: Any, r: Any, i: int) -> int:
    """The step at which request i would have had no token after its first, had it decoded at every step since."""
    joined = q.joined[i] if q.phase[i] == DECODE else r.iv[STEP]
    return int(joined + 1 - q.generated[i])


@jit
def _note(q: Any, r: Any, kf: Any, i: int, kept: int, most: int) -> int:
    """Put request i among the `most` with the least slack, ascending; returns how many there are."""
    waited = r.fv[NOW] - q.first_token_s[i]
    slack = tpot_limit_s(q, kf, i) * (r.iv[STEP] - _tokens_base(q, r, i)) - waited
    slacks, ids = r.policy_f, r.policy_i
    if kept == most and slack >= slacks[SLACKS + kept - 1]:
        return kept
    n = min(kept, most - 1)
    while n > 0 and slacks[SLACKS + n - 1] > slack:
        slacks[SLACKS + n] = slacks[SLACKS + n - 1]
        ids[ORDER + n] = ids[ORDER + n - 1]
        n -= 1
    slacks[SLACKS + n] = slack
    ids[ORDER + n] = i
    return min(kept + 1, most)


@jit
def find_tail(q: Any, r: Any, kf: Any) -> None:
    """Look up whose TPOT the percentile is about: all but a share of MISSES have more slack.

    Slack is G_d x tokens after the first - seconds since it; it changes alike for all that have one limit. The batch is
    gone through anew once a few steps have passed, longer ones for larger batches.
    """
    iv, members = r.iv, r.iv[COHORT]
    if iv[STEP] < r.policy_i[SCAN_AT]:
        return
    r.policy_i[SCAN_AT] = iv[STEP] + 1 + members // SCANNED_A_STEP
    most = min(int(kf[MISSES] * (members + iv[N_READY])) + 1, SCRATCH_SIZE)
    kept = 0
    for n in range(members):
        kept = _note(q, r, kf, r.heap_id[n], kept, most)
    for n in range(iv[N_READY]):
        if q.phase[r.ready[n]] == READY:
            kept = _note(q, r, kf, r.ready[n], kept, most)
    i = r.policy_i[ORDER + kept - 1]
    r.policy_f[TAIL_SINCE] = q.first_token_s[i]
    r.policy_f[TAIL_LIMIT] = tpot_limit_s(q, kf, i)
    r.policy_i[TAIL_BASE] = _tokens_base(q, r, i)


@jit
def allowed_s(r: Any) -> float:
    """How long the next decode step may take from now, so that the tail's TPOT meets its limit at its end."""
    tokens = r.iv[STEP] + 1 - r.policy_i[TAIL_BASE]
    return float(r.policy_f[TAIL_LIMIT] * tokens - (r.fv[NOW] - r.policy_f[TAIL_SINCE]))


@jit
def tpot_ratio(r: Any, step_s: float) -> float:
    """TPOT of the tail over its limit, after a decode step that takes `step_s` from now."""
    tokens = r.iv[STEP] + 1 - r.policy_i[TAIL_BASE]
    return float((r.fv[NOW] - r.policy_f[TAIL_SINCE] + step_s) / (r.policy_f[TAIL_LIMIT] * tokens))


@jit
def _learn(r: Any, kf: Any, lane: int, alpha: int, solo: int, slow: int) -> None:
    """Move a phase's alpha towards what its last launch shows: seconds at its solo rate over those believed."""
    if r.policy_f[slow] < 0.0:
        return
    took, beside = last_launch_s(r, lane), last_beside_s(r, lane)
    alone = took - beside + beside / r.policy_f[slow]
    r.policy_f[alpha] += kf[WEIGHT] * (alone / r.policy_f[solo] - r.policy_f[alpha])


@jit
def observe(r: Any, ki: Any, kf: Any) -> None:
    """Take what has ended since the last decision into the alphas."""
    if ki[ONLINE] == 0:
        return
    done = launches_done(r, PREFILL_LANE)
    if done > r.policy_i[P_SEEN]:
        r.policy_i[P_SEEN] = done
        _learn(r, kf, PREFILL_LANE, P_ALPHA, P_SOLO, P_SLOW)
    done = launches_done(r, DECODE_LANE)
    if done > r.policy_i[D_SEEN]:
        r.policy_i[D_SEEN] = done
        _learn(r, kf, DECODE_LANE, D_ALPHA, D_SOLO, D_SLOW)

"""semi-PD's feedback: latencies of a window against their targets, two fitted curves, percentages to move to.

See `sim.policies.semi_pd` for the rules. State lies in the policy's own slots of the replica, settings in `ki`, `kf`.
"""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    FINISHED_COUNT,
    ITERATIONS,
    LAST_END,
    N_CHUNKS,
    N_RUN,
    N_WAIT,
    NOW,
    STEP,
    WHOLE_GPU,
)
from sim.jit import jit
from sim.policies.parts.chunks import chunk_tokens
from sim.policies.parts.observe import BINS, SUMS, add_point, count_value, line_value, percentile
from sim.policies.parts.predict import pass_s, prompts_attention_s
from sim.policies.parts.two_lanes import may_prefill

TOKENS, SEQS, SPARE, DYNAMIC, WINDOW, STEP_PCT, MAX_STEP, X0, Y0, PART_OF = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
TTFT_SLO, TPOT_SLO, SHARE, SWITCH, KEEP, TTFT_EDGES, TPOT_EDGES = 0, 1, 2, 3, 4, 5, 5 + BINS
# policy_i: percentages in force and to come (0: none); chunks launched last; of the window: first launch, arrivals
# before it; decode steps seen; histograms
X, Y, NEXT_X, NEXT_Y, CHUNKS, FIRST, ARRIVED, SEEN, TTFTS, TPOTS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 8 + BINS
# policy_f: when the next split is ready; start of the window, of the last prefill, of the decode step in flight;
# prefill seconds on all SMs, and prompts, of the window; the two lines
READY_S, WINDOW_S, PREFILL_S, STEP_S, WORK_S, WORK_N, TTFT_LINE, TPOT_LINE = 0, 1, 2, 3, 4, 5, 6, 6 + SUMS
# b / a of the published fits, Llama3-8B on ShareGPT: 0.6809 / (x - lambda) + 0.022 and 0.6284 / y + 0.3818
TTFT_SHAPE, TPOT_SHAPE = 0.022 / 0.6809, 0.3818 / 0.6284
LEAST_SHARE = 0.02  # x' - lambda below this counts as this


@jit
def effective(own: int, other: int) -> float:
    """Share of the GPU that a side has of two sets that overlap if they exceed it."""
    return own / max(100, own + other)


@jit
def one_up(own: int, other: int, step: int) -> tuple[int, int]:
    """The percentages with one side raised by a step; from 100 on the other gives way while it keeps a step."""
    if own < 100:
        return min(100, own + step), other
    return own, other - step if other - step >= step else other


@jit
def headroom(share: float, load: float) -> float:
    """x' - lambda, kept above nothing."""
    return max(LEAST_SHARE, share - load)


@jit
def offered_load(r: Any) -> float:
    """lambda: share of the whole GPU that the window's arrivals want for their prefill."""
    iv, mi, mf = r.iv, r.policy_i, r.policy_f
    seconds = r.fv[NOW] - mf[WINDOW_S]
    if mf[WORK_N] == 0.0 or seconds <= 0.0:
        return 0.0
    arrived = iv[N_WAIT] + iv[N_RUN] + iv[FINISHED_COUNT] - mi[ARRIVED]
    return float(arrived / seconds * mf[WORK_S] / mf[WORK_N])


@jit
def open_window(r: Any) -> None:
    """Count from here."""
    iv, mi, mf = r.iv, r.policy_i, r.policy_f
    mi[FIRST] = iv[ITERATIONS]
    mi[ARRIVED] = iv[N_WAIT] + iv[N_RUN] + iv[FINISHED_COUNT]
    mf[WINDOW_S] = r.fv[NOW]
    mf[WORK_S] = mf[WORK_N] = 0.0
    for n in range(2 * BINS):
        mi[TTFTS + n] = 0


@jit
def observe(q: Any, r: Any, kf: Any) -> None:
    """Take in the first tokens of the last prefill and the last decode step, where they have just ended."""
    mi, mf = r.policy_i, r.policy_f
    if mi[CHUNKS] > 0 and may_prefill(r):
        for c in range(mi[CHUNKS]):
            i = r.chunk_id[c]
            if q.first_token_s[i] > mf[PREFILL_S]:
                count_value(mi, TTFTS, kf, TTFT_EDGES, q.first_token_s[i] - q.arrival_s[i])
        mi[CHUNKS] = 0
    if mi[SEEN] != r.iv[STEP]:
        count_value(mi, TPOTS, kf, TPOT_EDGES, r.fv[LAST_END] - mf[STEP_S])
        mi[SEEN] = r.iv[STEP]


@jit
def decide(
    x: int, y: int, ttft_fails: bool, tpot_fails: bool, load: float, mf: Any, ki: Any, kf: Any
) -> tuple[int, int]:
    """The percentages that the feedback asks for after a window."""
    if ttft_fails == tpot_fails:
        return x, y
    for _ in range(ki[MAX_STEP]):
        if ttft_fails:
            x, y = one_up(x, y, ki[STEP_PCT])
            z, limit = 1.0 / headroom(effective(x, y), load), kf[TTFT_SLO]
            expected = line_value(mf, TTFT_LINE, TTFT_SHAPE, z)
        else:
            y, x = one_up(y, x, ki[STEP_PCT])
            limit = kf[TPOT_SLO]
            expected = line_value(mf, TPOT_LINE, TPOT_SHAPE, 1.0 / effective(y, x))
        if expected <= limit:
            break
    return x, y


@jit
def close_window(r: Any, ki: Any, kf: Any) -> None:
    """Refit both lines, hold the percentiles against the targets, and order other percentages if need be."""
    mi, mf = r.policy_i, r.policy_f
    x, y, load = mi[X], mi[Y], offered_load(r)
    ttft = percentile(mi, TTFTS, kf, TTFT_EDGES, kf[SHARE])
    tpot = percentile(mi, TPOTS, kf, TPOT_EDGES, kf[SHARE])
    if ttft > 0.0:
        add_point(mf, TTFT_LINE, kf[KEEP], 1.0 / headroom(effective(x, y), load), ttft)
    if tpot > 0.0:
        add_point(mf, TPOT_LINE, kf[KEEP], 1.0 / effective(y, x), tpot)
    if mi[NEXT_X] == 0:
        wanted_x, wanted_y = decide(x, y, ttft > kf[TTFT_SLO], tpot > kf[TPOT_SLO], load, mf, ki, kf)
        if wanted_x != x or wanted_y != y:
            mi[NEXT_X], mi[NEXT_Y] = wanted_x, wanted_y
            mf[READY_S] = r.fv[NOW] + kf[SWITCH]
    open_window(r)


@jit
def adjust(q: Any, r: Any, ki: Any, kf: Any) -> None:
    """The feedback loop: set up, observe, close a window that is full, move to a split that is ready."""
    mi = r.policy_i
    if mi[X] == 0:
        mi[X], mi[Y] = ki[X0], ki[Y0]
        open_window(r)
    if ki[DYNAMIC] == 0:
        return
    observe(q, r, kf)
    if mi[NEXT_X] > 0 and r.fv[NOW] >= r.policy_f[READY_S]:
        mi[X], mi[Y] = mi[NEXT_X], mi[NEXT_Y]
        mi[NEXT_X] = mi[NEXT_Y] = 0
        mi[CHUNKS] = 0  # what is in flight still belongs to the old split
        open_window(r)
    if r.iv[ITERATIONS] - mi[FIRST] >= ki[WINDOW]:
        close_window(r, ki, kf)


@jit
def note_prefill(q: Any, r: Any, a: Any, b: Any) -> None:
    """Remember what is launched: its start, and what it would take on all SMs."""
    mi, mf, n = r.policy_i, r.policy_f, a.iv[N_CHUNKS]
    mi[CHUNKS] = n
    mf[PREFILL_S] = r.fv[NOW]
    attention_s = prompts_attention_s(q, b, WHOLE_GPU, a.chunk_id, a.chunk_tokens, n)
    mf[WORK_S] += pass_s(b, WHOLE_GPU, attention_s, chunk_tokens(a), n, 0, 0)
    for c in range(n):
        i = a.chunk_id[c]
        if q.computed[i] + a.chunk_tokens[c] == q.target[i]:
            mf[WORK_N] += 1.0

"""Which policy wins at each offered rate, and what the others lose by: from SLO shares, queues and SM time.

A policy is ahead of another if more of its requests meet the SLO (to 0.1 %), then by goodput per GPU, then by the
product of p99 TTFT and p99 TPOT. The cause of a loss is read off the metric that falls furthest behind the winner's:
waiting for admission, the KV transfer, decodes held up by prompts, or the class of lost SM time that grew most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim.report.points import Point, rates_of
from sim.report.words import LATENCIES, number, per_cent

# classes of SM time (`sm_time_pct` of a run) by the word for what is lost there
LOSSES = {
    "contention": ("contention",),
    "lockstep": ("lockstep",),
    "idle SMs": ("wave_tail", "attention_bound", "idle_lane"),
    "host": ("host", "switch"),
}
EVEN = 0.005  # shares of requests that differ by less say nothing
NOTABLE = 0.01  # of a request's time
STALL = 4.0  # p99 of the gaps over their median from which decodes count as held up


@dataclass(frozen=True)
class Loss:
    """Why a policy is behind the winner: a word, and the figures that say so."""

    policy: str
    attainment: float | None
    cause: str
    evidence: str


@dataclass(frozen=True)
class Verdict:
    """The winner at one offered rate, and every other policy's loss, the runner-up first."""

    rate: float | None
    winner: Point
    losses: tuple[Loss, ...]


def verdicts_of(points: Sequence[Point]) -> list[Verdict]:
    """One verdict a rate; empty without an SLO or with a single policy."""
    found = []
    for rate in rates_of(points):
        here = [p for p in points if p.rate == rate and p.mean("slo_attainment") is not None]
        if len(here) < 2:
            continue
        ranked = sorted(here, key=_rank)
        winner = ranked[0]
        losses = tuple(_loss(point, winner) for point in ranked[1:])
        found.append(Verdict(rate, winner, losses))
    return found


def _rank(point: Point) -> tuple[float, float, float, str]:
    tails = _of(point, "p99_ttft_ms") * max(_of(point, "p99_tpot_ms"), 1e-9)
    return (
        -round(_of(point, "slo_attainment"), 3),
        -round(_of(point, "request_goodput_per_gpu"), 2),
        tails,
        point.policy,
    )


def _of(point: Point, key: str | tuple[str, str]) -> float:
    value = point.mean(key)
    return 0.0 if value is None or not math.isfinite(value) else value


def _loss(point: Point, winner: Point) -> Loss:
    metric, behind = _worst_metric(point, winner)
    attainment = point.mean("slo_attainment")
    if metric == "ttft" and _queues(point, winner):
        cause, evidence = "queueing", _queue_words(point, winner)
    elif metric != "ttft" and _transfers(point, winner):
        cause = "transfer"
        evidence = f"KV transfer {_pair(point, winner, 'mean_transfer_ms', 'ms')}"
    elif metric != "ttft" and _stalls(point) > max(STALL, _stalls(winner)):
        cause = "prefill stalls"
        evidence = f"p99 ITL {_pair(point, winner, 'p99_itl_ms', 'ms')}"
    else:
        cause, evidence = _sm_loss(point, winner)
    lead = f"{LATENCIES[metric]} met by {per_cent(behind)} %; " if behind is not None else "SLO held; "
    return Loss(point.policy, attainment, cause, lead + evidence)


def _worst_metric(point: Point, winner: Point) -> tuple[str, float | None]:
    """The limited metric whose share lies furthest behind; with all shares even, the slower of TTFT and TPOT."""
    shares = {m: point.mean(("slo_attainment_by_metric", m)) for m in LATENCIES}
    gaps = {
        m: _of(winner, ("slo_attainment_by_metric", m)) - share
        for m, share in shares.items()
        if share is not None
    }
    worst = max(gaps, key=lambda m: gaps[m], default=None)
    if worst is not None and gaps[worst] > EVEN:
        return worst, shares[worst]
    slower = {
        m: _of(point, f"mean_{m}_ms") / max(_of(winner, f"mean_{m}_ms"), 1e-9) for m in ("ttft", "tpot")
    }
    return max(slower, key=lambda m: slower[m]), None


def _queues(point: Point, winner: Point) -> bool:
    more = _of(point, "mean_queue_ms") - _of(winner, "mean_queue_ms")
    return more > 0.5 * (_of(point, "mean_ttft_ms") - _of(winner, "mean_ttft_ms"))


def _queue_words(point: Point, winner: Point) -> str:
    words = f"queue {_pair(point, winner, 'mean_queue_ms', 'ms')}"
    cause, evidence = _sm_loss(point, winner)
    return f"{words}; {evidence}" if cause in LOSSES else words


def _transfers(point: Point, winner: Point) -> bool:
    """Is the transfer a good part of what its requests take longer?"""
    more = _of(point, "mean_transfer_ms") - _of(winner, "mean_transfer_ms")
    longer = _of(point, "mean_e2el_ms") - _of(winner, "mean_e2el_ms")
    return longer > 0 and more > 0.2 * longer and more > NOTABLE * _of(winner, "mean_e2el_ms")


def _stalls(point: Point) -> float:
    return _of(point, "p99_itl_ms") / max(_of(point, "median_itl_ms"), 1e-9)


def _sm_loss(point: Point, winner: Point) -> tuple[str, str]:
    """The kind of lost SM time that grew most against the winner's, in points of SM time."""
    lost = {word: sum(_of(point, ("sm_time_pct", c)) for c in classes) for word, classes in LOSSES.items()}
    base = {word: sum(_of(winner, ("sm_time_pct", c)) for c in classes) for word, classes in LOSSES.items()}
    word = max(lost, key=lambda w: lost[w] - base[w])
    if lost[word] - base[word] < 1.0:
        return _slower(point, winner)
    return word, f"{word} {number(lost[word], 2)} % of SM time against {number(base[word], 2)} %"


def _slower(point: Point, winner: Point) -> tuple[str, str]:
    """No class of lost SM time stands out: the mean of TPOT, or the tail that is longer."""
    if _of(point, "mean_tpot_ms") > 1.02 * _of(winner, "mean_tpot_ms"):
        return "slower steps", f"mean TPOT {_pair(point, winner, 'mean_tpot_ms', 'ms')}"
    ratios = {m: _of(point, f"p99_{m}_ms") / max(_of(winner, f"p99_{m}_ms"), 1e-9) for m in ("ttft", "tpot")}
    longer = max(ratios, key=lambda m: ratios[m])
    if ratios[longer] < 1.005:
        return "nothing", "no tail is longer by half a per cent"
    return "longer tails", f"p99 {LATENCIES[longer]} {_pair(point, winner, f'p99_{longer}_ms', 'ms')}"


def _pair(point: Point, winner: Point, key: str, unit: str) -> str:
    return f"{number(_of(point, key))} against {number(_of(winner, key))} {unit}"

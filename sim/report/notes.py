"""What a reader has to know beside the curves: saturation, missing values, refusals, coverage, the reader's notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sim.report.points import Point, points_of
from sim.report.words import LATENCIES, listed, per_cent, plain, rate_name


def notes_of(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Groups (heading, sentences), the most consequential first; groups without a sentence are left out."""
    points = points_of(runs)
    groups = [
        ("Saturated", saturation(points)),
        ("Rejected", rejections(points)),
        ("Unfinished", unfinished(points)),
        ("Percentiles cut short", censored(points)),
        ("Outside the profile's coverage", coverage(points)),
        ("Workload and engine", remarks(points)),
    ]
    return [(heading, lines) for heading, lines in groups if lines]


def where(points: Iterable[Point], everything: Sequence[Point]) -> str:
    """Name points briefly: "vllm at 8 and 16 req/s; sarathi at 16 req/s"."""
    chosen = list(points)
    if len(chosen) == len(everything) and len(chosen) > 1:
        return "all runs"
    by_policy: dict[str, list[float | None]] = {}
    for point in chosen:
        by_policy.setdefault(point.policy, []).append(point.rate)
    return "; ".join(
        policy
        if rates == [None]
        else f"{policy} at {listed([plain(r) for r in rates if r is not None])} req/s"
        for policy, rates in by_policy.items()
    )


def saturation(points: Sequence[Point]) -> list[str]:
    """Which points could not serve what was offered."""
    full = [p for p in points if p.saturated]
    if not full:
        return []
    text = "the backlog grows while requests arrive, so latencies there depend on how long the workload is"
    return [f"{where(full, points)}: {text}."]


def rejections(points: Sequence[Point]) -> list[str]:
    """Rejected requests by reason."""
    lines: dict[str, list[tuple[Point, int]]] = {}
    for point in points:
        reasons: dict[str, int] = {}
        for run in point.runs:
            for reason, count in (run.get("rejected_reasons") or {}).items():
                reasons[reason] = reasons.get(reason, 0) + int(count)
        unexplained = point.total("rejected") - sum(reasons.values())
        if unexplained > 0:
            reasons["no reason recorded"] = unexplained
        for reason, count in reasons.items():
            if count:
                lines.setdefault(reason, []).append((point, count))
    return [f"{reason}: {_counts(found, points)}." for reason, found in lines.items()]


def unfinished(points: Sequence[Point]) -> list[str]:
    """Requests still in progress when the run ended; SLO shares count them as misses."""
    return _counted(
        points,
        lambda p: p.total("unfinished"),
        "Still in progress when the run ended, and a miss in every SLO share",
    )


def censored(points: Sequence[Point]) -> list[str]:
    """Percentiles that leave out requests whose value the end of the run hid."""
    lines = []
    for metric, name in LATENCIES.items():

        def hidden(point: Point, metric: str = metric) -> int:
            return sum(int((run.get("censored") or {}).get(metric) or 0) for run in point.runs)

        what = f"{name} percentiles are lower bounds; they leave out requests without a value"
        lines += _counted(points, hidden, what)
    return lines


def coverage(points: Sequence[Point]) -> list[str]:
    """Steps whose shapes lie outside what the profile covers."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        flagged, steps = point.total("flagged_steps"), point.total("iterations")
        if flagged:
            share = f"{per_cent(flagged / steps)} % of the steps" if steps else f"{flagged:,} steps"
            lines.setdefault(share, []).append(point)
    return [f"{share}: {where(found, points)}." for share, found in lines.items()]


def remarks(points: Sequence[Point]) -> list[str]:
    """The runs' own notes, each once; a note that differs by rate only in numbers is given per rate."""
    found: dict[str, list[Point]] = {}
    for point in points:
        for run in point.runs:
            for note in run.get("notes") or []:
                at = found.setdefault(str(note), [])
                if point not in at:
                    at.append(point)
    lines = []
    for note, at in found.items():
        whole = len(at) == len(points)
        rates = {p.rate for p in at}
        one_rate = len(at) == sum(p.rate in rates for p in points)
        rest = (
            ", ".join(rate_name(rate) for rate in rates if rate is not None)
            if one_rate
            else where(at, points)
        )
        lines.append(note if whole or not rest else f"{note} ({rest})")
    return lines


def _counted(points: Sequence[Point], count: Callable[[Point], int], what: str) -> list[str]:
    found = [(point, number) for point in points if (number := count(point))]
    return [f"{what}: {_counts(found, points)}."] if found else []


def _counts(found: Sequence[tuple[Point, int]], points: Sequence[Point]) -> str:
    numbers = [count for _, count in found]
    span = f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"
    each = " each" if len(found) > 1 and min(numbers) == max(numbers) else ""
    return f"{span} requests{each} ({where([p for p, _ in found], points)})"

"""What a reader has to know beside the curves: saturation, missing values, refusals, coverage, the reader's notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sim.report.points import Point, points_of
from sim.report.words import LATENCIES, listed, number, plain

SPELLED = 3  # reasons of a run that differ in numbers alone and are still told one by one
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def notes_of(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Groups (heading, sentences), the most consequential first; groups without a sentence are left out."""
    points = points_of(runs)
    groups = [
        ("Nothing measured", nothing_measured(points)),
        ("Saturated", saturation(points)),
        ("Rejected", rejections(points)),
        ("Unfinished", unfinished(points)),
        ("Percentiles cut short", censored(points)),
        ("Outside the profile's coverage", coverage(points)),
        ("KV travels", links(points)),
        ("Workload and engine", remarks(points)),
    ]
    return [(heading, lines) for heading, lines in groups if lines]


def where(points: Iterable[Point], everything: Sequence[Point]) -> str:
    """Name points briefly: "vllm and sarathi from 16 req/s on; sglang at 8 req/s"."""
    chosen = list(points)
    if len(chosen) == len(everything) and len(chosen) > 1:
        return "all runs"
    places: dict[str, list[str]] = {}
    for policy in dict.fromkeys(point.policy for point in chosen):
        own = [p.rate for p in chosen if p.policy == policy and p.rate is not None]
        swept = [p.rate for p in everything if p.policy == policy and p.rate is not None]
        if len(own) > 1 and own == swept[-len(own) :]:
            place = f" from {plain(own[0])} req/s on" if own != swept else " at all rates"
        else:
            place = f" at {listed([plain(rate) for rate in own])} req/s" if own else ""
        places.setdefault(place, []).append(policy)
    return "; ".join(f"{listed(policies)}{place}" for place, policies in places.items())


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
        for reason, count in _fewer(reasons).items():
            if count:
                lines.setdefault(reason, []).append((point, count))
    return [f"{reason}: {_counts(found, points)}." for reason, found in lines.items()]


def _fewer(reasons: Mapping[str, int]) -> dict[str, int]:
    """Reasons that differ in numbers alone become one, told by the first, where there are more than `SPELLED`."""
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        alike.setdefault(NUMBER.sub("#", reason), []).append(reason)
    told = {}
    for group in alike.values():
        if len(group) > SPELLED:
            told[f"{group[0]}, and the like"] = sum(reasons[reason] for reason in group)
        else:
            told.update({reason: reasons[reason] for reason in group})
    return told


def nothing_measured(points: Sequence[Point]) -> list[str]:
    """Points whose window holds no request, so that they have no figures."""
    empty = [p for p in points if p.total("num_prompts") and not p.total("slo_requests")]
    if not empty:
        return []
    text = "every request arrived before `measure.warmup_s` was over; nothing is left to measure"
    return [f"{where(empty, points)}: {text}."]


def unfinished(points: Sequence[Point]) -> list[str]:
    """Requests still in progress when the run ended; SLO shares count them as misses."""
    what = "{} still in progress when the run ended; every SLO share counts them as misses"
    return _counted(points, lambda p: p.total("unfinished"), what)


def censored(points: Sequence[Point]) -> list[str]:
    """Percentiles that leave out requests whose value the end of the run hid."""
    lines = []
    for metric, name in LATENCIES.items():

        def hidden(point: Point, metric: str = metric) -> int:
            return sum(int((run.get("censored") or {}).get(metric) or 0) for run in point.runs)

        what = f"{name}: {{}} had no value yet when the run ended, so the percentiles may be too low"
        lines += _counted(points, hidden, what)
    return lines


def coverage(points: Sequence[Point]) -> list[str]:
    """Steps whose shapes lie outside what the profile covers."""
    found = [p for p in points if p.total("flagged_steps")]
    if not found:
        return []
    shares = [100 * p.total("flagged_steps") / max(p.total("iterations"), 1) for p in found]
    low, high = number(min(shares), 2), number(max(shares), 2)
    span = low if low == high else f"{low} to {high}"
    return [f"{span} % of the steps ({where(found, points)})."]


def links(points: Sequence[Point]) -> list[str]:
    """By what the hand-over of KV was priced, measured or modelled, and at which rate."""
    found: dict[str, list[Point]] = {}
    for point in points:
        for run in point.runs:
            link = run.get("link") or {}
            if link.get("source"):
                rate = number(link["bandwidth_gb_s"], 3)
                text = f"at {rate} GB/s and {number(link['latency_us'], 3)} µs by {link['source']}"
                at = found.setdefault(text, [])
                if point not in at:
                    at.append(point)
    return [f"{text} ({where(at, points)})." for text, at in found.items()]


def remarks(points: Sequence[Point]) -> list[str]:
    """The runs' own notes, each once; notes that differ in numbers alone become one with all the numbers."""
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: -1.0 if p.rate is None else p.rate):
        for run in point.runs:
            for note in run.get("notes") or []:
                at = found.setdefault(str(note), [])
                if point not in at:
                    at.append(point)
    alike: dict[str, list[str]] = {}
    for note in found:
        alike.setdefault(NUMBER.sub("#", note), []).append(note)
    lines = []
    for notes in alike.values():
        at = [p for p in points if any(p in found[note] for note in notes)]
        text = notes[0] if len(notes) == 1 else _merged(notes)
        lines.append(text if len(at) == len(points) else f"{text} ({where(at, points)})")
    return lines


def _merged(notes: Sequence[str]) -> str:
    """ "to 1 req/s" and "to 2 req/s" as "to {1, 2} req/s"."""
    words = NUMBER.split(notes[0])
    columns = zip(*(NUMBER.findall(note) for note in notes), strict=True)
    numbers = [column[0] if len(set(column)) == 1 else f"{{{', '.join(column)}}}" for column in columns]
    return "".join(word + value for word, value in zip(words, [*numbers, ""], strict=True))


def _counted(points: Sequence[Point], count: Callable[[Point], int], what: str) -> list[str]:
    found = [(point, n) for point in points if (n := count(point))]
    return [f"{what.format(_counts(found, points))}."] if found else []


def _counts(found: Sequence[tuple[Point, int]], points: Sequence[Point]) -> str:
    numbers = [count for _, count in found]
    low, high = min(numbers), max(numbers)
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    noun = "request" if high == 1 else "requests"
    each = " each" if len(found) > 1 and low == high else ""
    return f"{span} {noun}{each} ({where([p for p, _ in found], points)})"

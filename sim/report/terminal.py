"""The table after a run: the lines of `vllm bench serve` as columns, one row a policy and offered rate."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from sim.report.notes import coverage, links, nothing_measured, rejections, saturation, unfinished
from sim.report.points import Point, per_gpu, points_of
from sim.report.verdict import verdicts_of
from sim.report.words import NOTHING, number, per_cent, plain

WIDTH = 110
NAME_WIDTH = 22

Column = tuple[str, str, Callable[[Point], str]]  # group, header, text of the cell


def _of(key: str) -> Callable[[Point], str]:
    return lambda point: number(point.mean(key))


COUNTED: Column = ("", "DONE", lambda point: f"{point.total('completed'):,}")
RATES = (("REQ", "request_throughput"), ("GOOD", "request_goodput"), ("OUT TOK", "output_throughput"))
MEASURED: tuple[Column, ...] = (
    ("TTFT, ms", "P50", _of("median_ttft_ms")),
    ("TTFT, ms", "P99", _of("p99_ttft_ms")),
    ("TPOT, ms", "P50", _of("median_tpot_ms")),
    ("TPOT, ms", "P99", _of("p99_tpot_ms")),
    ("ITL, ms", "P50", _of("median_itl_ms")),
    ("ITL, ms", "P99", _of("p99_itl_ms")),
    ("SLO", "%", lambda point: per_cent(point.mean("slo_attainment"))),
)


def _columns(runs: Sequence[dict[str, Any]]) -> list[Column]:
    """The table's columns; throughputs per GPU where the rates are."""
    group, suffix = ("PER SECOND, GPU", "_per_gpu") if per_gpu(runs) else ("PER SECOND", "")
    return [COUNTED, *((group, head, _of(f"{key}{suffix}")) for head, key in RATES), *MEASURED]


def summary_table(runs: list[dict[str, Any]]) -> str:
    """Table of the runs (rows of `summary.json`), at most 110 columns wide, and lines on what limits them.

    Replicates of a policy and rate become one row of means. `*` marks saturated rows. Columns that no run
    fills are left out.
    """
    points = points_of(runs)
    rated = any(point.rate is not None for point in points)
    columns = [c for c in _columns(runs) if any(c[2](point) != NOTHING for point in points)]
    lead = [("", "POLICY")] + ([("", "RATE")] if rated else [])
    heads = [*lead, *((group, head) for group, head, _ in columns)]
    rows = []
    for point in points:
        cells = [_short(point.policy) + (" *" if point.saturated else "")]
        if rated:
            cells.append(NOTHING if point.rate is None else plain(point.rate))
        rows.append(cells + [text(point) for _, _, text in columns])
    return "\n".join([*_grid(heads, rows), *_winners(points), *_remarks(points)])


def _winners(points: Sequence[Point]) -> list[str]:
    """The winner at each rate and what the runner-up loses by."""
    rows = []
    for verdict in verdicts_of(points):
        runner_up = verdict.losses[0]
        share = per_cent(verdict.winner.mean("slo_attainment"))
        rate = NOTHING if verdict.rate is None else plain(verdict.rate)
        why = f"{_short(runner_up.policy)} {per_cent(runner_up.attainment)} %, {runner_up.cause}: {runner_up.evidence}"
        rows.append((rate, _short(verdict.winner.policy), share, why))
    if not rows:
        return []
    heads = ("RATE", "WINNER", "SLO %", "RUNNER-UP, AND WHAT IT LOSES BY")
    widths = [max(len(head), *(len(row[i]) for row in rows)) for i, head in enumerate(heads[:3])]
    lines = []
    for rate, winner, share, why in (heads, *rows):
        lead = f"{rate.rjust(widths[0])}  {winner.ljust(widths[1])}  {share.rjust(widths[2])}  "
        lines.append(
            textwrap.fill(lead + why, WIDTH, subsequent_indent=" " * len(lead), break_on_hyphens=False)
        )
    return ["", *lines]


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"


def _grid(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Two lines of heading and the rows; the first column to the left, numbers to the right."""
    widths = [max(len(head), *(len(row[i]) for row in rows)) for i, (_, head) in enumerate(heads)]
    top, start = "", 0
    for i, (group, _) in enumerate(heads):
        if group and (i == 0 or heads[i - 1][0] != group):
            members = [k for k, (other, _) in enumerate(heads) if other == group]
            span = sum(widths[k] for k in members) + 2 * (len(members) - 1)
            widths[members[0]] += max(0, len(group) - span)
            top = top.ljust(start) + group.rjust(max(span, len(group)))
        start += widths[i] + 2
    lines = [top] if top else []
    for row in ([head for _, head in heads], *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _remarks(points: Sequence[Point]) -> list[str]:
    lines = []
    replicates = max(len(point.runs) for point in points)
    if replicates > 1:
        lines.append(f"Means of {replicates} replicates; DONE is their sum.")
    for head, found in (
        ("Nothing measured", nothing_measured(points)),
        ("* Saturated", saturation(points)),
        ("Rejected", rejections(points)),
        ("Unfinished", unfinished(points)),
        ("Outside the profile's coverage", coverage(points)),
        ("KV travels", links(points)),
    ):
        lines += [f"{head}: {line}" for line in found]
    wrapped = [
        textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        for line in lines
    ]
    return ["", *wrapped] if wrapped else []

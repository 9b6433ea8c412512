"""The page's tables: every run with its metrics, and the rate that each policy holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from sim.report.points import Point, holding_rate, per_gpu, points_of, policies_of, swept_rate
from sim.report.verdict import verdicts_of
from sim.report.words import NOTHING, number, per_cent, plain

Run = dict[str, Any]
Column = tuple[str, str, Callable[[Run], str]]  # group, header with unit, text of the cell


def _of(key: str) -> Callable[[Run], str]:
    return lambda run: number(run.get(key))


def _count(key: str) -> Callable[[Run], str]:
    return lambda run: NOTHING if run.get(key) is None else f"{int(run[key]):,}"


def _share(run: Run) -> str:
    return per_cent(run.get("slo_attainment"))


def _stalled(ms: str) -> Callable[[Run], str]:
    return lambda run: number((run.get("stalled_request_pct") or {}).get(ms), 2)


COLUMNS: tuple[Column, ...] = (
    ("requests", "completed", _count("completed")),
    ("requests", "rejected", _count("rejected")),
    ("requests", "unfinished", _count("unfinished")),
    ("requests", "preemptions", _count("preemptions")),
    ("throughput", "req/s", _of("request_throughput")),
    ("throughput", "goodput, req/s", _of("request_goodput")),
    ("throughput", "output tok/s", _of("output_throughput")),
    ("throughput", "total tok/s", _of("total_token_throughput")),
    ("SLO", "attained, %", _share),
    *(
        (f"{name}, ms", head, _of(f"{stat}_{metric}_ms"))
        for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2E latency"))
        for head, stat in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99"))
    ),
    ("ITL, ms", "max", _of("max_itl_ms")),
    ("stalled, %", "> 200 ms", _stalled("200")),
    ("stalled, %", "> 500 ms", _stalled("500")),
    ("utilisation, %", "SM active", _of("sm_active_pct")),
    ("utilisation, %", "tensor", _of("tensor_active_pct")),
    ("utilisation, %", "HBM", _of("hbm_util_pct")),
    ("utilisation, %", "KV cache", _of("kv_util_pct")),
    ("energy", "J/output token", _of("joules_per_output_token")),
    ("energy", "mean W", _of("mean_power_w")),
    ("energy", "p99 W", _of("p99_power_w")),
    ("energy", "peak W", _of("peak_power_w")),
    ("energy", "at the limit, %", _of("power_cap_pct")),
)


def run_table(runs: Sequence[Run]) -> str:
    """All runs as an HTML table: policies in their order, rates rising; columns that no run fills are left out."""
    ordered = [run for point in points_of(runs) for run in point.runs]
    grouped = sorted(COLUMNS, key=lambda c: [g for g, _, _ in COLUMNS].index(c[0]))
    columns = [c for c in grouped if any(c[2](run) != NOTHING for run in ordered)]
    seeds = len({run.get("seed") for run in runs}) > 1
    rated = any(run.get("request_rate") is not None for run in runs)
    unit = " per GPU" if per_gpu(runs) else ""
    heads = ["policy", *([f"rate, req/s{unit}"] if rated else []), *(["seed"] if seeds else [])]
    top = "".join(f'<th rowspan="2"{_pin(i)}>{head}</th>' for i, head in enumerate(heads))
    groups = list(dict.fromkeys(c[0] for c in columns))
    for group in groups:
        span = sum(c[0] == group for c in columns)
        top += f'<th colspan="{span}" class="group">{escape(group)}</th>'
    starts = {next(i for i, c in enumerate(columns) if c[0] == group) for group in groups}
    second = "".join(f"<th{_edge(i in starts)}>{escape(head)}</th>" for i, (_, head, _) in enumerate(columns))
    policies = policies_of(runs)
    rows = []
    for run in ordered:
        name = escape(str(run["policy"]))
        mark = ' <span class="mark" title="saturated">▲</span>' if run.get("saturated") else ""
        swatch = f'<i class="dot p{policies.index(str(run["policy"])) % 7}"></i>'
        cells = [f'<th scope="row" class="pin">{swatch}{name}{mark}</th>']
        if rated:
            cells.append(f"<td>{_rate(swept_rate(run))}</td>")
        if seeds:
            cells.append(f"<td>{run.get('seed', NOTHING)}</td>")
        cells += [f"<td{_edge(i in starts)}>{text(run)}</td>" for i, (_, _, text) in enumerate(columns)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="runs"><thead><tr>{top}</tr><tr>{second}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def holding_table(points: Sequence[Point], target: float) -> str:
    """Per policy the highest swept rate that holds the SLO and the highest goodput; empty without SLO or sweep."""
    rates = sorted({p.rate for p in points if p.rate is not None})
    if len(rates) < 2 or all(p.mean("slo_attainment") is None for p in points):
        return ""
    policies = policies_of([run for p in points for run in p.runs])
    each = per_gpu(points[0].runs)
    key, unit = ("request_goodput_per_gpu", " per GPU") if each else ("request_goodput", "")
    rows = []
    for index, policy in enumerate(policies):
        held = holding_rate(points, policy, target)
        goodput = {p.rate: v for p in points if p.policy == policy and (v := p.mean(key))}
        best = max(goodput, key=lambda rate: goodput[rate]) if goodput else None
        holds = f"below {plain(rates[0])}" if held is None else plain(held)
        holds = f"{holds} or more" if held == rates[-1] else holds
        peak = f"{number(goodput[best])} at {plain(best)} req/s" if best is not None else NOTHING
        rows.append(
            f'<tr><th scope="row"><i class="dot p{index % 7}"></i>{escape(policy)}</th>'
            f"<td>{holds}</td><td>{peak}</td></tr>"
        )
    head = (
        f"<th>policy</th><th>highest swept rate with {plain(100 * target)}\u00a0% within SLO, req/s{unit}</th>"
        f"<th>highest goodput, req/s{unit}</th>"
    )
    return (
        f'<div class="scroll"><table class="held"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def verdict_table(points: Sequence[Point]) -> str:
    """The winner at each rate, and what every other policy loses by; empty without an SLO or with one policy."""
    verdicts = verdicts_of(points)
    if not verdicts:
        return ""
    policies = policies_of([run for p in points for run in p.runs])
    rows = []
    for verdict in verdicts:
        share = per_cent(verdict.winner.mean("slo_attainment"))
        index = policies.index(verdict.winner.policy) % 7
        others = "".join(
            f"<tr><td>{escape(loss.policy)}</td><td>{per_cent(loss.attainment)}</td><td>{escape(loss.cause)}</td>"
            f'<td class="words">{escape(loss.evidence)}</td></tr>'
            for loss in verdict.losses
        )
        rows.append(
            f'<tr class="winner"><th scope="rowgroup" rowspan="{len(verdict.losses) + 1}">{_rate(verdict.rate)}</th>'
            f'<td><i class="dot p{index}"></i><b>{escape(verdict.winner.policy)}</b></td><td>{share}</td>'
            f"<td>wins</td><td></td></tr>{others}"
        )
    unit = " per GPU" if per_gpu(points[0].runs) else ""
    head = (
        f"<th>rate, req/s{unit}</th><th>policy</th><th>SLO met, %</th><th>loses by</th>"
        "<th>against the winner</th>"
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="verdicts"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _pin(index: int) -> str:
    return ' class="pin"' if index == 0 else ""


def _edge(first: bool) -> str:
    return ' class="edge"' if first else ""


def _rate(rate: float | None) -> str:
    return NOTHING if rate is None else plain(rate)

"""The page of `simctl profile show -o`: each curve with its measured points, coverage, and errors by fold."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cost.gpu import load_gpu
from sim.cost.measured import FEATURES, MeasuredCurve
from sim.cost.profile import load_folder
from sim.cost.profile_schema import read_yaml

if TYPE_CHECKING:
    from calib.fit.points import Points

WIDTHS = 4  # SM counts drawn in one picture
SAMPLES = 160
LINES = 3  # values of a second axis (history, context) drawn in one picture
COLOURS = ("#3266ad", "#c2571a", "#2e8b57", "#7b4fa3")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.15rem .7rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f5f7}"
)


def profile_page(folder: Path) -> str:
    """One HTML page that works offline; SimctlError if the folder is no profile."""
    import plotly.io as io

    from calib.fit.solo import read_points

    data = read_yaml(folder)
    gpu = load_gpu(str(data.get("gpu")))
    profile = load_folder(folder, gpu)
    errors = ((data.get("about") or {}).get("errors") or {}).get("operators") or {}
    parts: list[str] = []
    plots = 0
    for operator, points in read_points(folder, gpu).items():
        curve = profile.curves.get(operator)
        if not isinstance(curve, MeasuredCurve):
            continue
        parts.append(f"<h2>{escape(operator)}</h2><p>{escape(curve.label)}; {escape(curve.coverage)}</p>")
        for figure in _figures(operator, points, curve):
            plots += 1
            options = {"include_plotlyjs": plots == 1, "full_html": False, "default_height": 380}
            parts.append(io.to_html(figure, div_id=f"plot{plots}", **options))
        parts.append(_table(errors.get(operator) or {}))
    title = f"{data.get('name')}: {(data.get('about') or {}).get('device', {}).get('name', gpu.name)}"
    body = f"<h1>{escape(title)}</h1><p>Lines are the curves, dots are measured medians.</p>{''.join(parts)}"
    return f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>{body}"


def _figures(operator: str, points: Points, curve: MeasuredCurve) -> list[Any]:
    """Time against the first axis, one picture for each set of constants (and for some values of a second axis)."""
    found = []
    for key, mask in points.groups().items():
        part = points.take(mask)
        name = f"{operator} {key[0]} x {key[1]}" if points.kind in ("gemm", "experts") else operator
        for fixed, where in _slices(part):
            title = name + ("" if fixed is None else f", {FEATURES[part.kind][1]} {fixed:g}")
            found.append(_figure(title, part.take(where), curve, fixed))
    return found


def _slices(part: Points) -> list[tuple[float | None, Any]]:
    names = FEATURES[part.kind]
    if len(names) == 1:
        return [(None, np.ones(len(part), dtype=bool))]
    values, counts = np.unique(part.features[names[1]], return_counts=True)
    common = np.sort(values[np.argsort(-counts, kind="stable")[:LINES]])
    return [(float(value), part.features[names[1]] == value) for value in common]


def _figure(title: str, part: Points, curve: MeasuredCurve, fixed: float | None) -> Any:
    import plotly.graph_objects as go

    first = FEATURES[part.kind][0]
    widths, counts = np.unique(part.sms, return_counts=True)
    chosen = np.sort(widths[np.argsort(-counts, kind="stable")[:WIDTHS]])
    figure = go.Figure()
    for colour, sms in zip(COLOURS, chosen, strict=False):
        mine = part.take(part.sms == sms)
        x = mine.features[first]
        grid = np.unique(np.round(np.geomspace(x.min(), x.max(), SAMPLES)))
        line = _curve_seconds(mine, curve, first, grid, fixed, int(sms))
        text = f"{int(sms)} SMs"
        figure.add_scatter(
            x=grid, y=1e6 * line, mode="lines", line={"color": colour, "width": 1.5}, name=text
        )
        marker = {"color": colour, "size": 5}
        figure.add_scatter(
            x=x, y=1e6 * mine.seconds, mode="markers", marker=marker, name=text, showlegend=False
        )
    figure.update_layout(title=title, template="plotly_white", margin={"t": 40, "b": 40, "l": 60, "r": 20})
    figure.update_xaxes(type="log", title=first)
    figure.update_yaxes(type="log", title="µs")
    return figure


def _curve_seconds(
    mine: Points, curve: MeasuredCurve, first: str, grid: Any, fixed: float | None, sms: int
) -> Any:
    """The curve over a grid of the first axis, on one SM count."""
    from dataclasses import replace

    names = FEATURES[mine.kind]
    features = {first: grid} if fixed is None else {first: grid, names[1]: np.full(len(grid), fixed)}
    # equal contexts: the longest is the mean
    drawn = replace(mine, features=features, extra={})
    return curve.timing(drawn.shape(mine.keys[0]), sms).seconds


def _table(record: dict[str, Any]) -> str:
    """Errors of what is kept, by fold, and the medians of the baselines."""
    held = record.get("held_out") or {}
    if not held:
        return ""
    baselines = record.get("baselines") or {}
    names = ["held out", "points", "median", "p95", "bias", *baselines]
    rows = []
    for fold, one in held.items():
        cells = [fold, str(one["points"]), *(_percent(one.get(key)) for key in ("median", "p95", "bias"))]
        cells += [_percent((table.get(fold) or [None])[0]) for table in baselines.values()]
        rows.append(cells)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    note = escape(str(record.get("method", "")))
    return f"<p>Kept: {note}. Right of the bias: medians of the other methods.</p><table><tr>{head}</tr>{body}</table>"


def _percent(value: Any) -> str:
    return "–" if value is None else f"{100 * float(value):.1f} %"

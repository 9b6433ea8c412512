"""Figures as plain plotly JSON: a metric against the offered rate, or against the policies when there is one rate.

A trace's `meta` says which policy and which percentile or rate it shows; the page's script makes it visible or
not by that alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sim.report.colours import GRID, INK, MUTED, PAPER, colour, dash, symbol
from sim.report.points import Key, Point, per_gpu, policies_of, rates_of
from sim.report.words import number, plain, rate_name

Figure = dict[str, Any]
STATS = {"p50": "median", "p90": "p90", "p99": "p99"}


@dataclass(frozen=True)
class Metric:
    """What a panel shows: title, axis title with unit, and the run's key for each value of the selector.

    `scale` multiplies the values; `limit` draws a line, named `limit_name`; `share` fixes the axis to 0-100 %.
    """

    title: str
    axis: str
    keys: dict[str, Key]
    scale: float = 1.0
    log: bool = False
    limit: float | None = None
    limit_name: str = ""
    share: bool = False
    diagonal: bool = False

    def known(self, points: Sequence[Point]) -> bool:
        """Whether any point has a value."""
        return any(p.mean(key) is not None for p in points for key in self.keys.values())


def panel(metric: Metric, points: Sequence[Point]) -> Figure:
    """The figure of one metric: lines over the rates, or one row per policy at a single rate."""
    return _against_rate(metric, points) if len(rates_of(points)) > 1 else _by_policy(metric, points)


def base_layout(x_title: str, y_title: str) -> dict[str, Any]:
    """Axes and colours that every figure shares; the page adds fonts and the dark colours."""
    axis = {
        "gridcolor": GRID,
        "linecolor": MUTED,
        "tickcolor": MUTED,
        "tickfont": {"color": MUTED},
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
    }
    return {
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 8}, "showgrid": False, "ticks": "outside"},
        "yaxis": {**axis, "title": {"text": y_title, "standoff": 8}},
        "height": 300,
        "margin": {"l": 8, "r": 14, "t": 10, "b": 8},
        "showlegend": False,
        "hovermode": "closest",
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"color": INK, "size": 12},
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK}, "align": "left"},
        "shapes": [],
        "annotations": [],
    }


def limit_line(value: float, name: str, *, upright: bool = False, log: bool = False) -> tuple[Any, Any]:
    """A dashed line across the panel and its label, as (shape, annotation)."""
    along, across = ("y", "x") if upright else ("x", "y")
    line = {"color": INK, "width": 1.2, "dash": "dash"}
    shape = {
        "type": "line",
        f"{along}ref": f"{along} domain",
        f"{across}ref": across,
        f"{along}0": 0,
        f"{along}1": 1,
        f"{across}0": value,
        f"{across}1": value,
        "line": line,
    }
    note = {
        "text": name,
        "showarrow": False,
        f"{along}ref": f"{along} domain",
        f"{across}ref": across,
        across: math.log10(value) if log else value,
        "font": {"color": INK, "size": 11},
        # above the panel, or on the line at its left end
        **({"y": 1, "xanchor": "center"} if upright else {"x": 0, "xanchor": "left"}),
        "yanchor": "bottom",
    }
    return shape, note


def _against_rate(metric: Metric, points: Sequence[Point]) -> Figure:
    policies = policies_of([run for p in points for run in p.runs])
    rates = [rate for rate in rates_of(points) if rate is not None]
    unit = " per GPU" if per_gpu(points[0].runs) else ""
    layout = base_layout(f"offered rate, requests/s{unit}", metric.axis)
    layout["xaxis"] |= _rate_axis(rates)
    layout["yaxis"] |= _value_axis(metric)
    data: list[dict[str, Any]] = []
    if metric.diagonal:
        data.append(_as_offered(metric, points, rates))
    for policy in policies:
        own = [p for p in points if p.policy == policy and p.rate is not None]
        for choice, key in metric.keys.items():
            trace = _curve(metric, own, key, policies, policy)
            if len(metric.keys) > 1:
                trace["meta"]["pct"] = choice
            data.append(trace)
    _add_limit(metric, layout, upright=False)
    return {"data": data, "layout": layout}


def _as_offered(metric: Metric, points: Sequence[Point], rates: Sequence[float]) -> dict[str, Any]:
    """What is offered, as far up as the curves need the axis; many points, since the axis may be log."""
    top = max((value for p in points for key in metric.keys.values() if (value := p.mean(key))), default=0.0)
    last = max(min(rates[-1], 1.3 * top), rates[0])
    at = [rates[0] * (last / rates[0]) ** (k / 40) for k in range(41)]
    line = {"color": MUTED, "width": 1, "dash": "dot"}
    return {"type": "scatter", "x": at, "y": at, "mode": "lines", "line": line, "hoverinfo": "skip"}


def _curve(
    metric: Metric, own: Sequence[Point], key: Key, policies: Sequence[str], policy: str
) -> dict[str, Any]:
    values = [p.mean(key) for p in own]
    ink = colour(policies, policy)
    shape = symbol(policies, policy)
    spans = [p.interval(key) for p in own]
    hover = [_hover(metric, p, value, span) for p, value, span in zip(own, values, spans, strict=True)]
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(policy),
        "x": [p.rate for p in own],
        "y": [None if v is None else v * metric.scale for v in values],
        "line": {"color": ink, "width": 2, "dash": dash(policies, policy)},
        "marker": {
            "color": ink,
            "size": 8,
            "symbol": [f"{shape}-open" if p.saturated else shape for p in own],
            "line": {"color": ink, "width": 1.5},
        },
        "hovertext": hover,
        "hoverinfo": "text",
        "meta": {"policy": policy},
    }
    if any(spans):
        mid = [v if v is not None else 0.0 for v in values]
        plus = [(s[1] - m) * metric.scale if s else 0.0 for s, m in zip(spans, mid, strict=True)]
        minus = [(m - max(s[0], 0.0)) * metric.scale if s else 0.0 for s, m in zip(spans, mid, strict=True)]
        bars = {"type": "data", "symmetric": False, "array": plus, "arrayminus": minus}
        trace["error_y"] = {**bars, "color": ink, "thickness": 1.2, "width": 3}
    return trace


def _hover(metric: Metric, point: Point, value: float | None, span: tuple[float, float] | None) -> str:
    text = f"<b>{escape(point.policy)}</b>, {rate_name(point.rate)}<br>{metric.axis.replace(' (log)', '')}: "
    text += number(None if value is None else value * metric.scale)
    if span:
        low, high = (number(bound * metric.scale) for bound in span)
        text += f"<br>95 % interval {low} to {high}, {len(point.runs)} runs"
    return text + ("<br>saturated" if point.saturated else "")


def _rate_axis(rates: Sequence[float]) -> dict[str, Any]:
    """Ticks at the swept rates, thinned so that labels keep apart; log when they span more than a factor 8."""
    log = rates[-1] / rates[0] >= 8
    place = [math.log10(r) if log else r for r in rates]
    span = place[-1] - place[0]
    shown: list[int] = []
    for at in range(len(rates)):
        if not shown or place[at] - place[shown[-1]] >= 0.1 * span:
            shown.append(at)
    axis: dict[str, Any] = {
        "tickvals": [rates[at] for at in shown],
        "ticktext": [plain(rates[at]) for at in shown],
        "range": [place[0] - 0.05 * span, place[-1] + 0.05 * span],
    }
    return {**axis, "type": "log"} if log else axis


def _value_axis(metric: Metric) -> dict[str, Any]:
    if metric.share:
        return {"range": [-3, 104], "tickvals": [0, 25, 50, 75, 100]}
    return {"type": "log"} if metric.log else {"rangemode": "tozero", "tickformat": ",~r"}


def _add_limit(metric: Metric, layout: dict[str, Any], *, upright: bool) -> None:
    if metric.limit is not None:
        shape, note = limit_line(metric.limit, metric.limit_name, upright=upright, log=metric.log)
        layout["shapes"].append(shape)
        if metric.share and not upright:  # a label would hide the curves around it; the tick says it
            kept = [tick for tick in (0, 25, 50, 75, 100) if abs(tick - metric.limit) > 6]
            layout["yaxis"]["tickvals"] = sorted([*kept, metric.limit])
            return
        layout["annotations"].append(note)


def _by_policy(metric: Metric, points: Sequence[Point]) -> Figure:
    """One row a policy: dots for the percentiles of a latency, the last with its value; else a bar with its value."""
    policies = policies_of([run for p in points for run in p.runs])
    layout = base_layout(metric.axis, "")
    layout["yaxis"] |= {"type": "category", "showgrid": False, "ticks": ""}
    layout["yaxis"]["range"] = [len(policies) - 0.5, -0.5]
    layout["yaxis"]["tickfont"] = {"color": INK}
    layout["xaxis"] |= {**_value_axis(metric), "showgrid": True}
    layout["height"] = 100 + 44 * len(policies)
    several = len(metric.keys) > 1
    data = [
        (_dots if several else _bar)(metric, p, colour(policies, p.policy), symbol(policies, p.policy))
        for p in points
    ]
    if metric.share:
        layout["xaxis"]["range"] = [0, 118]
    layout["margin"]["t"] = 28
    _add_limit(metric, layout, upright=True)
    return {"data": data, "layout": layout}


def _bar(metric: Metric, point: Point, ink: str, shape: str) -> dict[str, Any]:
    key = next(iter(metric.keys.values()))
    value = point.mean(key)
    scaled = None if value is None else value * metric.scale
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": [escape(point.policy)],
        "x": [scaled],
        "width": [0.5],
        "marker": {"color": ink, "opacity": 0.45 if point.saturated else 1.0},
        "text": [number(scaled) + (" saturated" if point.saturated else "")],
        "textposition": "auto",
        "insidetextanchor": "start",
        "hovertext": [_hover(metric, point, value, point.interval(key))],
        "hoverinfo": "text",
        "meta": {"policy": point.policy},
    }
    return trace


def _dots(metric: Metric, point: Point, ink: str, shape: str) -> dict[str, Any]:
    found = {choice: point.mean(key) for choice, key in metric.keys.items()}
    known = {choice: value for choice, value in found.items() if value is not None}
    last = list(known)[-1] if known else ""
    return {
        "type": "scatter",
        "mode": "lines+markers+text",
        "y": [escape(point.policy)] * len(known),
        "x": [value * metric.scale for value in known.values()],
        "text": ["" if choice != last else number(known[last] * metric.scale) for choice in known],
        "textposition": "middle right",
        "textfont": {"color": INK, "size": 11},
        "line": {"color": ink, "width": 2},
        "marker": {
            "color": ink,
            "size": [6, 8, 10][-len(known) :],
            "opacity": 1,  # plotly fades markers of several sizes
            "symbol": f"{shape}-open" if point.saturated else shape,
            "line": {"color": ink, "width": 2},
        },
        "hovertext": [
            _hover(metric, point, value, point.interval(metric.keys[choice])).replace(
                metric.axis, f"{choice} {metric.axis}"
            )
            for choice, value in known.items()
        ],
        "hoverinfo": "text",
        "meta": {"policy": point.policy},
    }

"""Bars of SM time by class: what was active, and by what the rest was lost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sim.report.colours import GRID
from sim.report.panels import Figure, base_layout
from sim.report.points import Point, rates_of
from sim.report.words import number, rate_name

# class -> (name, colour in the light page), in the order of the stack; colours have partners in `colours.DARK`
CLASSES = {
    "active": ("active", "#0072b2"),
    "wave_tail": ("wave tail", "#56b4e9"),
    "attention_bound": ("attention bound by memory", "#009e73"),
    "lockstep": ("lockstep of a mixed batch", "#e69f00"),
    "contention": ("contention", "#d55e00"),
    "host": ("host gap", "#cc79a7"),
    "switch": ("partition switch", "#1b1f24"),
    "idle_lane": ("idle lane", "#7a7a7a"),
    "empty": ("empty", GRID),
}


def sm_time_bars(points: Sequence[Point]) -> Figure:
    """Horizontal stacked bars, one a policy, for every offered rate (the page shows one)."""
    layout = base_layout("SM time, %", "")
    layout["barmode"] = "stack"
    layout["xaxis"] |= {"range": [0, 100]}
    layout["yaxis"] |= {"autorange": "reversed", "title": {"text": ""}, "type": "category"}
    policies = list(dict.fromkeys(p.policy for p in points))
    layout["height"] = 120 + 24 * len(policies)
    layout["showlegend"] = True
    layout["legend"] = {"orientation": "h", "traceorder": "normal"}
    # below the axis' title, however few the bars
    layout["legend"] |= {"yref": "container", "y": 0, "yanchor": "bottom"}
    data: list[dict[str, Any]] = []
    for rate in rates_of(points):
        here = [p for p in points if p.rate == rate]
        for key, (name, ink) in CLASSES.items():
            values = [p.mean(("sm_time_pct", key)) for p in here]
            if not any(values):
                continue
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "y": [escape(p.policy) for p in here],
                    "x": values,
                    "marker": {"color": ink},
                    "hovertext": [
                        f"<b>{escape(p.policy)}</b>, {rate_name(rate)}<br>{name}: {number(v)} %"
                        for p, v in zip(here, values, strict=True)
                    ],
                    "hoverinfo": "text",
                    "meta": {"rate": rate_name(rate)},
                }
            )
    return {"data": data, "layout": layout}

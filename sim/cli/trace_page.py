"""One offline page with plots of a trace: arrivals over time, gaps, lengths, prompt against output."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.workload.trace import Trace

_BLUE, _ORANGE = "#0072B2", "#D55E00"  # tell apart with any colour vision
_MOST_POINTS = 5000
_BINS_S = (1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)


def trace_page(trace: Trace, facts: dict[str, Any]) -> str:
    """The page as HTML with plotly's script inside; the same trace gives the same page."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    bin_s = _bin_width(trace)
    titles = (f"Requests per {bin_s} s", "Gaps between arrivals", "Lengths", "Output against prompt")
    figure = make_subplots(
        rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.14
    )
    if trace.arrival_s is None:
        figure.add_annotation(
            text="lengths only, no arrivals", xref="x domain", yref="y domain", x=0.5, y=0.5
        )
    else:
        _arrivals(figure, go, trace.arrival_s, bin_s)
    for name, values, colour in (
        ("prompt", trace.prompt_tokens, _BLUE),
        ("output", trace.output_tokens, _ORANGE),
    ):
        x, share = _distribution(values.astype(np.float64))
        figure.add_trace(
            go.Scatter(x=x, y=share, name=name, line={"color": colour, "shape": "hv"}), row=2, col=1
        )
    pick = np.linspace(0, len(trace) - 1, min(len(trace), _MOST_POINTS)).astype(np.int64)
    points = {"x": trace.prompt_tokens[pick].tolist(), "y": trace.output_tokens[pick].tolist()}
    marker = {"color": _BLUE, "size": 4, "opacity": 0.4}
    figure.add_trace(go.Scattergl(**points, mode="markers", marker=marker, showlegend=False), row=2, col=2)
    figure.update_xaxes(title_text="tokens", type="log", row=2, col=1)
    figure.update_yaxes(title_text="share of requests at most as long", row=2, col=1)
    figure.update_xaxes(title_text="prompt tokens", type="log", row=2, col=2)
    figure.update_yaxes(title_text="output tokens", type="log", row=2, col=2)
    figure.update_layout(template="plotly_white", height=820, legend={"x": 0.02, "y": 0.36})
    plot = figure.to_html(full_html=False, include_plotlyjs=True, div_id="trace")
    notes = "".join(f"<li>{escape(note)}</li>" for note in facts["notes"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(trace.name)}</title></head>'
        f'<body style="font-family:sans-serif;margin:2em"><h1>{escape(trace.name)}</h1><ul>{notes}</ul>{plot}'
        f"<p>sha256 {escape(trace.sha256)}</p></body></html>\n"
    )


def _arrivals(figure: Any, go: Any, arrival_s: NDArray[np.float64], bin_s: int) -> None:
    counts = np.bincount((arrival_s / bin_s).astype(np.int64))
    bars = go.Bar(
        x=(np.arange(len(counts)) * bin_s).tolist(), y=counts.tolist(), marker_color=_BLUE, showlegend=False
    )
    figure.add_trace(bars, row=1, col=1)
    figure.update_xaxes(title_text="time, s", row=1, col=1)
    figure.update_yaxes(title_text="requests", row=1, col=1)
    gaps = np.diff(arrival_s)
    if not np.any(gaps > 0):
        return
    x, share = _distribution(gaps)
    name = f"CV {np.std(gaps) / np.mean(gaps):.3g}"
    line = {"color": _BLUE, "shape": "hv"}
    figure.add_trace(
        go.Scatter(x=x, y=(1 - np.asarray(share)).tolist(), name=name, line=line, showlegend=False), 1, 2
    )
    figure.update_xaxes(
        title_text=f"gap, s ({name}; exponential gaps of a Poisson process fall on a line)", row=1, col=2
    )
    figure.update_yaxes(title_text="share longer", type="log", row=1, col=2)


def _distribution(values: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Points of the empirical distribution function, thinned to what a screen can show, the tail whole."""
    ordered = np.sort(values)
    last = len(ordered) - 1
    pick = np.union1d(
        np.linspace(0, last, min(last + 1, 1000)).astype(np.int64), np.arange(max(0, last - 99), last + 1)
    )
    return ordered[pick].tolist(), ((pick + 1) / (len(ordered) + 1)).tolist()


def _bin_width(trace: Trace) -> int:
    """A round number of seconds that gives at most some 120 bars."""
    span = 0.0 if trace.arrival_s is None else float(trace.arrival_s[-1])
    return next((width for width in _BINS_S if span / width <= 120), _BINS_S[-1])

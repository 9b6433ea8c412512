"""Distribution functions of TTFT, TPOT and E2E latency, one curve a policy and offered rate."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.definitions import latencies
from sim.report.colours import colour, dash
from sim.report.panels import Figure, base_layout, limit_line
from sim.report.points import swept_rate
from sim.report.words import LATENCIES, plain, rate_name

POINTS = 160
TAIL = 40


def distribution(
    metric: str, runs: Sequence[dict[str, Any]], requests: pd.DataFrame, limit_ms: float | None
) -> Figure:
    """The figure of `ttft`, `tpot` or `e2el`: share of the window's accepted requests at most as slow.

    A curve stops below 100 % where the end of the run left requests without a value. TPOT speaks of requests
    with more than one output token. Replicates are pooled.
    """
    policies = list(dict.fromkeys(str(run["policy"]) for run in runs))
    layout = base_layout(f"{LATENCIES[metric]}, ms (log)", "share of requests, %")
    layout["xaxis"] |= {"type": "log", "showgrid": True}
    layout["yaxis"] |= {"range": [0, 103], "tickvals": [0, 25, 50, 75, 90, 100]}
    layout["margin"]["t"] = 28
    data = []
    for (policy, rate), frame in _groups(runs, requests):
        values, accepted = _values(metric, frame)
        if not len(values):
            continue
        x, share = curve(values, accepted)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(policy),
                "x": x,
                "y": share,
                "line": {
                    "color": colour(policies, policy),
                    "width": 2,
                    "shape": "hv",
                    "dash": dash(policies, policy),
                },
                "hovertemplate": f"<b>{escape(policy)}</b>, {rate_name(rate)}<br>"
                f"%{{y:.1f}} % within %{{x:,.1f}} ms<extra></extra>",
                "meta": {"policy": policy, "rate": rate_name(rate)},
            }
        )
    if limit_ms is not None:
        shape, note = limit_line(limit_ms, f"SLO {plain(limit_ms)} ms", upright=True, log=True)
        layout["shapes"].append(shape)
        layout["annotations"].append(note)
    return {"data": data, "layout": layout}


def _groups(
    runs: Sequence[dict[str, Any]], requests: pd.DataFrame
) -> list[tuple[tuple[str, float | None], pd.DataFrame]]:
    """The requests of each run's window, replicates of one policy and rate together."""
    groups: dict[tuple[str, float | None], list[pd.DataFrame]] = {}
    for run in runs:
        rate = run.get("request_rate")
        mine = requests["policy"] == run["policy"]
        mine &= requests["request_rate"].isna() if rate is None else requests["request_rate"] == rate
        if "seed" in requests.columns and run.get("seed") is not None:
            mine &= requests["seed"] == run["seed"]
        start = float(run.get("window_start") or 0.0)
        mine &= requests["arrival_s"].between(start, start + float(run.get("duration") or np.inf))
        groups.setdefault((str(run["policy"]), swept_rate(run)), []).append(requests[mine])
    return [(key, pd.concat(frames)) for key, frames in groups.items()]


def _values(metric: str, frame: pd.DataFrame) -> tuple[NDArray[np.float64], int]:
    """Known values in ms and the number of requests that they are a share of."""
    accepted = frame[frame["status"] != "rejected"]
    if metric == "tpot":
        accepted = accepted[accepted["output_tokens"] > 1]
    values = latencies(accepted)[f"{metric}_s"].to_numpy(np.float64) * 1e3
    return values[~np.isnan(values)], len(accepted)


def curve(values: NDArray[np.float64], total: int) -> tuple[list[float], list[float]]:
    """Points (value, share of `total` in per cent) of the distribution function.

    Thinned to what a screen can show, the slowest requests whole.
    """
    ordered = np.sort(values)
    last = len(ordered) - 1
    evenly = np.linspace(0, last, min(last + 1, POINTS)).astype(np.int64)
    pick = np.union1d(evenly, np.arange(max(0, last - TAIL + 1), last + 1))
    shown = [float(f"{v:.5g}") for v in ordered[pick]]
    return shown, [round(100 * float(k + 1) / total, 3) for k in pick]

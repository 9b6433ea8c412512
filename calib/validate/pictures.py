"""Pictures of the fidelity page: every launch, and the distributions of the requests."""

from __future__ import annotations

import numpy as np

from calib.report.svg import Axis, Series, chart
from calib.validate.compare import Group
from sim.metrics.definitions import latencies

CURVE_POINTS = 100
MOST_DOTS = 400  # of a kind


def slug(group: Group) -> str:
    """What tells a group's pictures from those of the others."""
    study = f"{group.study}-" if group.study else ""
    return f"{study}{group.policy}-{group.mode}-{group.load:g}"


def pictures(group: Group) -> dict[str, str]:
    """SVG by file name."""
    return {f"steps-{slug(group)}.svg": scatter(group), f"cdf-{slug(group)}.svg": overlay(group)}


def scatter(group: Group) -> str:
    """Simulated against real seconds of every launch, by what it held."""
    kinds = {
        "decodes": group.steps["q_tokens"] == "",
        "prompts": (group.steps["q_tokens"] != "") & (group.steps["decode_batch"] == 0),
        "both": (group.steps["q_tokens"] != "") & (group.steps["decode_batch"] > 0),
    }
    real, ours = 1e3 * group.step_real_s, 1e3 * group.step_simulated_s
    series = []
    for name, mask in kinds.items():
        at = np.flatnonzero(mask.to_numpy())
        at = at[:: max(1, len(at) // MOST_DOTS)]
        if len(at):
            series.append(Series(name, [(float(real[i]), float(ours[i])) for i in at], joined=False))
    low, high = float(min(real.min(), ours.min())), float(max(real.max(), ours.max()))
    series.append(Series("equal", [(low, low), (high, high)], colour="#222"))
    title = f"{group.policy} at {group.load:g} x capacity: each launch"
    return chart(title, Axis("measured, ms", log=10), Axis("simulated, ms", log=10), series)


def overlay(group: Group) -> str:
    """Distribution functions of TTFT and TPOT, real (first repeat) and simulated."""
    series = []
    for name in ("ttft", "tpot"):
        for side, table in (("real", group.real_requests), ("simulated", group.simulated_requests)):
            values = np.sort(latencies(table)[f"{name}_s"].dropna().to_numpy() * 1e3)
            if not len(values):
                continue
            at = np.unique(np.linspace(0, len(values) - 1, CURVE_POINTS).astype(int))
            points = [(float(max(values[k], 0.1)), 100.0 * (k + 1) / len(values)) for k in at]
            series.append(Series(f"{name.upper()}, {side}", points))
    title = f"{group.policy} at {group.load:g} x capacity: requests"
    return chart(title, Axis("ms", log=10), Axis("share of requests, %", low=0, high=100), series)

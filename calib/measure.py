"""The timing protocol: what is warmed up, how often and how long each point is timed, and what is kept of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from calib.device import Reading


@dataclass(frozen=True)
class Protocol:
    """How one point is timed. All in seconds.

    Short kernels are captured `per_replay` times in one CUDA graph, so that a replay takes `replay_s`, far above
    the resolution of events (0.5 us) and the gap between replays. The point is warmed for `warm_s`, then timed
    for about `window_s`, with at least `least` and at most `most` samples.
    """

    name: str = "quick"
    warm_s: float = 0.002
    window_s: float = 0.006
    replay_s: float = 0.0003
    least: int = 5
    most: int = 20
    longest_graph: int = 100
    corun_s: float = 0.06

    def per_replay(self, estimate_s: float, copies: int = 1, cold: int = 1) -> int:
        """Launches in one graph: enough for `replay_s`, whole rounds of the buffers where those are few.

        `cold`: launches over different buffers that displace the L2, wanted as far as there are `copies`.
        """
        wanted = max(int(np.ceil(self.replay_s / max(estimate_s, 1e-7))), min(cold, copies))
        if copies > 1 and wanted > copies:
            wanted = -(-wanted // copies) * copies
        return int(np.clip(wanted, 1, self.longest_graph))

    def samples(self, replay_s: float) -> int:
        """Replays to time."""
        return int(np.clip(np.ceil(self.window_s / max(replay_s, 1e-7)), self.least, self.most))

    def warm_replays(self, replay_s: float) -> int:
        """Replays before timing, at least one."""
        return int(np.clip(np.ceil(self.warm_s / max(replay_s, 1e-7)), 1, 1000))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


QUICK = Protocol()
FULL = Protocol("full", warm_s=0.01, window_s=0.02, least=10, most=40, corun_s=0.15)
SMOKE = Protocol("smoke", warm_s=0.0005, window_s=0.001, least=3, most=5, corun_s=0.03)


@dataclass
class Sample:
    """Times of one point, seconds of one launch each, with the clocks while it ran."""

    times_s: list[float]
    launch: str = "graph"
    host_s: float | None = None
    readings: list[Reading] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return float(np.median(self.times_s)) if self.times_s else float("nan")

    def columns(self) -> dict[str, Any]:
        """The time and clock columns of a row."""
        return {
            "launch": self.launch,
            "host_s": self.host_s,
            **statistics(self.times_s),
            **clocks(self.readings),
        }


def statistics(times_s: list[float]) -> dict[str, Any]:
    """Median, quartiles, extremes, mean and sample deviation of `times_s`; empty if there are none."""
    if not times_s:
        return {"count": 0}
    values = np.asarray(times_s, dtype=float)
    p25, median, p75 = np.percentile(values, [25, 50, 75])
    return {
        "time_s": float(median),
        "p25_s": float(p25),
        "p75_s": float(p75),
        "min_s": float(values.min()),
        "max_s": float(values.max()),
        "mean_s": float(values.mean()),
        "sd_s": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "count": len(values),
    }


def clocks(readings: list[Reading]) -> dict[str, Any]:
    """Mean SM clock and power over the readings that answered, and whether any saw a throttle reason."""
    mhz = [r.sm_mhz for r in readings if r.sm_mhz is not None]
    watts = [r.power_w for r in readings if r.power_w is not None]
    held = [r.throttled for r in readings if r.throttled is not None]
    warm = [r.temperature_c for r in readings if r.temperature_c is not None]
    return {
        "sm_mhz": float(np.mean(mhz)) if mhz else None,
        "power_w": float(np.mean(watts)) if watts else None,
        "throttled": int(any(held)) if held else None,
        **({"temperature_c": float(np.mean(warm))} if warm else {}),
    }


def overlapped(
    mine: list[float], other: list[float], margin: int = 1
) -> tuple[list[float], tuple[float, float]]:
    """Durations of the iterations of one side that ran wholly beside the other side.

    `mine` and `other` are boundaries on one clock: iteration i lies between entries i and i + 1. The first
    `margin` iterations of each side are left out as warm-up. Also returns the overlap window.
    """
    start = max(mine[min(margin, len(mine) - 1)], other[min(margin, len(other) - 1)])
    end = min(mine[-1], other[-1])
    kept = [b - a for a, b in pairwise(mine) if a >= start and b <= end]
    return kept, (start, end)

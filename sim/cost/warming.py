"""How the clock's heat changes prices: measured slopes, where passes let it settle, and time constants.

`sim.engine.heat` holds the state. Without measurements (another GPU, no sweep of the kind) prices know no heat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cost.launching import grid_tokens
from sim.cost.measured_grid import Grid
from sim.errors import SimctlError

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost

NUMBERS = ("decode_slope", "time_s")


@dataclass(frozen=True)
class Warming:
    """`slope`: share of a pass's seconds more for a unit of heat, `target`: heat at which it settles, both over its
    tokens; `decode_slope` of decode steps, which settle at 0; `time_s`: the time constant of draw and heat."""

    slope: Grid
    target: Grid
    decode_slope: float
    time_s: float

    def as_data(self) -> dict[str, Any]:
        """A JSON-like mapping that `warming_from_data` reads."""
        numbers = {name: float(f"{getattr(self, name):.4g}") for name in NUMBERS}
        return {"slope": self.slope.as_data(), "target": self.target.as_data(), **numbers}


def warming_from_data(data: Mapping[str, Any], where: str) -> Warming:
    """Terms of `curves.json`; SimctlError names `where`."""
    for key in ("slope", "target", *NUMBERS):
        if key not in data:
            raise SimctlError(f"{where}: key '{key}' is missing.")
    slope, target = (Grid.from_data(data[key], f"{where}, {key}") for key in ("slope", "target"))
    numbers = [float(data[name]) for name in NUMBERS]
    if not (numbers[0] >= 0.0 and numbers[1] > 0.0):
        raise SimctlError(f"{where}: time_s must be positive, and decode_slope at least 0.")
    return Warming(slope, target, *numbers)


def warming_tables(cost: ProfiledCost, max_tokens: int) -> dict[str, Any]:
    """Fields `heat_*` of the price tables; none where nothing was measured."""
    found = None if cost.profile.composition is None else cost.profile.composition.warming
    if found is None:
        return {}
    tokens = np.maximum(1, grid_tokens(np.arange(max_tokens + 1)))
    return {
        "heat_on": 1,
        "heat_rate": 1.0 / found.time_s,
        "heat_decode": found.decode_slope,
        "heat_slope": np.ascontiguousarray(found.slope.at((tokens,))),
        "heat_target": np.ascontiguousarray(found.target.at((tokens,))),
    }

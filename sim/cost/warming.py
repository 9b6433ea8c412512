"""How the clock under the power cap changes prices: what passes draw and gain, what decodes and idle time win back.

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

GRIDS = ("gain", "draw", "rest")
NUMBERS = ("room_s", "idle", "decode_loss")


@dataclass(frozen=True)
class Warming:
    """Over a pass's tokens: `gain`, share of its price less at the top clock, `draw`, seconds of room that a second of
    it uses. Over a decode step's batch: `rest`, seconds of room that a second wins back; `idle`: of an idle GPU.
    `room_s`: seconds of full passes at the top clock; `decode_loss`: share of its price that a step takes more when
    none are left."""

    gain: Grid
    draw: Grid
    rest: Grid
    room_s: float
    idle: float
    decode_loss: float

    def settled(self, tokens: Any) -> Any:
        """Seconds at the settled clock over seconds at the top clock."""
        return 1.0 / (1.0 - self.gain.at((tokens,)))

    def as_data(self) -> dict[str, Any]:
        """A JSON-like mapping that `warming_from_data` reads."""
        numbers = {name: float(f"{getattr(self, name):.4g}") for name in NUMBERS}
        return {name: getattr(self, name).as_data() for name in GRIDS} | numbers


def warming_from_data(data: Mapping[str, Any], where: str) -> Warming:
    """Terms of `curves.json`; SimctlError names `where`."""
    for key in (*GRIDS, *NUMBERS):
        if key not in data:
            raise SimctlError(f"{where}: key '{key}' is missing.")
    gain, draw, rest = (Grid.from_data(data[key], f"{where}, {key}") for key in GRIDS)
    room_s, idle, loss = (float(data[name]) for name in NUMBERS)
    if not (room_s > 0.0 and idle >= 0.0 and loss >= 0.0):
        raise SimctlError(f"{where}: room_s must be positive, idle and decode_loss at least 0.")
    return Warming(gain, draw, rest, room_s, idle, loss)


def warming_tables(cost: ProfiledCost, max_tokens: int, max_seqs: int) -> dict[str, Any]:
    """Fields `heat_*` of the price tables; none where nothing was measured."""
    terms = cost.profile.composition
    found = None if terms is None else terms.warming
    if terms is None or found is None:
        return {}
    tokens = np.maximum(1, grid_tokens(np.arange(max_tokens + 1)))
    batch = np.maximum(1, np.arange(max_seqs + 1))
    gain = general = found.gain.at((tokens,))
    if terms.own_gain is not None and cost.tp == 1 and cost.model.name == terms.model:
        beyond = tokens > terms.own_gain.axes[0].knots[-1]
        gain = np.where(beyond, general, terms.own_gain.at((tokens,)))
    # what gains less at the top clock does less work a second, and draws less
    draw = found.draw.at((tokens,)) * gain / np.maximum(general, 1e-6)
    return {
        "heat_on": 1,
        "heat_room_s": found.room_s,
        "heat_idle": found.idle,
        "heat_gap": float(cost.launching.terms.gap_cools),
        "heat_decode": found.decode_loss,
        "heat_draw": np.ascontiguousarray(draw),
        "heat_gain": np.ascontiguousarray(gain),
        "heat_rest": np.ascontiguousarray(found.rest.at((batch,))),
    }

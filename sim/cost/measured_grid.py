"""Tables on rectangular grids with multilinear interpolation: how residuals of measured curves are kept and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from sim.cost.shapes import Floats, Ints
from sim.errors import SimctlError

# raw value -> coordinate in which a table is piecewise linear; the logs keep a doubling equally long everywhere
SCALES: dict[str, Callable[[Any], Floats]] = {
    "linear": lambda x: np.asarray(x, dtype=np.float64),
    "log2": lambda x: np.log2(np.maximum(np.asarray(x, dtype=np.float64), 1e-9)),
    # histories start at 0 and matter in units of about a tile
    "log2p256": lambda x: np.log2(np.asarray(x, dtype=np.float64) + 256.0),
}
BEYOND = ("hold", "fade", "line")
FADE = 2.0  # coordinate units (doublings, on log axes) over which a fading residual goes to zero


@dataclass(frozen=True)
class Axis:
    """One axis: its name, raw knots in ascending order, and the scale that they are spaced on."""

    name: str
    knots: tuple[float, ...]
    scale: str = "log2"

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise SimctlError(f"axis '{self.name}': scale '{self.scale}' is none of {', '.join(SCALES)}.")
        if not self.knots or any(b <= a for a, b in zip(self.knots, self.knots[1:], strict=False)):
            raise SimctlError(f"axis '{self.name}' must have ascending knots.")

    @cached_property
    def positions(self) -> Floats:
        """Knots as coordinates."""
        return np.asarray(SCALES[self.scale](self.knots))

    def locate(self, values: Any, onward: bool = False) -> tuple[Ints, Floats, Floats]:
        """(index of the knot below, share of the way to the next, distance outside the knots) of raw values.

        Outside the knots the share is that of the edge, or with `onward` that of the line through the last two.
        """
        at = np.asarray(SCALES[self.scale](values))
        x = self.positions
        outside = np.maximum(0.0, np.maximum(x[0] - at, at - x[-1]))
        if len(x) == 1:
            return np.zeros(at.shape, dtype=np.int64), np.zeros(at.shape), outside
        inside = at if onward else np.clip(at, x[0], x[-1])
        lower = np.clip(np.searchsorted(x, inside, side="right") - 1, 0, len(x) - 2)
        return lower, (inside - x[lower]) / (x[lower + 1] - x[lower]), outside

    def holds(self, values: Any) -> bool:
        """Do all values lie within the knots?"""
        return bool(np.all(self.locate(values)[2] <= 1e-9))


@dataclass(frozen=True)
class Grid:
    """Values at the crossings of the axes' knots, shape (len(axis), ...).

    `beyond`: off the grid the nearest edge is held, fades to zero over `FADE` doublings, or the last line goes on.
    """

    axes: tuple[Axis, ...]
    values: Floats
    beyond: str = "hold"

    def __post_init__(self) -> None:
        shape = tuple(len(axis.knots) for axis in self.axes)
        if self.values.shape != shape:
            raise SimctlError(f"a table of shape {self.values.shape} does not fit axes of shape {shape}.")
        if self.beyond not in BEYOND:
            raise SimctlError(f"'beyond' is '{self.beyond}', which is none of {', '.join(BEYOND)}.")

    def at(self, points: Sequence[Any]) -> Floats:
        """Multilinear interpolation at raw values, one array (or scalar) an axis, broadcast together."""
        corners, weights, outside = stencil(self.axes, points, onward=self.beyond == "line")
        found: Floats = np.einsum("kp,kp->p", self.values.ravel()[corners], weights)
        if self.beyond == "fade":
            found = found * np.maximum(0.0, 1.0 - outside / FADE)
        return found.reshape(np.broadcast_shapes(*(np.shape(p) for p in points)))

    def holds(self, points: Sequence[Any]) -> bool:
        """Do all points lie within the grid?"""
        return all(axis.holds(values) for axis, values in zip(self.axes, points, strict=True))

    def as_data(self) -> dict[str, Any]:
        """A JSON-like mapping that `from_data` reads."""
        return {
            "axes": [{"name": a.name, "knots": list(a.knots), "scale": a.scale} for a in self.axes],
            "beyond": self.beyond,
            "values": [float(f"{v:.5g}") for v in self.values.ravel()],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> Grid:
        """A grid of a mapping; SimctlError names `where` and the key."""
        try:
            axes = tuple(Axis(a["name"], tuple(a["knots"]), a["scale"]) for a in data["axes"])
            values = np.asarray(data["values"], dtype=np.float64).reshape([len(a.knots) for a in axes])
            return cls(axes, values, data.get("beyond", "hold"))
        except (KeyError, TypeError, ValueError, SimctlError) as error:
            raise SimctlError(f"{where}: table is not readable: {error}.") from error


def stencil(axes: Sequence[Axis], points: Sequence[Any], onward: bool = False) -> tuple[Ints, Floats, Floats]:
    """Flat indices and weights (2^axes, points) of the corners around each point, and distances off the grid."""
    flat = [np.ravel(p) for p in np.broadcast_arrays(*(np.asarray(p, dtype=np.float64) for p in points))]
    located = [axis.locate(values, onward) for axis, values in zip(axes, flat, strict=True)]
    shape = [len(axis.knots) for axis in axes]
    strides = np.append(np.cumprod(shape[::-1])[::-1][1:], 1)
    corners, weights = [], []
    for corner in product(*((0, 1) if size > 1 else (0,) for size in shape)):
        index, weight = np.zeros(flat[0].shape, dtype=np.int64), np.ones(flat[0].shape)
        for step, stride, (lower, share, _) in zip(corner, strides, located, strict=True):
            index += (lower + step) * stride
            weight = weight * (share if step else 1.0 - share)
        corners.append(index)
        weights.append(weight)
    outside = np.max([far for _, _, far in located], axis=0)
    return np.array(corners), np.array(weights), outside

"""What whole steps cost beside the sum of their operators: gaps between kernels, and the clock under sustained load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.measured_grid import Grid
from sim.cost.shapes import Floats


@dataclass(frozen=True)
class Composition:
    """`chunked`: log factor on the linear layers and prefill attention of steps with a chunk, over (tokens, SMs).

    `gap_us`: microseconds a layer that decode-only steps take beyond their operators, over (tokens, SMs).
    `sigma`: sd of the log error of whole steps on held-out ones.
    """

    chunked: Grid
    gap_us: Grid
    label: str
    sigma: float

    def factor(self, tokens: Any, sms: int) -> Floats:
        """Factor on the operators of a step with a chunk."""
        return np.asarray(np.exp(self.chunked.at((tokens, sms))))

    def gap_s(self, tokens: Any, sms: int) -> Floats:
        """Seconds a layer beyond the operators of a decode-only step."""
        return np.asarray(1e-6 * self.gap_us.at((tokens, sms)))


def composition_data(found: Composition) -> dict[str, Any]:
    """A JSON-like mapping that `composition_from_data` reads."""
    return {
        "chunked": found.chunked.as_data(),
        "gap_us": found.gap_us.as_data(),
        "sigma": round(found.sigma, 5),
    }


def composition_from_data(data: Mapping[str, Any], label: str, where: str) -> Composition:
    """Composition terms of `curves.json`; SimctlError names `where`."""
    from sim.errors import SimctlError

    for key in ("chunked", "gap_us", "sigma"):
        if key not in data:
            raise SimctlError(f"{where}: key '{key}' is missing.")
    return Composition(
        Grid.from_data(data["chunked"], f"{where}, chunked"),
        Grid.from_data(data["gap_us"], f"{where}, gap_us"),
        label,
        float(data["sigma"]),
    )

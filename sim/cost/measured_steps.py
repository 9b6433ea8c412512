"""What whole steps cost beside the sum of their operators: gaps between kernels, and the clock under sustained load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.measured_grid import Grid
from sim.cost.shapes import Floats
from sim.cost.warming import Warming, warming_from_data


@dataclass(frozen=True)
class Composition:
    """`chunked`: log factor on the linear layers and prefill attention of steps with a chunk, over (tokens, SMs).

    `gap_us`: microseconds a layer that decode-only steps take beyond their operators, over (tokens, SMs).
    `sigma`: sd of the log error of whole steps on held-out ones. `warming`: what the clock's heat changes, if known.
    Of `model` alone, whose kernels change from one size to the next, over the same axes: `stairs`, log factor on the
    linear layers of steps with a chunk, and `batches_us`, microseconds a layer of decode-only steps, both on top; over
    tokens `own_gain` in place of `Warming.gain`.
    """

    chunked: Grid
    gap_us: Grid
    label: str
    sigma: float
    warming: Warming | None = None
    model: str = ""
    stairs: Grid | None = None
    batches_us: Grid | None = None
    own_gain: Grid | None = None

    def factor(self, tokens: Any, sms: int) -> Floats:
        """Factor on the operators of a step with a chunk."""
        return np.asarray(np.exp(self.chunked.at((tokens, sms))))

    def linear_factor(self, tokens: Any, sms: int, model: str) -> Floats:
        """Factor on the linear layers of a step with a chunk."""
        factor = self.factor(tokens, sms)
        if self.stairs is None or model != self.model:
            return factor
        return np.asarray(factor * np.exp(self.stairs.at((tokens, sms))))

    def gap_s(self, tokens: Any, sms: int, model: str) -> Floats:
        """Seconds a layer beyond the operators of a decode-only step."""
        gap = 1e-6 * self.gap_us.at((tokens, sms))
        if self.batches_us is None or model != self.model:
            return np.asarray(gap)
        return np.asarray(gap + 1e-6 * self.batches_us.at((tokens, sms)))


def composition_data(found: Composition) -> dict[str, Any]:
    """A JSON-like mapping that `composition_from_data` reads."""
    return {
        "chunked": found.chunked.as_data(),
        "gap_us": found.gap_us.as_data(),
        "sigma": round(found.sigma, 5),
        **({} if found.warming is None else {"warming": found.warming.as_data()}),
        **({"model": found.model} if found.model else {}),
        **({} if found.stairs is None else {"stairs": found.stairs.as_data()}),
        **({} if found.batches_us is None else {"batches_us": found.batches_us.as_data()}),
        **({} if found.own_gain is None else {"own_gain": found.own_gain.as_data()}),
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
        warming_from_data(data["warming"], f"{where}, warming") if "warming" in data else None,
        str(data.get("model", "")),
        *(
            Grid.from_data(data[key], f"{where}, {key}") if key in data else None
            for key in ("stairs", "batches_us", "own_gain")
        ),
    )

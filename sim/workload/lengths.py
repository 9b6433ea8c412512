"""Prompt and output lengths as distributions over a standard normal variable.

Every length is a monotone function of one normal variable per column, so a Gaussian copula couples prompt and
output, and one seed gives the same requests whatever the arrival process does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.quantiles import Marginal, quantile_table

FORMS = "a number, {uniform: [a, b]}, {lognormal: {median, sigma, min, max}} or {quantiles: NAME}"


class Lengths(Protocol):
    """A length distribution."""

    def of_normal(self, z: NDArray[np.float64]) -> NDArray[np.int64]:
        """Lengths in tokens, at least 1, for standard normal values `z` (n,); non-decreasing in z."""


@dataclass(frozen=True)
class Fixed:
    """The same length for every request."""

    tokens: int

    def of_normal(self, z: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(len(z), self.tokens, np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every whole number from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def of_normal(self, z: NDArray[np.float64]) -> NDArray[np.int64]:
        step = np.floor(normal_cdf(z) * (self.high - self.low + 1)).astype(np.int64)
        return self.low + np.minimum(step, self.high - self.low)


@dataclass(frozen=True)
class Lognormal:
    """exp(Normal(ln median, sigma)), rounded, then clipped to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    def of_normal(self, z: NDArray[np.float64]) -> NDArray[np.int64]:
        x = np.exp(math.log(self.median) + self.sigma * z)
        return np.clip(np.rint(np.minimum(x, 2.0**31)), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Quantiles:
    """Inverse CDF of a shipped table."""

    table: str
    marginal: Marginal
    spearman: float | None

    def of_normal(self, z: NDArray[np.float64]) -> NDArray[np.int64]:
        return self.marginal.sample(normal_cdf(z))


def parse_lengths(value: Any, key: str) -> Lengths:
    """The distribution written under `key` ("prompt_tokens" or "output_tokens") of a workload block."""
    path = f"workload.{key}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Fixed(_whole(value, path))
    if not isinstance(value, Mapping) or len(value) != 1:
        raise SimctlError(f"{path}: {value!r} is not a length; give {FORMS}")
    kind, argument = next(iter(value.items()))
    if kind == "uniform":
        return _uniform(argument, path)
    if kind == "lognormal":
        return _lognormal(argument, path)
    if kind == "quantiles":
        table = quantile_table(str(argument))
        marginal = table.prompt if key == "prompt_tokens" else table.output
        return Quantiles(table.name, marginal, table.spearman)
    kinds = ("uniform", "lognormal", "quantiles")
    raise SimctlError(f"{path}.{kind}: no such distribution; give {FORMS}.{nearest(str(kind), kinds)}")


def draw_lengths(
    prompt: Lengths,
    output: Lengths,
    n: int,
    rng: tuple[np.random.Generator, np.random.Generator],
    spearman: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw `n` prompt and output lengths whose rank correlation is `spearman`.

    The copula's linear correlation is 2 sin(pi rho / 6), exact for the bivariate normal; ties in the
    marginals lower the rank correlation a little. `rng` holds one generator for each column.
    """
    z_prompt = rng[0].standard_normal(n)
    z_other = rng[1].standard_normal(n)
    r = 2 * math.sin(math.pi * spearman / 6)
    z_output = r * z_prompt + math.sqrt(1 - r * r) * z_other
    return prompt.of_normal(z_prompt), output.of_normal(z_output)


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal distribution function."""
    erf = np.fromiter(map(math.erf, (z / math.sqrt(2)).tolist()), np.float64, len(z))
    return 0.5 * (1 + erf)


def _uniform(argument: Any, path: str) -> Uniform:
    if not isinstance(argument, list | tuple) or len(argument) != 2:
        raise SimctlError(f"{path}.uniform: {argument!r} is not [a, b]")
    low, high = (_whole(end, f"{path}.uniform") for end in argument)
    if high < low:
        raise SimctlError(f"{path}.uniform: [{low}, {high}] is the wrong way round; the smaller comes first")
    return Uniform(low, high)


def _lognormal(argument: Any, path: str) -> Lognormal:
    path = f"{path}.lognormal"
    keys = ("median", "sigma", "min", "max")
    if not isinstance(argument, Mapping):
        raise SimctlError(f"{path}: {argument!r} is not a block with {', '.join(keys)}")
    argument = {key: value for key, value in argument.items() if value is not None}
    for key in argument:
        if key not in keys:
            raise SimctlError(
                f"{path}.{key}: unknown key; there are {', '.join(keys)}.{nearest(str(key), keys)}"
            )
    for key in ("median", "sigma"):
        if not _is_number(argument.get(key)) or argument[key] < 0 or (key == "median" and argument[key] == 0):
            raise SimctlError(f"{path}.{key}: {argument.get(key)!r} is not a positive number")
    low = _whole(argument.get("min", 1), f"{path}.min")
    high = _whole(argument.get("max", 2**31 - 1), f"{path}.max")
    if high < low:
        raise SimctlError(f"{path}: min {low} is above max {high}")
    return Lognormal(float(argument["median"]), float(argument["sigma"]), low, high)


def _whole(value: Any, path: str) -> int:
    if not _is_number(value) or value != int(value) or not 1 <= value < 2**31:
        raise SimctlError(f"{path}: {value!r} is not a whole number of at least 1 token")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

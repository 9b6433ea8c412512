"""Length tables of published traces, shipped as percentiles, and inverse-CDF sampling from them.

Between two percentiles lengths are uniform and equal percentiles are point masses (Azure's 7,436-token limit
survives). The last per cent follows a power of the rank chosen so that the table's mean is the trace's mean:
a straight line from p99 to the maximum would lengthen the mean Azure code output by a fifth.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.suggest import nearest

_RANKS = np.arange(101) / 100


@dataclass(frozen=True)
class Marginal:
    """One length distribution: 101 percentiles and the mean of the whole trace."""

    percentiles: tuple[float, ...]
    mean: float

    @property
    def tail_power(self) -> float:
        """Exponent k of the last per cent: x = p99 + (max - p99) s^k, s from 0 to 1; 1 is a straight line."""
        knots = np.asarray(self.percentiles)
        low, high = knots[99], knots[100]
        body = float(np.sum(knots[:99] + knots[1:100]) / 200)
        mean_tail = (self.mean - body) * 100
        if not low < mean_tail < high:
            return 1.0
        return float((high - low) / (mean_tail - low) - 1)

    def sample(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Whole tokens, at least 1, at the ranks `u` in [0, 1]."""
        knots = np.asarray(self.percentiles)
        x: NDArray[np.float64] = np.interp(u, _RANKS, knots)
        tail = u > 0.99
        share = (u[tail] - 0.99) / 0.01
        x[tail] = knots[99] + (knots[100] - knots[99]) * share**self.tail_power
        whole: NDArray[np.int64] = np.maximum(np.rint(x), 1).astype(np.int64)
        return whole


@dataclass(frozen=True)
class QuantileTable:
    """Lengths and arrivals of a published trace, as facts; None where the source has no such data.

    `per_minute_counts` holds whole minutes only.
    """

    name: str
    title: str
    source: str
    prompt: Marginal
    output: Marginal
    spearman: float | None
    request_rate: float | None
    gap_cv: float | None
    per_minute_counts: tuple[int, ...] | None


@cache
def quantile_tables() -> dict[str, QuantileTable]:
    """All shipped tables by name."""
    text = files("sim").joinpath("data/traces/quantiles.json").read_text(encoding="utf-8")
    return {name: _table(name, entry) for name, entry in json.loads(text)["tables"].items()}


def quantile_table(name: str) -> QuantileTable:
    """The shipped table called `name`; SimctlError with the nearest name if there is none."""
    tables = quantile_tables()
    if name not in tables:
        raise SimctlError(
            f"no quantile table '{name}'; there are {', '.join(tables)}.{nearest(name, tables)}"
        )
    return tables[name]


def _table(name: str, entry: dict[str, object]) -> QuantileTable:
    def marginal(column: str) -> Marginal:
        points, mean = entry[f"{column}_percentiles"], entry[f"{column}_mean"]
        assert isinstance(points, list)
        assert isinstance(mean, int | float)
        return Marginal(tuple(float(x) for x in points), float(mean))

    def number(key: str) -> float | None:
        value = entry.get(key)
        return float(value) if isinstance(value, int | float) else None

    counts = entry.get("per_minute_counts")
    return QuantileTable(
        name=name,
        title=str(entry["title"]),
        source=str(entry["source"]),
        prompt=marginal("prompt"),
        output=marginal("output"),
        spearman=number("spearman"),
        request_rate=number("request_rate"),
        gap_cv=number("gap_cv"),
        per_minute_counts=tuple(counts[:-1]) if isinstance(counts, list) else None,
    )

"""Runs grouped into the points of a curve: one (policy, offered rate), with its replicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.metrics.replicates import mean_interval

Key = str | tuple[str, str]  # a run's key, or a key and the key inside it


@dataclass(frozen=True)
class Point:
    """One policy at one offered rate (requests/s; None for a trace at its own stamps or a closed loop).

    Where the sweep counts per GPU, so does `rate`.
    """

    policy: str
    rate: float | None
    runs: tuple[dict[str, Any], ...]

    def values(self, key: Key) -> list[float]:
        """The replicates' values; empty when one of them is undefined."""
        found = [_get(run, key) for run in self.runs]
        return [float(v) for v in found if v is not None] if None not in found else []

    def mean(self, key: Key) -> float | None:
        """Mean over replicates, None where a replicate has no value."""
        values = self.values(key)
        return sum(values) / len(values) if values else None

    def interval(self, key: Key) -> tuple[float, float] | None:
        """95 % confidence interval of the mean; None for a single run."""
        return mean_interval(self.values(key))

    def total(self, key: str) -> int:
        """Sum of a count over the replicates."""
        return sum(int(run.get(key) or 0) for run in self.runs)

    @property
    def saturated(self) -> bool:
        """True if any replicate could not serve the offered rate."""
        return any(bool(run.get("saturated")) for run in self.runs)


def _get(run: dict[str, Any], key: Key) -> Any:
    if isinstance(key, str):
        return run.get(key)
    inner = run.get(key[0])
    return inner.get(key[1]) if isinstance(inner, dict) else None


def points_of(runs: Sequence[dict[str, Any]]) -> list[Point]:
    """Points in the order of the policies in the file, each policy by rising rate."""
    order = policies_of(runs)
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((str(run["policy"]), swept_rate(run)), []).append(run)
    points = [Point(policy, rate, tuple(members)) for (policy, rate), members in groups.items()]
    return sorted(points, key=lambda p: (order.index(p.policy), -1.0 if p.rate is None else p.rate))


def swept_rate(run: dict[str, Any]) -> float | None:
    """The rate as the experiment swept it: per GPU where it says so."""
    rate = run.get("request_rate_per_gpu")
    return run.get("request_rate") if rate is None else rate


def per_gpu(runs: Sequence[dict[str, Any]]) -> bool:
    """Are the rates per GPU?"""
    return any(run.get("request_rate_per_gpu") is not None for run in runs)


def policies_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Policy labels in order of appearance."""
    return list(dict.fromkeys(str(run["policy"]) for run in runs))


def rates_of(points: Sequence[Point]) -> list[float | None]:
    """Distinct offered rates, rising."""
    return sorted({p.rate for p in points}, key=lambda rate: -1.0 if rate is None else rate)


def holding_rate(points: Sequence[Point], policy: str, target: float) -> float | None:
    """The highest swept rate at which the policy's attainment meets the target, as at all lower ones.

    None if the lowest fails. This reads the swept grid only: it is not a search for the capacity.
    """
    held = None
    for point in points:
        if point.policy != policy or point.rate is None:
            continue
        share = point.mean("slo_attainment")
        if share is None or share < target:
            break
        held = point.rate
    return held

"""Confidence intervals from replicate runs; a single run has none, and none is made up for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom (any statistics table)
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
METRICS = (
    "slo_attainment",
    "request_goodput",
    "request_throughput",
    "output_throughput",
    *(
        f"{stat}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for stat in ("mean", "median", "p90", "p99")
    ),
)


def _t_95(freedom: int) -> float:
    """The quantile beyond the table: Fisher's expansion (Abramowitz and Stegun 26.7.5) to its second term."""
    return 1.959964 + 2.372271 / freedom + 2.822498 / freedom**2


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % Student-t interval of the mean of independent replicates; None below two of them."""
    n = len(values)
    if n < 2:
        return None
    t = T_95[n - 2] if n - 1 <= len(T_95) else _t_95(n - 1)
    mean = float(np.mean(values))
    half = t * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def intervals(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per (policy, request rate) with two or more replicates: {metric: {"mean", "low", "high"}}.

    Metrics that some replicate lacks are left out of its row.
    """
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["policy"], run["request_rate"]), []).append(run)
    rows: list[dict[str, Any]] = []
    for (policy, rate), members in groups.items():
        found: dict[str, Any] = {}
        for metric in METRICS:
            values = [run.get(metric) for run in members]
            known = [float(v) for v in values if v is not None]
            interval = mean_interval(known) if len(known) == len(values) else None
            if interval:
                found[metric] = {"mean": float(np.mean(known)), "low": interval[0], "high": interval[1]}
        if found:
            rows.append(
                {
                    "policy": policy,
                    "request_rate": rate,
                    "replicates": len(members),
                    "confidence": 0.95,
                    **found,
                }
            )
    return rows

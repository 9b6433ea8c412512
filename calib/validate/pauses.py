"""Which share of the executor's gaps lets the clock recover: fitted on one-lane runs set apart.

An idle GPU recovers as fast as a paced run of single layers says; in the gaps between whole steps it is busy for a
part of the time, with copies, table writes and the first kernels of what is being launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from calib.validate.replay import Replay, shapes_of
from sim.cost.base import HostTerms
from sim.cost.profiled import ProfiledCost

TRIED = np.linspace(0.0, 1.0, 21)
LEAST_TOKENS = 200  # of a pass that the clock matters to


def fit_gap_cools(
    cost: ProfiledCost, terms: HostTerms, runs: Sequence[tuple[pd.DataFrame, Any]]
) -> HostTerms:
    """The terms with the share that brings the passes' GPU seconds of the runs, (log, attention mode) each, nearest to
    the measured ones in all; as they are where prices know no heat or there are no such passes."""
    found = []
    for share in TRIED:
        launching = replace(cost.launching, terms=replace(terms, gap_cools=float(share)))
        found.append(_off(replace(cost, launching=launching), runs))
    if not np.all(np.isfinite(found)) or np.ptp(found) == 0.0:
        return terms
    return replace(terms, gap_cools=round(float(TRIED[int(np.argmin(found))]), 2))


def _off(cost: ProfiledCost, runs: Sequence[tuple[pd.DataFrame, Any]]) -> float:
    """Mean over the runs of the passes' error in all, as a fraction without its sign."""
    errors = []
    for steps, attention in runs:
        shapes = shapes_of(steps)
        gpu_s = np.array([gpu_s for _, gpu_s in Replay(cost, shapes, attention).solo(shapes)])
        new = np.array([sum(q for q, _ in shape.chunks) for shape in shapes])
        measured = steps["gpu_s"].to_numpy(float)
        mask = (new >= LEAST_TOKENS) & (measured > steps["launch_s"].to_numpy(float))
        if mask.any():
            errors.append(abs(gpu_s[mask].sum() / measured[mask].sum() - 1.0))
    return float(np.mean(errors)) if errors else float("nan")

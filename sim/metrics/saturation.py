"""Does the offered rate exceed what is served? A growing backlog, told from start-up and from noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MIN_DEFICIT = 0.05
NOISE_SIGMAS = 3.0


@dataclass(frozen=True)
class Saturation:
    """`saturated` is None where there is no answer: a closed loop, or all requests at one instant.

    `rate_deficit` is 1 - served/offered and `backlog_growth` the change of the backlog in requests/s, both
    over the second half of the offered period.
    """

    saturated: bool | None
    rate_deficit: float | None = None
    backlog_growth: float | None = None


def detect(requests: pd.DataFrame, *, closed_loop: bool = False) -> Saturation:
    """Judge the accepted requests of a window by what happened while they were still arriving.

    Over the second half of the offered period (first to last arrival), with A arrivals and S requests
    served, the run is saturated when the deficit 1 - S/A exceeds 5 %, the growth A - S exceeds three standard
    deviations of a Poisson count (3 sqrt(A)), and the backlog rises through both quarters of that half.
    "Served" means finished, unless requests take so long that the first ones to arrive are typically still
    running at half time: then a growing number in progress is start-up, and first tokens count instead.
    So the verdict rests on the size and steadiness of the growth: more requests alone never turn it.
    """
    accepted = requests[requests["status"] != "rejected"]
    arrival = np.sort(accepted["arrival_s"].to_numpy(np.float64))
    if closed_loop or len(arrival) < 2 or arrival[0] == arrival[-1]:
        return Saturation(None)
    start, end = arrival[0], arrival[-1]
    marks = start + (end - start) * np.array([0.5, 0.75, 1.0])
    served = np.sort(_served_at(accepted, start, end))
    backlog = _count(arrival, marks) - _count(served, marks)
    offered = int(_count(arrival, marks[2:])[0] - _count(arrival, marks[:1])[0])
    growth = int(backlog[2] - backlog[0])
    deficit = growth / offered
    steady = bool(backlog[0] < backlog[1] < backlog[2])
    saturated = deficit > MIN_DEFICIT and growth > NOISE_SIGMAS * np.sqrt(offered) and steady
    return Saturation(bool(saturated), float(deficit), float(growth / (marks[2] - marks[0])))


def _served_at(accepted: pd.DataFrame, start: float, end: float) -> NDArray[np.float64]:
    """Times at which requests leave the backlog; NaN (never) sorts to the end."""
    finish = accepted["finish_s"].to_numpy(np.float64)
    arrival = accepted["arrival_s"].to_numpy(np.float64)
    early = arrival <= start + (end - start) / 4
    typical = np.median(np.where(np.isnan(finish), np.inf, finish - arrival)[early])
    if typical > (end - start) / 4:
        return accepted["first_token_s"].to_numpy(np.float64)
    return finish


def _count(times: NDArray[np.float64], marks: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many of the sorted times lie at or before each mark."""
    known = times[~np.isnan(times)]
    return np.searchsorted(known, marks, side="right").astype(np.int64)

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
    from the first quarter of the offered period to its end.
    """

    saturated: bool | None
    rate_deficit: float | None = None
    backlog_growth: float | None = None


def detect(requests: pd.DataFrame, *, closed_loop: bool = False) -> Saturation:
    """Judge the accepted requests of a window by what happened while they were still arriving.

    The offered period goes from the first to the last arrival; its first quarter is start-up. With A arrivals
    and S requests served in the rest, the run is saturated when the deficit 1 - S/A exceeds 5 %, the growth
    A - S exceeds three standard deviations of a Poisson count (3 sqrt(A)), and through the whole second half
    the backlog stays above what it was after the first quarter, so that neither a burst that was worked off
    nor one at the very end counts. "Served" means finished, unless requests take so long that the first ones
    typically outlast start-up: then a growing number in progress is no sign, and first tokens count instead.
    The verdict rests on the size and persistence of the growth: more requests alone never turn it.
    """
    accepted = requests[requests["status"] != "rejected"]
    arrival = np.sort(accepted["arrival_s"].to_numpy(np.float64))
    if closed_loop or len(arrival) < 2 or arrival[0] == arrival[-1]:
        return Saturation(None)
    start, end = arrival[0], arrival[-1]
    quarter = start + (end - start) / 4
    half = np.linspace(start + (end - start) / 2, end, 65)
    served = np.sort(_served_at(accepted, quarter, start))
    marks = np.concatenate(([quarter], half))
    backlog = _count(arrival, marks) - _count(served, marks)
    offered = len(arrival) - int(_count(arrival, marks[:1])[0])
    growth = int(backlog[-1] - backlog[0])
    deficit = growth / offered
    sustained = bool(backlog[1:].min() > backlog[0])
    saturated = deficit > MIN_DEFICIT and growth > NOISE_SIGMAS * np.sqrt(offered) and sustained
    return Saturation(bool(saturated), float(deficit), float(growth / (end - quarter)))


def _served_at(accepted: pd.DataFrame, quarter: float, start: float) -> NDArray[np.float64]:
    """Times at which requests leave the backlog; NaN (never) sorts to the end."""
    finish = accepted["finish_s"].to_numpy(np.float64)
    arrival = accepted["arrival_s"].to_numpy(np.float64)
    took = np.where(np.isnan(finish), np.inf, finish - arrival)
    if np.median(took[arrival <= quarter]) > quarter - start:
        return accepted["first_token_s"].to_numpy(np.float64)
    return finish


def _count(times: NDArray[np.float64], marks: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many of the sorted times lie at or before each mark."""
    known = times[~np.isnan(times)]
    return np.searchsorted(known, marks, side="right").astype(np.int64)

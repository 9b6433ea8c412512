"""Arrival processes. Each draws unit-mean gaps from one generator and only then scales them to the rate.

So the same seed at another rate gives the same pattern, faster or slower (common random numbers), and two
rates of a sweep differ by load alone. The first request arrives at 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def gamma_arrivals(
    n: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Renewal process with Gamma gaps of shape `burstiness`, as `vllm bench serve --burstiness`.

    The gaps' coefficient of variation is 1/sqrt(burstiness): 1 is Poisson, below 1 burstier. Seconds, shape
    (n,).
    """
    return _times(_unit_gaps(n, burstiness, rng)) / request_rate


def deterministic_arrivals(n: int, request_rate: float) -> NDArray[np.float64]:
    """Equal gaps of 1/request_rate seconds."""
    return np.arange(n) / request_rate


def on_off_arrivals(
    n: int, request_rate: float, burstiness: float, on_s: float, off_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Arrivals only in the first `on_s` of every `on_s + off_s` seconds, at the mean rate `request_rate`."""
    return _through_profile(
        _times(_unit_gaps(n, burstiness, rng)) / request_rate, np.array([on_s, off_s]), np.array([1.0, 0.0])
    )


def profile_arrivals(
    n: int, request_rate: float, burstiness: float, counts: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Arrivals that follow requests per minute `counts`, scaled to the mean rate and repeated as needed."""
    return _through_profile(
        _times(_unit_gaps(n, burstiness, rng)) / request_rate,
        np.full(len(counts), 60.0),
        np.asarray(counts, float),
    )


def spread_in_bins(
    arrival_s: NDArray[np.float64], bin_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Undo logging on a grid of `bin_s` seconds: each stamp moves to a uniform place in its bin; sorted."""
    return np.sort(arrival_s + rng.random(len(arrival_s)) * bin_s)


def _unit_gaps(n: int, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    if burstiness == 1.0:
        return rng.standard_exponential(n - 1)
    return rng.standard_gamma(burstiness, n - 1) / burstiness


def _times(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(([0.0], np.cumsum(gaps)))


def _through_profile(
    even_s: NDArray[np.float64], length_s: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bend even time so that its speed follows the periodic profile (inverse of cumulative intensity)."""
    period = float(length_s.sum())
    work_s = length_s * weight * (period / float(np.sum(length_s * weight)))
    busy = np.flatnonzero(work_s > 0)
    clock_start = (np.cumsum(length_s) - length_s)[busy]
    work_start = (np.cumsum(work_s) - work_s)[busy]
    whole, part = np.divmod(even_s, period)
    at = np.searchsorted(work_start, part, side="right") - 1
    within = (part - work_start[at]) * (length_s[busy] / work_s[busy])[at]
    bent: NDArray[np.float64] = whole * period + clock_start[at] + within
    since_first: NDArray[np.float64] = bent - bent[0]
    return since_first

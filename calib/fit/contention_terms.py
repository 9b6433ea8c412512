"""Terms and residuals of the contention surface (`sim.cost.measured_contention`) from co-runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from calib.fit.coruns import Corun, coverage_of, groups
from calib.fit.points import Floats
from calib.fit.robust import Bound, fit
from sim.cost.loads import Loads
from sim.cost.measured_contention import (
    OVERLAPPING,
    PRIORITIES,
    SIDES,
    Beside,
    MeasuredContention,
    Residual,
    Waiting,
    decode_axes,
    prefill_axes,
    split_axes,
)
from sim.errors import SimctlError

LEAST = 20  # disjoint co-runs below which nothing is fitted
LEAST_WAITING = 6  # of one regime and priority; with fewer the other priority's terms stand in
# a coefficient or a power that the data don't identify falls back to what leaves its factor out
BESIDE = {
    "k": Bound(0.01, 5.0, 0.3, 0.05),
    "other_tensor": Bound(0.02, 5.0, 0.3, 0.0),
    "other_power": Bound(0.2, 3.0, 0.9, 1.0),
    "own_tensor": Bound(0.02, 8.0, 1.5, 0.0),
    "own_power": Bound(0.02, 3.0, 1.0, 0.0),
    "share_power": Bound(0.02, 3.0, 0.7, 0.0),
}
WAITING = {
    "k": Bound(0.01, 9.0, 0.7, 0.05),
    # at most in proportion: what is waited for is a share of the other's layer
    "other_power": Bound(0.02, 1.0, 0.8, 0.0),
    "own_power": Bound(0.02, 1.0, 0.6, 0.0),
    "tensor_power": Bound(0.02, 1.0, 0.1, 0.0),
    "shared_power": Bound(0.02, 4.0, 1.5, 0.0),
}
# lengths of the residual's Gaussians along the axes of `Residual`; sd of a residual and of one co-run, by regime
LENGTHS = np.array([2.0, 2.0, 4.0, 6.0, 4.0, 6.0])
SPREAD = {"disjoint": (0.06, 0.015), "overlapped": (0.12, 0.06), "streams": (0.12, 0.06)}
POOLED = ("overlapped",)  # regimes whose priorities differ by a factor only


def fit_contention(
    corun: Corun, model: str, kept: Mapping[tuple[str, str], bool] | None = None
) -> MeasuredContention:
    """The surface of co-runs. `kept`: which regimes have residuals, by (regime, priority) (None: all).

    The disjoint sets give the terms of the memory system, the others on top of these the terms of waiting, and
    residuals come last; each on logarithms of slowdowns with a soft-L1 loss.
    """
    apart = corun.take(corun.regime == "disjoint")
    if len(apart) < LEAST:
        raise SimctlError(f"Contention needs {LEAST} co-runs on disjoint SMs; {len(apart)} were measured.")
    surface = MeasuredContention(
        corun.prefill.gpu, model, "measured", coverage_of(corun), _fit_beside(apart), {}, {}
    )
    surface = replace(surface, waiting=_fit_waiting(corun, surface))
    residuals = {}
    for regime, priority in groups(corun):
        part = corun.take((corun.regime == regime) & (corun.priority == priority))
        if kept is None or kept.get((regime, priority), False):
            residuals[regime, priority] = _fit_residual(part, surface, regime, priority)
    return replace(surface, residuals=residuals)


def _fit_beside(corun: Corun) -> dict[str, Beside]:
    found = {}
    for i, side in enumerate(SIDES):
        own, other = _ordered(corun, side)
        share, logs = corun.sms[i] / corun.prefill.gpu.sms, np.log(corun.slow[:, i])

        def error(terms: Mapping[str, float]) -> Floats:
            return np.log1p(Beside(**terms).excess(own, other, share)) - logs  # noqa: B023

        found[side] = Beside(**fit(error, BESIDE).values)
    return found


def _fit_waiting(corun: Corun, surface: MeasuredContention) -> dict[tuple[str, str], dict[str, Waiting]]:
    found: dict[tuple[str, str], dict[str, Waiting]] = {}
    for regime in OVERLAPPING:
        part = corun.take(corun.regime == regime)
        counts = {priority: int(np.sum(part.priority == priority)) for priority in PRIORITIES}
        if max(counts.values()) < LEAST_WAITING:
            raise SimctlError(f"Contention needs {LEAST_WAITING} co-runs of '{regime}' SMs.")
        for priority in PRIORITIES:
            # powers are shared where priorities differ by a factor only
            own = part if regime in POOLED else part.take(part.priority == priority)
            known = counts[priority] >= LEAST_WAITING
            found[regime, priority] = {
                side: _fit_waiting_side(
                    own if known else part, surface, regime, side, priority if known else ""
                )
                for side in SIDES
            }
    return found


def _fit_waiting_side(
    corun: Corun, surface: MeasuredContention, regime: str, side: str, priority: str
) -> Waiting:
    i = SIDES.index(side)
    own, other = _ordered(corun, side)
    logs = np.log(corun.slow[:, i])
    if regime == "overlapped":
        share = corun.sms[i] / corun.prefill.gpu.sms
        logs = logs - np.log1p(surface.beside[side].excess(own, other, share))
    shared = corun.overlap / corun.sms[i]
    without = {"shared_power"} if regime == "streams" else set()
    bounds = {name: bound for name, bound in WAITING.items() if name not in without}
    elsewhere = (corun.priority != priority) & bool(priority)
    if elsewhere.any():
        bounds["elsewhere"] = Bound(0.2, 5.0, 1.0, 1.0)

    def error(terms: Mapping[str, float]) -> Floats:
        own_terms = {name: value for name, value in terms.items() if name != "elsewhere"}
        waiting = Waiting(**{**dict.fromkeys(without, 0.0), **own_terms})
        ratio = np.where(elsewhere, terms.get("elsewhere", 1.0), 1.0)
        return np.log1p(ratio * waiting.excess(own, other, shared)) - logs

    values = {name: value for name, value in fit(error, bounds).values.items() if name != "elsewhere"}
    return Waiting(**{**dict.fromkeys(without, 0.0), **values})


def _fit_residual(corun: Corun, surface: MeasuredContention, regime: str, priority: str) -> Residual:
    """Gaussian process regression of what the base leaves over; two rounds, outliers of the first count less."""
    base = surface.base(corun.prefill, corun.decode, corun.sms, corun.overlap, regime, priority)
    logs = np.log(corun.slow) - np.log(np.stack(base, axis=1))
    sites = np.hstack([split_axes(*corun.sms), prefill_axes(corun.prefill), decode_axes(corun.decode)])
    away = (sites[:, None, :] - sites[None, :, :]) / LENGTHS
    spread, noise = SPREAD[regime]
    kernel = spread**2 * np.exp(-0.5 * np.sum(away**2, axis=2))
    weights = np.zeros((len(sites), 2))
    for i in range(2):
        variance = np.full(len(sites), noise**2)
        for _ in range(2):
            weights[:, i] = np.linalg.solve(kernel + np.diag(variance), logs[:, i])
            left = logs[:, i] - kernel @ weights[:, i]
            variance = noise**2 * np.sqrt(1.0 + (left / (4.0 * noise)) ** 2)
    return Residual(sites, LENGTHS, spread**2 * weights)


def _ordered(corun: Corun, side: str) -> tuple[Loads, Loads]:
    return (corun.prefill, corun.decode) if side == "prefill" else (corun.decode, corun.prefill)

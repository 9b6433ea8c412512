"""Bounded robust least squares in plain numpy: soft-L1 loss, covariance, and which parameters the data identify.

`profile check` shall find the same coefficients whatever scipy is installed; a few parameters and smooth enough forms
need no more than Levenberg-Marquardt on transformed parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SOFT = 0.1  # log error from which on the loss grows linearly
STEP = 1e-4
MOST_ROUNDS = 40
GAIN = 1e-4  # relative improvement of the loss below which a fit has converged
UNIDENTIFIED = 0.7  # sd of a parameter's logarithm from which on the data do not decide it
EDGE = 5e-3  # share of the range next to a bound that counts as run away


@dataclass(frozen=True)
class Bound:
    """Range of one positive parameter, its start, and its value when the data do not identify it (None: the start)."""

    low: float
    high: float
    start: float
    fallback: float | None = None

    @property
    def rejected(self) -> float:
        """What the parameter stands at when the data say nothing of it."""
        return self.start if self.fallback is None else self.fallback


@dataclass(frozen=True)
class Fitted:
    """Values of all parameters; `names` were fitted and have `covariance` (of their logarithms); `rejected` were
    not identified by the data and stand at their fallback values. `cost`: mean soft-L1 loss."""

    values: Mapping[str, float]
    names: tuple[str, ...]
    covariance: Floats
    rejected: tuple[str, ...]
    cost: float


def fit(
    error: Callable[[Mapping[str, float]], Floats],
    bounds: Mapping[str, Bound],
    start: Mapping[str, float] | None = None,
    reject: bool = True,
) -> Fitted:
    """Parameters that minimise the soft-L1 loss of `error(parameters)` (log errors, one a point).

    Parameters that vanish or have a standard error above `UNIDENTIFIED` are fixed at their fallback, the worst
    first, and the rest fitted again.
    """
    first = {name: (start or {}).get(name) or bound.start for name, bound in bounds.items()}
    free, rejected = list(bounds), []
    while True:
        fixed = {name: bounds[name].rejected for name in rejected}
        values, covariance, cost = _minimise(error, {name: bounds[name] for name in free}, first, fixed)
        worst = _worst(values, covariance, bounds, free) if reject else None
        if worst is None:
            return Fitted(values, tuple(free), covariance, tuple(rejected), cost)
        free.remove(worst)
        rejected.append(worst)


def _worst(
    values: Mapping[str, float], covariance: Floats, bounds: Mapping[str, Bound], free: list[str]
) -> str | None:
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0)) if len(free) else np.zeros(0)
    bad = {}
    for name, sd in zip(free, spread, strict=True):
        bound = bounds[name]
        at = np.log(values[name] / bound.low) / np.log(bound.high / bound.low)
        # an efficiency at its upper limit is physics; anything at a lower limit has vanished and is no evidence
        if sd > UNIDENTIFIED or at < EDGE:
            bad[name] = np.inf if at < EDGE else sd
    return max(bad, key=lambda name: bad[name]) if bad else None


def _minimise(
    error: Callable[[Mapping[str, float]], Floats],
    bounds: Mapping[str, Bound],
    first: Mapping[str, float],
    fixed: Mapping[str, float],
) -> tuple[dict[str, float], Floats, float]:
    names = list(bounds)
    low = np.array([np.log(bounds[n].low) for n in names])
    width = np.array([np.log(bounds[n].high / bounds[n].low) for n in names])

    def unpack(u: Floats) -> dict[str, float]:
        logs = low + width / (1.0 + np.exp(-u))
        return {**fixed, **{n: float(np.exp(v)) for n, v in zip(names, logs, strict=True)}}

    share = (np.array([np.log(first[n]) for n in names]) - low) / width
    u = np.log(np.clip(share, 0.01, 0.99) / (1.0 - np.clip(share, 0.01, 0.99)))
    residual = error(unpack(u))
    loss, damping = _loss(residual), 1e-2
    for _ in range(MOST_ROUNDS if names else 0):
        jacobian = _jacobian(error, unpack, u, residual)
        weight = 1.0 / np.sqrt(1.0 + (residual / SOFT) ** 2)
        normal = jacobian.T @ (weight[:, None] * jacobian)
        gradient = jacobian.T @ (weight * residual)
        improved = False
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            trial = np.clip(u + np.clip(move, -2.0, 2.0), -9.0, 9.0)
            tried = error(unpack(trial))
            if (better := _loss(tried)) < loss:
                improved = loss - better > GAIN * loss
                u, residual, loss, damping = trial, tried, better, max(damping / 5.0, 1e-7)
                break
            damping *= 4.0
        if not improved:
            break
    return unpack(u), _covariance(error, unpack, u, residual, width), loss


def _loss(residual: Floats) -> float:
    return float(np.mean(2.0 * SOFT**2 * (np.sqrt(1.0 + (residual / SOFT) ** 2) - 1.0)))


def _jacobian(
    error: Callable[[Mapping[str, float]], Floats],
    unpack: Callable[[Floats], Mapping[str, float]],
    u: Floats,
    residual: Floats,
) -> Floats:
    columns = []
    for i in range(len(u)):
        moved = u.copy()
        moved[i] += STEP
        columns.append((error(unpack(moved)) - residual) / STEP)
    return np.array(columns).T.reshape(len(residual), len(u))


def _covariance(
    error: Callable[[Mapping[str, float]], Floats],
    unpack: Callable[[Floats], Mapping[str, float]],
    u: Floats,
    residual: Floats,
    width: Floats,
) -> Floats:
    """Covariance of the parameters' logarithms, scaled by the robust spread of the errors."""
    if not len(u):
        return np.zeros((0, 0))
    jacobian = _jacobian(error, unpack, u, residual)
    share = 1.0 / (1.0 + np.exp(-u))
    scale = width * share * (1.0 - share)  # d log(parameter) / d u
    weight = 1.0 / np.sqrt(1.0 + (residual / SOFT) ** 2)
    normal = jacobian.T @ (weight[:, None] * jacobian)
    spread = (1.4826 * float(np.median(np.abs(residual)))) ** 2 + 1e-12
    inverse = np.linalg.pinv(normal + 1e-10 * np.eye(len(u)))
    # pinv hides directions that nothing depends on: those are unidentified, not certain
    blind = np.diag(normal) < 1e-9 * max(float(np.max(np.diag(normal))), 1e-12)
    covariance = inverse * spread * np.outer(scale, scale)
    covariance[blind, blind] = np.inf
    return covariance

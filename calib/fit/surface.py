"""Smooth tables from scattered, noisy points: a Gaussian Markov random field on the knots of a grid.

The table minimises sum of ((interpolated - value) / noise)^2 over the points, plus a random-walk prior along each
axis (first differences: linear interpolation of what is missing; second differences: a line through it), plus a
weak pull to zero, so that cells without data near fade to what the physics baseline says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.measured_grid import Axis, Grid, stencil

Floats = NDArray[np.float64]
TOLERANCE = 1e-7
MOST_STEPS = 3000


@dataclass(frozen=True)
class Smoothness:
    """The prior in log units: steps of sd `walk` per unit of an axis, bends of sd `bend`; `pull` is the sd of a
    residual with no data near. `walks` overrides `walk` by axis name. `noise`: sd of a single measurement."""

    walk: float = 0.05
    bend: float | None = None
    pull: float = 0.3
    noise: float = 0.006
    walks: Mapping[str, float] = field(default_factory=dict)


def fit_grid(
    axes: Sequence[Axis],
    points: Sequence[Any],
    values: Floats,
    smoothness: Smoothness,
    beyond: str = "hold",
    weights: Floats | None = None,
) -> Grid:
    """The table of `values` (one a point; `points` holds one raw array an axis). Deterministic.

    `weights` multiply a point's inverse variance (1: `smoothness.noise` applies).
    """
    corners, shares, _ = stencil(axes, points)
    shape = tuple(len(axis.knots) for axis in axes)
    size = int(np.prod(shape))
    precision = np.full(len(values), smoothness.noise**-2) * (1.0 if weights is None else weights)
    # robust: a point far from its first fit counts less in the second
    table = np.zeros(size)
    for last in (False, True):
        right = _scatter(corners, shares, precision * values, size)
        table = _solve(axes, shape, corners, shares, precision, right, smoothness, table)
        if not last:
            error = np.einsum("kp,kp->p", table[corners], shares) - values
            scale = 6.0 * max(smoothness.noise, 1.4826 * float(np.median(np.abs(error))))
            precision = precision / np.sqrt(1.0 + (error / scale) ** 2)
    return Grid(tuple(axes), table.reshape(shape), beyond)


def _scatter(corners: Any, shares: Floats, values: Floats, size: int) -> Floats:
    return np.bincount(corners.ravel(), weights=(shares * values).ravel(), minlength=size)


def _prior(axes: Sequence[Axis], shape: tuple[int, ...], prior: Smoothness, table: Floats) -> Floats:
    """The prior's precision matrix times a table."""
    cube = table.reshape(shape)
    out = cube / prior.pull**2
    for dim, axis in enumerate(axes):
        if len(axis.knots) < 2:
            continue
        width = np.diff(axis.positions)
        lines, result = np.moveaxis(cube, dim, -1), np.moveaxis(out, dim, -1)
        walk = prior.walks.get(axis.name, prior.walk)
        step = np.diff(lines, axis=-1) / (walk**2 * width)
        result[..., :-1] -= step
        result[..., 1:] += step
        if prior.bend is not None and len(axis.knots) > 2:
            slope = np.diff(lines, axis=-1) / width
            bend = np.diff(slope, axis=-1) / prior.bend**2
            back = np.zeros_like(slope)
            back[..., 1:] += bend
            back[..., :-1] -= bend
            back /= width
            result[..., :-1] -= back
            result[..., 1:] += back
    return out.ravel()


def _solve(
    axes: Sequence[Axis],
    shape: tuple[int, ...],
    corners: Any,
    shares: Floats,
    precision: Floats,
    right: Floats,
    prior: Smoothness,
    start: Floats,
) -> Floats:
    """Conjugate gradients with a diagonal preconditioner."""
    size = len(right)

    def apply(table: Floats) -> Floats:
        seen = np.einsum("kp,kp->p", table[corners], shares)
        return _scatter(corners, shares, precision * seen, size) + _prior(axes, shape, prior, table)

    diagonal = _scatter(corners, shares, (precision * shares), size) + _prior_diagonal(axes, shape, prior)
    x = start.copy()
    gap = right - apply(x)
    z = gap / diagonal
    direction, rho = z.copy(), float(gap @ z)
    goal = TOLERANCE * max(float(np.linalg.norm(right)), 1e-300)
    for _ in range(MOST_STEPS):
        if np.linalg.norm(gap) <= goal:
            break
        image = apply(direction)
        step = rho / float(direction @ image)
        x += step * direction
        gap -= step * image
        z = gap / diagonal
        rho, old = float(gap @ z), rho
        direction = z + rho / old * direction
    return x


def _prior_diagonal(axes: Sequence[Axis], shape: tuple[int, ...], prior: Smoothness) -> Floats:
    total = np.full(shape, prior.pull**-2)
    for dim, axis in enumerate(axes):
        if len(axis.knots) < 2:
            continue
        width = np.diff(axis.positions)
        walk = prior.walks.get(axis.name, prior.walk)
        line = np.zeros(len(axis.knots))
        line[:-1] += 1.0 / (walk**2 * width)
        line[1:] += 1.0 / (walk**2 * width)
        if prior.bend is not None and len(axis.knots) > 2:
            b = prior.bend**-2
            line[:-2] += b / width[:-1] ** 2
            line[1:-1] += b * (1.0 / width[:-1] + 1.0 / width[1:]) ** 2
            line[2:] += b / width[1:] ** 2
        total += line.reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return total.ravel()

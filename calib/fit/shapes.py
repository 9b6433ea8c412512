"""Other models: a residual of their own for constants that only the `shapes` sweep measured, on the whole GPU.

The form and the tables of the calibrated model stay as they are, so that what was measured of other models moves
nothing else. On a partition the form scales the residual of the whole GPU, and the answer is flagged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.folds import errors
from calib.fit.methods import axes_of
from calib.fit.points import Floats, Points, operator_points, read_rows
from calib.fit.surface import Smoothness, fit_grid
from sim.cost.gpu import GpuSpec
from sim.cost.measured import Key, MeasuredCurve
from sim.cost.measured_grid import Grid

SWEEP = "shapes"
FOLDS, SEED = 5, 43
LEAST = 8  # points of one set of constants
SMOOTH = Smoothness(walk=0.25)


def other_points(folder: Path, gpu: GpuSpec) -> dict[str, Points]:
    """Points of other models by operator; none where the sweep was not run."""
    return operator_points(read_rows(folder, SWEEP), gpu)


def with_shapes(curve: MeasuredCurve, points: Points | None) -> tuple[MeasuredCurve, dict[str, Any]]:
    """(the curve with a table for each new set of constants, errors on left-out points before and after)."""
    if points is None or curve.method != "form":
        return curve, {}
    groups = {
        key: mask for key, mask in points.groups().items() if key not in curve.tables and mask.sum() >= LEAST
    }
    if not groups:
        return curve, {}
    new = points.take(np.any(list(groups.values()), axis=0))
    before, held = answers(curve, new), np.zeros(len(new))
    fold = np.random.default_rng(SEED).permutation(len(new)) % FOLDS
    for i in range(FOLDS):
        held[fold == i] = answers(_fitted(curve, new.take(fold != i)), new.take(fold == i))
    record = {
        "points": len(new),
        "without": errors(before, new.seconds),
        "random": errors(held, new.seconds),
        "constants": [list(key) for key in sorted(groups)],
    }
    return _fitted(curve, new), record


def _fitted(curve: MeasuredCurve, points: Points) -> MeasuredCurve:
    # what all constants share is known already: only the rest is fitted to a few points
    logs = np.log(points.seconds / answers(replace(curve, tables={}), points))
    tables: dict[Key, Grid] = dict(curve.tables)
    for key, mask in points.groups().items():
        part = points.take(mask)
        own = fit_grid(axes_of(part), part.coordinates(), logs[mask], SMOOTH)
        tables[key] = replace(own, values=own.values + _shared(curve, own))
    return replace(curve, tables=tables)


def _shared(curve: MeasuredCurve, own: Grid) -> Floats | float:
    """The pooled residual at the knots of a grid."""
    if curve.pooled is None:
        return 0.0
    knots = np.meshgrid(*(np.array(axis.knots) for axis in own.axes), indexing="ij")
    return np.asarray(curve.pooled.at(tuple(knots)))


def answers(curve: MeasuredCurve, points: Points) -> Floats:
    """Seconds by the curve, at the profile's clock."""
    found = np.zeros(len(points))
    for key, mask in points.groups().items():
        part = points.take(mask)
        found[mask] = curve.timing(part.shape(key), part.sms).seconds  # type: ignore[arg-type]
    return found


def without_shapes(curve: MeasuredCurve, record: Mapping[str, Any]) -> MeasuredCurve:
    """The curve without the tables that a record says were added."""
    added = {tuple(key) for key in record["constants"]}
    return replace(curve, tables={key: grid for key, grid in curve.tables.items() if key not in added})


def clause(record: Mapping[str, Any]) -> str:
    """What a coverage sentence says of the added constants."""
    keys = record["constants"]
    if len(keys[0]) == 3:
        return "; on all SMs also (n, k) " + ", ".join(f"{n}x{k}" for n, k, _ in keys)
    return "; on all SMs also heads " + ", ".join(f"{q}/{kv}" for q, kv, _, _ in keys)

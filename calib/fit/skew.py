"""What ragged decode batches cost beside equal ones of the same sum: nanoseconds per token of the longest context.

FlashInfer splits sequences only while there are fewer of them than SMs to fill; beyond, one CTA goes through the
longest one, and the others have long finished.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from calib.fit.folds import errors, folds
from calib.fit.methods import FittedCurve
from calib.fit.points import Floats, Mask, Points
from calib.fit.surface import Smoothness, fit_grid
from sim.cost.measured_grid import Axis, Grid

EQUAL = 1.05  # longest over mean context up to which a batch counts as equal
PRIOR = Smoothness(walk=4.0, pull=40.0, noise=1.0, walks={"sms": 8.0})


def ragged(points: Points) -> Mask:
    """Points whose longest context stands out."""
    return np.asarray(points.extra["context_max"] > EQUAL * points.features["context"])


def fit_skew(points: Points, equal: FittedCurve) -> Grid:
    """Nanoseconds per token over batch and SMs, of ragged points against the curve of equal ones."""
    plain = FittedCurve(replace(equal.curve, skew=None), equal.form).seconds(points)
    longer = points.extra["context_max"] - points.features["context"]
    slope = 1e9 * (points.seconds - plain) / longer
    error = 0.03 * 1e9 * points.seconds / longer
    axes = tuple(
        Axis(name, tuple(float(v) for v in np.unique(values)))
        for name, values in (("batch", points.features["batch"]), ("sms", points.sms))
    )
    return fit_grid(axes, (points.features["batch"], points.sms), slope, PRIOR, weights=error**-2)


def skew_errors(points: Points, equal: FittedCurve) -> dict[str, dict[str, Any]]:
    """Held-out errors on ragged points (random fifths): with the term, and by the sum of contexts alone."""
    with_term, without, truth = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for mask in folds(points, "random"):
        left = points.take(mask)
        grid = fit_skew(points.take(~mask), equal)
        with_term.append(with_skew(equal, grid).seconds(left))
        without.append(equal.seconds(left))
        truth.append(left.seconds)
    measured: Floats = np.concatenate(truth)
    return {
        "with the longest context": errors(np.concatenate(with_term), measured),
        "by the sum alone": errors(np.concatenate(without), measured),
    }


def with_skew(equal: FittedCurve, grid: Grid) -> FittedCurve:
    """The curve with the term."""
    return FittedCurve(replace(equal.curve, skew=grid), equal.form)

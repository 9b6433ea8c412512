"""Held-out errors: how points are left out, and what is reported of the predictions for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from calib.fit.points import Floats, Mask, Points
from sim.cost.measured import FEATURES

SHORT_S = 20e-6
SD_OF_ABSOLUTE_MEDIAN = 1.4826
FOLDS = 5
FRONTIER = 0.2
# what each kind of fold asks
MEANING = {
    "random": "a fifth of the points at random, five times over",
    "rows": "whole rows: every point with one size (tokens, chunk, batch, context)",
    "sms": "one partition size left out",
    "frontier": "the largest 20 % along each axis, from the smaller ones",
    "shapes": "a whole (n, k)",
}


def folds(points: Points, kind: str) -> Iterator[Mask]:
    """Masks of what is held out, one fold after another. Neighbouring rows are never left out together."""
    count = len(points)
    if kind == "random":
        # by position in a mixed order, so that every point is held out once
        order = np.random.default_rng(11).permutation(count)
        for i in range(FOLDS):
            mask = np.zeros(count, dtype=bool)
            mask[order[i::FOLDS]] = True
            yield mask
    elif kind == "rows":
        for name in FEATURES[points.kind]:
            yield from _every_other(points.features[name])
    elif kind == "sms":
        yield from _every_other(points.sms)
    elif kind == "frontier":
        for values in points.coordinates()[:-1]:
            found = np.unique(values)
            edge = found[int(np.ceil(len(found) * (1.0 - FRONTIER)))] if len(found) > 4 else np.inf
            if (mask := values >= edge).any() and not mask.all():
                yield mask
    elif kind == "shapes":
        groups = points.groups()
        if len(groups) > 2:
            yield from groups.values()


def _every_other(values: Floats) -> Iterator[Mask]:
    """Inner values of an axis, dealt in turn to as many folds as FOLDS; the ends always stay."""
    inner = np.unique(values)[1:-1]
    for i in range(min(FOLDS, len(inner))):
        yield np.isin(values, inner[i::FOLDS])


def errors(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Count, median, p90, p95 and maximum of |predicted / measured - 1|, signed bias, and both regimes apart."""
    found = _summary(predicted, measured)
    short = measured < SHORT_S
    if short.any() and not short.all():
        found["under_20us"] = _summary(predicted[short], measured[short])
        found["over_20us"] = _summary(predicted[~short], measured[~short])
    return found


def robust_sd(values: Floats) -> float:
    """Sd of log errors with heavy tails: half way between the median's and the 90th percentile's normal equivalent."""
    size = np.abs(values)
    return float(0.5 * (SD_OF_ABSOLUTE_MEDIAN * np.median(size) + np.percentile(size, 90) / 1.645))


def _summary(predicted: Floats, measured: Floats) -> dict[str, Any]:
    if not len(measured):
        return {"points": 0}
    signed = predicted / measured - 1.0
    size = np.abs(signed)
    return {
        "points": len(measured),
        "median": _round(np.median(size)),
        "p90": _round(np.percentile(size, 90)),
        "p95": _round(np.percentile(size, 95)),
        "max": _round(np.max(size)),
        "bias": _round(np.mean(signed)),
    }


def _round(value: Any) -> float:
    return round(float(value), 5)


def score(table: Mapping[str, Mapping[str, Any]]) -> float:
    """What methods are chosen by: median and 95th percentile over whole rows and whole partition sizes."""
    used = [table[kind] for kind in ("rows", "sms") if table.get(kind, {}).get("points")]
    used = used or [one for one in table.values() if one.get("points")]
    if not used:
        return float("inf")
    return float(np.mean([one["median"] + 0.25 * one["p95"] for one in used]))

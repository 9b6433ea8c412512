"""Other models: what is kept for constants that the calibrated model does not have.

The form and the tables of the calibrated model stay as they are, so that what was measured of other models moves
nothing else. A set of constants gets a residual of its own where that is nearer to left-out points than what the
calibrated model's residuals say; else these are found to transfer. Linear layers of other sizes behave otherwise than
the calibrated model's large ones: they get a form of their own, and a residual over n and k for sizes that nobody
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.folds import errors, robust_sd
from calib.fit.forms import Form, fit_form, form_seconds, thinned
from calib.fit.methods import PLAIN, answers, axes_of
from calib.fit.points import Floats, Mask, Points, merged, operator_points, read_rows
from calib.fit.surface import Smoothness, fit_grid
from sim.cost.gpu import GpuSpec
from sim.cost.measured import Key, MeasuredCurve, pooled_scale
from sim.cost.measured_grid import Axis, Grid

SWEEPS = ("shapes", "shards")
APART = ("gemm/fp8",)  # operators whose sweeps hold other models too: taken apart, as they are for 16 bits
FOLDS, SEED = 5, 43
LEAST = 5  # points of one set of constants
SMOOTH = Smoothness(walk=0.25)
NEXT_TO = 0.05  # knots nearer than that (in logarithms) are one
# linear layers of many sizes: a sample of the calibrated model's points, and a residual over m, n, k and SMs
WIDE_SETS, OWN_SAMPLE = 6, 400
WIDE_M = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDE = Smoothness(walk=0.15, noise=0.05)
WIDE_OWN = Smoothness(walk=0.1)


def other_points(folder: Path, gpu: GpuSpec) -> dict[str, Points]:
    """Points of other models by operator; none where the sweeps were not run."""
    found: dict[str, Points] = {}
    for sweep in SWEEPS:
        for operator, points in operator_points(read_rows(folder, sweep), gpu).items():
            found[operator] = merged([found[operator], points]) if operator in found else points
    return found


def taken_apart(
    found: Mapping[str, Points], others: Mapping[str, Points]
) -> tuple[dict[str, Points], dict[str, Points]]:
    """(points of the calibrated model, of other models) where one sweep has both, by the (n, k) of `gemm`."""
    found, others = dict(found), dict(others)
    own = {key[:2] for key in found["gemm"].keys} if "gemm" in found else set()
    for operator in set(APART) & set(found):
        points = found[operator]
        mask = np.array([key[:2] in own for key in points.keys], dtype=bool)
        if mask.any() and not mask.all():
            found[operator], others[operator] = points.take(mask), points.take(~mask)
    return found, others


def with_shapes(
    curve: MeasuredCurve, points: Points | None, own: Points, gpu: GpuSpec
) -> tuple[MeasuredCurve, dict[str, Any]]:
    """(the curve with what `points` of other models add, errors on left-out points before and after).

    `own`: the calibrated model's points of the operator.
    """
    if points is None:
        return curve, {}
    groups = {k: mask for k, mask in points.groups().items() if k not in curve.tables and mask.sum() >= LEAST}
    if not groups:
        return curve, {}
    new = points.take(np.any(list(groups.values()), axis=0))
    before = answers(curve, new)
    if own.kind == "gemm" and len(groups) >= WIDE_SETS and curve.method == "form":
        first = _wide_form(own, new, gpu, None)
        held = _left_out(new, _random(new), lambda part: _wide(own, part, gpu, first))
        unseen = _left_out(new, _sets(new), lambda part: _wide(own, part, gpu, first))
        record = _record(new, before, held) | {"unseen": errors(unseen, new.seconds)}
        other = replace(
            _wide(own, new, gpu, first),
            sigma=robust_sd(np.log(held / new.seconds)),
            sigma_off=robust_sd(np.log(unseen / new.seconds)),
        )
        return replace(curve, other=other), record
    held = _left_out(new, _random(new), lambda part: with_tables(curve, part))
    kept = [mask for mask in new.groups().values() if _nearer(held[mask], before[mask], new.seconds[mask])]
    record = _record(new, before, held)
    record["refitted"] = sorted(name_of(new.take(mask).keys[0]) for mask in kept)
    if not kept:
        return curve, record
    return with_tables(curve, new.take(np.any(kept, axis=0))), record


def _record(new: Points, before: Floats, held: Floats) -> dict[str, Any]:
    sets = new.groups()
    return {
        "points": len(new),
        "without": errors(before, new.seconds),
        "random": errors(held, new.seconds),
        "constants": [list(key) for key in sets],
        "each": {
            name_of(key): {
                "without": errors(before[mask], new.seconds[mask]),
                "random": errors(held[mask], new.seconds[mask]),
            }
            for key, mask in sets.items()
        },
    }


def _nearer(held: Floats, before: Floats, seconds: Floats) -> bool:
    """Is a residual of its own nearer to left-out points, by the median and the 95th percentile?"""
    after, without = errors(held, seconds), errors(before, seconds)
    return bool(after["median"] + 0.25 * after["p95"] < without["median"] + 0.25 * without["p95"])


def _random(points: Points) -> list[Mask]:
    fold = np.random.default_rng(SEED).permutation(len(points)) % FOLDS
    return [fold == i for i in range(FOLDS)]


def _sets(points: Points) -> list[Mask]:
    """Whole sets of constants left out, dealt in turn to the folds."""
    keys = sorted(set(points.keys))
    return [np.array([key in keys[i::FOLDS] for key in points.keys], dtype=bool) for i in range(FOLDS)]


def _left_out(points: Points, folds: list[Mask], fit: Callable[[Points], MeasuredCurve]) -> Floats:
    """Answers for each point by a curve that has not seen its fold."""
    found = np.zeros(len(points))
    for mask in folds:
        if mask.any():
            found[mask] = answers(fit(points.take(~mask)), points.take(mask))
    return found


def name_of(key: Key) -> str:
    """A set of constants as text: n x k, query x KV heads, or bytes a row."""
    return "x".join(str(part) for part in key[:2]) if len(key) > 1 else f"{key[0]} B"


def with_tables(
    curve: MeasuredCurve, points: Points, smoothness: Smoothness = SMOOTH, wide: bool = False
) -> MeasuredCurve:
    """The curve with a table for each set of constants of the points; of method `table` one of the times."""
    # what all constants share is known already: only the rest is fitted to a few points
    plain = curve.method == "table"
    base = np.ones(len(points)) if plain else answers(replace(curve, tables={}, other=None), points)
    logs = np.log(points.seconds / base)
    tables: dict[Key, Grid] = dict(curve.tables)
    for key, mask in points.groups().items():
        part = points.take(mask)
        own = fit_grid(
            axes_of(part),
            part.coordinates(),
            logs[mask],
            PLAIN if plain else smoothness,
            "line" if plain else "hold",
        )
        if not plain and curve.pooled is not None:
            scale = pooled_scale(part.shape(key))
            if part.kind != "gemm":  # how a GEMM's time steps between measured sizes is its own
                own = _between(own, curve.pooled, scale)
            own = replace(own, values=own.values + _shared(curve.pooled, own.axes, key, wide, scale))
        tables[key] = own
    return replace(curve, tables=tables)


def _between(own: Grid, pooled: Grid, scale: float) -> Grid:
    """The same on the knots of both, within the range of `own`, so that what is pooled keeps its steps between them.

    `scale`: on the first axis from these constants to those that the pooled residual is counted by.
    """
    factors = [scale, *[1.0] * (len(own.axes) - 1)]
    axes = tuple(
        replace(mine, knots=_united(mine.knots, np.array(axis.knots) / factor))
        for mine, axis, factor in zip(own.axes, pooled.axes, factors, strict=True)
    )
    mesh = np.meshgrid(*(np.array(axis.knots) for axis in axes), indexing="ij")
    return Grid(axes, own.at(mesh), own.beyond)


def _united(mine: tuple[float, ...], others: Floats) -> tuple[float, ...]:
    """Knots of both: the others' inside the range of mine and not next to one of them."""
    near = np.abs(np.log1p(others)[:, None] - np.log1p(np.array(mine))).min(axis=1) < NEXT_TO
    inside = (others > mine[0]) & (others < mine[-1])
    return tuple(float(knot) for knot in np.unique([*mine, *others[inside & ~near]]))


def _shared(pooled: Grid, axes: tuple[Axis, ...], key: Key, wide: bool, scale: float) -> Floats:
    """The pooled residual at the knots of axes."""
    first, *rest, sms = np.meshgrid(*(np.array(axis.knots) for axis in axes), indexing="ij")
    between = key[:2] if wide else ()
    return np.asarray(pooled.at((first * scale, *rest, *between, sms)))


def _wide_form(own: Points, points: Points, gpu: GpuSpec, start: Form | None) -> Form:
    return fit_form(merged([thinned(own, OWN_SAMPLE), points]), gpu, "waves", start)


def _wide(own: Points, points: Points, gpu: GpuSpec, start: Form) -> MeasuredCurve:
    """The curve of linear layers of any size: a form of all of them, a residual over (m, n, k, SMs), and tables."""
    every = merged([thinned(own, OWN_SAMPLE), points])
    form = _wide_form(own, points, gpu, start)
    logs = np.log(every.seconds / form_seconds(form.curve, every))
    n, k = (np.array([key[i] for key in every.keys], dtype=np.float64) for i in (0, 1))
    axes = (
        Axis("m", tuple(float(m) for m in WIDE_M)),
        _octaves("n", n),
        _octaves("k", k),
        Axis("sms", tuple(float(s) for s in np.unique(points.sms))),
    )
    pooled = fit_grid(axes, [every.features["m"], n, k, every.sms], logs, WIDE)
    curve = MeasuredCurve(form.curve, {}, "measured", "", pooled=pooled)
    return with_tables(curve, points, WIDE_OWN, wide=True)


def _octaves(name: str, values: Floats) -> Axis:
    low, high = int(np.floor(np.log2(values.min()))), int(np.ceil(np.log2(values.max())))
    return Axis(name, tuple(2.0**power for power in range(low, max(high, low + 1) + 1)))


def without_shapes(curve: MeasuredCurve, record: Mapping[str, Any]) -> MeasuredCurve:
    """The curve without what a record says was added."""
    added = {tuple(key) for key in record["constants"]}
    tables = {key: grid for key, grid in curve.tables.items() if key not in added}
    return replace(curve, tables=tables, other=None)


def clause(record: Mapping[str, Any]) -> str:
    """What a coverage sentence says of the added constants."""
    refitted = record.get("refitted")
    keys = [key for key in record["constants"] if refitted is None or name_of(tuple(key)) in refitted]
    if not keys:
        return ""
    what = {1: "rows of", 3: "(n, k)"}.get(len(keys[0]), "heads")
    return f"; more thinly also {what} " + ", ".join(name_of(tuple(key)) for key in keys)

"""All solo operators of a run: points, the kept curve of each, and the record that goes into a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.chunks import chunked_rows, fit_shared
from calib.fit.folds import errors, robust_sd
from calib.fit.methods import FittedCurve
from calib.fit.operators import LEAST, Chosen, choose
from calib.fit.points import SWEEPS, Floats, Points, merged, operator_points, read_rows
from calib.fit.shapes import other_points, taken_apart, with_shapes
from calib.fit.skew import fit_skew, ragged, skew_errors, with_skew
from sim.cost.gpu import GpuSpec
from sim.cost.profile import spec_profile


@dataclass(frozen=True)
class Solo:
    """One operator's outcome. `record`: errors by method and fold, terms, coverage, what it replaces."""

    points: Points
    fitted: FittedCurve
    record: dict[str, Any]


def read_points(run: Path, gpu: GpuSpec) -> dict[str, Points]:
    """Points of every solo operator of a run, by operator."""
    found: dict[str, Points] = {}
    for sweep in SWEEPS:
        for operator, points in operator_points(read_rows(run, sweep), gpu).items():
            found[operator] = merged([found[operator], points]) if operator in found else points
    return found


def all_points(run: Path, gpu: GpuSpec) -> tuple[dict[str, Points], dict[str, Points]]:
    """(points of the calibrated model, points of other models) by operator."""
    return taken_apart(read_points(run, gpu), other_points(run, gpu))


def fit_solo(run: Path, gpu: GpuSpec, tick: Callable[[str], None] = lambda text: None) -> dict[str, Solo]:
    """Curves of all operators with enough points."""
    fitted: dict[str, Solo] = {}
    found, others = all_points(run, gpu)
    for operator, points in found.items():
        if len(points) >= LEAST or (len(points) >= LEAST // 2 and points.kind == "elementwise"):
            tick(f"{operator}: {len(points)} points")
            fitted[operator] = fit_one(run, gpu, points, others.get(operator))
    return fitted


def fit_one(run: Path, gpu: GpuSpec, points: Points, others: Points | None = None) -> Solo:
    """Curve and record of one operator. `others`: points of other models."""
    even, uneven = points, None
    if points.kind == "decode":
        mask = ragged(points)
        even, uneven = points.take(~mask), points.take(mask)
    chosen = choose(even, gpu)
    fitted = chosen.fitted
    record = describe(chosen, even, gpu)
    if uneven is not None and len(uneven) >= LEAST:
        record["ragged"] = skew_errors(uneven, fitted)
        fitted = with_skew(fitted, fit_skew(uneven, fitted))
    if points.kind == "prefill":
        backend = points.operator.split("/")[1]
        launches = chunked_rows(read_rows(run, "prefill_attention"), backend)
        if len(launches) >= 4:
            fitted, record["several_chunks"] = fit_shared(launches, fitted, even, gpu)
    sigma, off = spreads(chosen.log_errors)
    spread = replace(fitted.curve, sigma=sigma, sigma_off=off)
    curve, of_others = with_shapes(spread, others, points, gpu)
    if of_others:
        record["other_models"] = of_others
    return Solo(points, FittedCurve(curve, fitted.form), record)


def spreads(logs: Mapping[str, Floats]) -> tuple[float, float]:
    """Robust sd of the held-out log errors inside coverage (random fifths) and outside (frontier, other shapes)."""

    inside = robust_sd(logs["random"]) if len(logs.get("random", [])) else 0.0
    outside = [robust_sd(logs[kind]) for kind in ("frontier", "shapes") if len(logs.get(kind, []))]
    return inside, max([inside, *outside])


def describe(chosen: Chosen, points: Points, gpu: GpuSpec) -> dict[str, Any]:
    """Errors of all methods by fold, the fitted terms with standard errors, coverage, and the spec profile's error."""
    fitted = chosen.fitted.form.fitted
    spread = np.sqrt(np.maximum(np.diag(fitted.covariance), 0.0))
    curve = spec_profile(gpu).curve(points.operator)
    spec = np.zeros(len(points))
    for key, mask in points.groups().items():
        part = points.take(mask)
        spec[mask] = [
            float(curve.timing(part.take(np.arange(len(part)) == i).shape(key), int(part.sms[i])).seconds[0])
            for i in range(len(part))
        ]
    return {
        "points": len(points),
        "method": chosen.recipe.name,
        "recipe": recipe_data(chosen),
        "errors": chosen.errors,
        "terms": {name: float(f"{value:.5g}") for name, value in chosen.fitted.form.terms.items()},
        "log_sd": {name: float(f"{sd:.2g}") for name, sd in zip(fitted.names, spread, strict=True)},
        "covariance": [[float(f"{v:.3g}") for v in row] for row in fitted.covariance],
        "rejected": list(fitted.rejected),
        "range": {
            name: [float(values.min()), float(values.max())]
            for name, values in [*points.features.items(), ("sms", points.sms)]
        },
        "repeat_sd": round(float(np.median(points.spread)), 5),
        "spec_profile": errors(spec, points.seconds),
    }


def recipe_data(chosen: Chosen) -> dict[str, Any]:
    """The kept recipe as a mapping that `calib.fit.check` builds it from again."""
    recipe = chosen.recipe
    smooth = recipe.smoothness
    return {
        "form": recipe.form,
        "residual": recipe.residual,
        "stairs": recipe.stairs,
        "method": recipe.method,
        "beyond": recipe.beyond,
        "smoothness": {
            "walk": smooth.walk,
            "bend": smooth.bend,
            "pull": smooth.pull,
            "noise": smooth.noise,
            "walks": dict(smooth.walks),
        },
    }

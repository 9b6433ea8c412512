"""One operator from points to a curve: every method on every fold, the best kept, and the record of by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calib.fit.folds import MEANING, errors, folds, score
from calib.fit.forms import Form, fit_form, form_names
from calib.fit.methods import SRM_ALPHA, FittedCurve, Recipe, fit_curve, fit_srm_alpha, recipes
from calib.fit.points import Floats, Points
from sim.cost.gpu import GpuSpec

Errors = dict[str, dict[str, dict[str, Any]]]  # method -> fold -> summary
LEAST = 24  # points below which nothing is fitted


@dataclass(frozen=True)
class Chosen:
    """The kept curve of one operator: its recipe, the errors of all methods, and the curve on all points."""

    recipe: Recipe
    errors: Errors
    fitted: FittedCurve
    log_errors: Mapping[str, Floats]  # of the kept method, by fold


def evaluate(
    points: Points,
    gpu: GpuSpec,
    candidates: Sequence[Recipe],
    whole: Mapping[str, Form],
    alpha: bool = True,
) -> dict[int, dict[str, tuple[Floats, Floats]]]:
    """(predicted, measured) held-out seconds by fold, for each candidate by its index; -1 is SRM x alpha (`alpha`).

    Forms are fitted anew for each fold, starting from `whole` (fits to all points); what is held out is never seen.
    """
    found: dict[int, dict[str, tuple[Floats, Floats]]] = {
        i: {} for i in range(-1 if alpha else 0, len(candidates))
    }
    for kind in MEANING:
        parts: dict[int, list[Floats]] = {i: [] for i in found}
        measured: list[Floats] = []
        for mask in folds(points, kind):
            train, left = points.take(~mask), points.take(mask)
            measured.append(left.seconds)
            forms = {name: fit_form(train, gpu, name, whole[name]) for name in {c.form for c in candidates}}
            for i, recipe in enumerate(candidates):
                if kind == "shapes" and recipe.method == "table":
                    continue  # interpolation knows nothing of other shapes
                recipe = pooled(recipe) if kind == "shapes" else recipe
                parts[i].append(fit_curve(train, gpu, recipe, forms[recipe.form]).seconds(left))
            if alpha and kind != "shapes":
                parts[-1].append(fit_srm_alpha(train, gpu).seconds(left))
        if measured:
            truth = np.concatenate(measured)
            for i, predicted in parts.items():
                if predicted:
                    found[i][kind] = (np.concatenate(predicted), truth)
    return found


def pooled(recipe: Recipe) -> Recipe:
    """The recipe with a residual for constants that were not measured, if it has residuals."""
    return replace(recipe, pooled=recipe.residual and recipe.method == "form")


def choose(points: Points, gpu: GpuSpec) -> Chosen:
    """Evaluate all methods and keep the best by whole rows and whole partition sizes."""
    candidates = recipes(points.kind)
    whole = {name: fit_form(points, gpu, name) for name in form_names(points.kind)}
    held = evaluate(points, gpu, candidates, whole)
    tables = {i: {kind: errors(*pair) for kind, pair in by_fold.items()} for i, by_fold in held.items()}
    best: dict[str, int] = {}
    for i, recipe in enumerate(candidates):
        if recipe.name not in best or score(tables[i]) < score(tables[best[recipe.name]]):
            best[recipe.name] = i
    kept = min(best.values(), key=lambda i: score(tables[i]))
    recipe = pooled(candidates[kept])
    record = {name: tables[i] for name, i in best.items()} | {SRM_ALPHA: tables[-1]}
    logs = {kind: np.log(predicted / truth) for kind, (predicted, truth) in held[kept].items()}
    return Chosen(recipe, record, fit_curve(points, gpu, recipe, whole[recipe.form]), logs)


def recheck(points: Points, gpu: GpuSpec, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Errors by fold of one recipe, computed anew."""
    whole = {recipe.form: fit_form(points, gpu, recipe.form)}
    return {kind: errors(*pair) for kind, pair in evaluate(points, gpu, [recipe], whole, False)[0].items()}

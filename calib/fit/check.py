"""Recomputes a profile's table of errors from its measurements, and compares it with what the profile states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.collectives.curves import fit_collectives
from calib.fit.activity import activity_errors, activity_rows, read_counted
from calib.fit.assemble import loaded_curves
from calib.fit.build import fit_pairs, fit_steps, read_run
from calib.fit.folder import CURVES, ERRORS
from calib.fit.fused import recheck_fused
from calib.fit.methods import Recipe
from calib.fit.operators import pooled, recheck
from calib.fit.points import Points
from calib.fit.power import fit_power
from calib.fit.scoring import score_random
from calib.fit.shapes import with_shapes, without_shapes
from calib.fit.skew import ragged
from calib.fit.solo import all_points
from calib.fit.surface import Smoothness
from sim.cost.gpu import GpuSpec, load_gpu
from sim.cost.measured import MeasuredCurve
from sim.cost.profile import load_folder
from sim.cost.profile_schema import read_yaml
from sim.errors import SimctlError

# another platform's arithmetic takes other steps in a fit: errors move in the third digit
ABSOLUTE, RELATIVE = 0.002, 0.03
COMPARED = ("median", "p90", "p95", "bias")


@dataclass(frozen=True)
class Finding:
    """One comparison: `where` in the table, what is stated and what comes out."""

    where: str
    stated: float | None
    found: float | None

    @property
    def ok(self) -> bool:
        """Do they agree?"""
        if self.stated is None or self.found is None:
            return self.stated == self.found
        return abs(self.stated - self.found) <= ABSOLUTE + RELATIVE * abs(self.stated)


def check(folder: Path, tick: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """All comparisons of a profile's folder; SimctlError where it has no error table or no measurements."""
    stated = _stated(folder)
    data = read_yaml(folder)
    gpu = load_gpu(data["gpu"])
    about = data.get("about") or {}
    profile = load_folder(folder, gpu)
    curves = loaded_curves(profile)
    findings = [_frozen(folder, about)]
    known, others = all_points(folder, gpu)
    for operator, points in known.items():
        record = stated["operators"].get(operator)
        if record is not None:
            tick(operator)
            found = recheck(evened(points), gpu, recipe_of(record))
            findings += compare(operator, record["errors"][record["method"]], found)
            curve = curves[operator]
            findings += _others(operator, record, curve, others.get(operator), points, gpu)
    tick("whole steps")
    _, of_steps, _ = fit_steps(folder, gpu, about["model"], curves)
    findings += compare("steps", stated["steps"], of_steps)
    tick("contention")
    findings += compare("contention", stated["contention"], fit_pairs(folder, gpu)[1])
    tick("fused attention")
    of_fused = stated.get("fused_attention") or {}
    findings += compare(
        "fused attention", of_fused, recheck_fused(folder, about["model"], gpu, of_fused, profile.fused)
    )
    tick("collectives")
    of_group = fit_collectives(folder, read_run(folder))
    findings += compare("collectives", stated.get("collectives") or {}, of_group[1] if of_group else {})
    tick("power")
    max_mhz = float(read_run(folder)["gpu"].get("max_sm_mhz") or gpu.boost_mhz)
    findings += compare("power", stated.get("power") or {}, fit_power(folder, gpu, max_mhz)[1])
    tick("activity")
    counted = activity_rows(read_counted(folder, gpu, curves), gpu)
    findings += compare("activity", stated.get("activity") or {}, activity_errors(counted))
    tick("random shapes")
    held = score_random(folder, profile, about["model"], curves)
    return findings + compare("random shapes", stated["random_shapes"], held)


def _others(
    operator: str,
    record: Mapping[str, Any],
    curve: MeasuredCurve,
    points: Points | None,
    own: Points,
    gpu: GpuSpec,
) -> list[Finding]:
    """Comparisons of the errors on other models' shapes."""
    if "other_models" not in record:
        return []
    _, found = with_shapes(without_shapes(curve, record["other_models"]), points, own, gpu)
    return compare(f"{operator}, other models", record["other_models"], found)


def _stated(folder: Path) -> dict[str, Any]:
    path = folder / ERRORS
    if not path.is_file() or not (folder / "measurements").is_dir():
        raise SimctlError(f"'{folder}' has no {ERRORS} or no measurements: there is nothing to recompute.")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SimctlError(f"'{path}' is not readable JSON: {error}.") from error
    return found


def _frozen(folder: Path, about: Mapping[str, Any]) -> Finding:
    """The curves are those that the errors were computed for: 1 if the hash agrees."""
    same = hashlib.sha256((folder / CURVES).read_bytes()).hexdigest() == about.get("frozen")
    return Finding(f"{CURVES} has the hash in profile.yaml", 1.0, float(same))


def evened(points: Points) -> Points:
    """What the folds of an operator are made of: decode batches of equal contexts only."""
    return points.take(~ragged(points)) if points.kind == "decode" else points


def recipe_of(record: Mapping[str, Any]) -> Recipe:
    """The recipe of an operator's record."""
    data = record["recipe"]
    smooth = Smoothness(**data["smoothness"])
    recipe = Recipe(
        record["method"],
        data["form"],
        data["residual"],
        stairs=data["stairs"],
        method=data["method"],
        beyond=data["beyond"],
        smoothness=smooth,
    )
    return pooled(recipe)


def compare(name: str, stated: Mapping[str, Any], found: Mapping[str, Any]) -> list[Finding]:
    """Comparisons of every error summary in two trees of the same shape."""
    theirs, ours = dict(_leaves(stated, name)), dict(_leaves(found, name))
    findings = []
    for where in sorted({*theirs, *ours}):
        a, b = theirs.get(where, {}), ours.get(where, {})
        findings += [
            Finding(f"{where}, {key}", a.get(key), b.get(key)) for key in COMPARED if key in {*a, *b}
        ]
    return findings


def _leaves(node: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "median" in node:
        yield where, node
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{where} / {key}")

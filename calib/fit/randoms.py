"""Errors on random shapes that no grid holds: of the run that was fitted, and of runs of their own (`heldout/`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.composition import composed
from calib.fit.contention import predict as predict_pairs
from calib.fit.contention import read_corun
from calib.fit.folds import errors
from calib.fit.methods import answers
from calib.fit.points import operator_points, read_rows
from calib.fit.skew import ragged
from calib.fit.steps import Steps
from sim.cost.gpu import GpuSpec
from sim.cost.measured import MeasuredCurve
from sim.cost.measured_contention import SIDES, MeasuredContention
from sim.cost.measured_steps import Composition

SWEEP, FUSED_SWEEPS = "random", ("fused_random", "fused_heads_random")


def held_out_folders(profile: Path) -> dict[str, Path]:
    """Folders with random shapes by origin: `same run`, and each run under `heldout/` by its name."""
    found = {}
    if (profile / "measurements" / f"{SWEEP}.csv.gz").is_file():
        found["same run"] = profile
    drawn = [
        *(profile / "heldout").rglob(f"{SWEEP}.csv.gz"),
        *(path for name in FUSED_SWEEPS for path in (profile / "heldout").rglob(f"{name}.csv.gz")),
    ]
    for path in sorted(drawn):
        folder = path.parent.parent if path.parent.name == "measurements" else path.parent
        found[f"run {folder.relative_to(profile / 'heldout').as_posix()}"] = folder
    return found


def operator_errors(folder: Path, gpu: GpuSpec, curves: Mapping[str, MeasuredCurve]) -> dict[str, Any]:
    """Errors of the solo operators of a folder's random shapes."""
    record: dict[str, Any] = {}
    for operator, points in operator_points(read_rows(folder, SWEEP), gpu).items():
        curve = curves.get(operator)
        if curve is None:
            continue
        predicted = answers(curve, points)
        record[operator] = errors(predicted, points.seconds)
        if 0 < (whole := points.sms == gpu.sms).sum() < len(points):
            record[f"{operator} (whole GPU)"] = errors(predicted[whole], points.seconds[whole])
        if points.kind == "decode" and 0 < (even := ~ragged(points)).sum() < len(points):
            record[f"{operator} (equal contexts)"] = errors(predicted[even], points.seconds[even])
    return record


def step_errors(steps: Steps, shares: Any, composition: Composition, layers: int) -> dict[str, Any]:
    """Errors of whole steps, by kind, as graphs (an eager step's time is the host's)."""
    if not len(steps):
        return {}
    predicted = composed(steps, shares, composition, layers)
    graph = np.array([mode == "graph" for mode in steps.mode], dtype=bool)
    record = {}
    for kind in sorted(set(steps.kind)):
        mask = graph & np.array([one == kind for one in steps.kind], dtype=bool)
        if mask.any():
            record[kind] = errors(predicted[mask], steps.seconds[mask])
    return record


def pair_errors(folder: Path, gpu: GpuSpec, contention: MeasuredContention) -> dict[str, Any]:
    """Errors of slowed times of random co-runs, by mode and side, given the measured solo times."""
    rows = read_rows(folder, SWEEP)
    if not len(rows) or "neighbour_kind" not in rows.columns or not rows["neighbour_kind"].notna().any():
        return {}
    corun = read_corun(folder, gpu, SWEEP)
    factors = predict_pairs(contention, corun)
    record: dict[str, Any] = {}
    for mode in sorted(set(corun.mode)):
        mask = corun.mode == mode
        record[str(mode)] = {
            side: errors(factors[mask, i], corun.slow[mask, i]) for i, side in enumerate(SIDES)
        }
    return record

"""All errors on random shapes of what a profile ships: operators, whole steps, co-runs, by origin of the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.fit.build import priced_steps
from calib.fit.randoms import SWEEP, held_out_folders, operator_errors, pair_errors, step_errors
from sim.cost.gpu import GpuSpec
from sim.cost.measured import MeasuredCurve
from sim.cost.measured_contention import MeasuredContention
from sim.cost.measured_steps import Composition
from sim.cost.model import load_model


def score_random(
    folder: Path,
    gpu: GpuSpec,
    model: str,
    curves: Mapping[str, MeasuredCurve],
    composition: Composition | None,
    contention: MeasuredContention | None,
) -> dict[str, Any]:
    """Errors by origin (`same run`, `run NAME`), then `operators`, `steps` and `contention`."""
    layers = load_model(model).layers
    found: dict[str, Any] = {}
    for origin, where in held_out_folders(folder).items():
        record = {"operators": operator_errors(where, gpu, curves)}
        if composition is not None:
            steps, shares = priced_steps(where, gpu, model, curves, (SWEEP,))
            record["steps"] = step_errors(steps, shares, composition, layers)
        if contention is not None:
            record["contention"] = pair_errors(where, gpu, contention)
        found[origin] = {key: value for key, value in record.items() if value}
    return found

"""All errors on random shapes of what a profile ships: operators, whole steps, co-runs, fused attention, by origin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from calib.fit.build import priced_steps
from calib.fit.fused import score_fused
from calib.fit.randoms import SWEEP, held_out_folders, operator_errors, pair_errors, step_errors
from sim.cost.gpu import GpuSpec
from sim.cost.measured import MeasuredCurve
from sim.cost.measured_contention import MeasuredContention
from sim.cost.measured_fused import FusedSurface
from sim.cost.measured_steps import Composition
from sim.cost.model import load_model


class Shipped(Protocol):
    """What is scored: a loaded profile, or what was just fitted."""

    @property
    def gpu(self) -> GpuSpec: ...
    @property
    def composition(self) -> Composition | None: ...
    @property
    def contention(self) -> MeasuredContention | None: ...
    @property
    def fused(self) -> FusedSurface | None: ...


def score_random(
    folder: Path, shipped: Shipped, model: str, curves: Mapping[str, MeasuredCurve]
) -> dict[str, Any]:
    """Errors by origin (`same run`, `run NAME`), then `operators`, `steps` and `contention`."""
    layers, gpu = load_model(model).layers, shipped.gpu
    found: dict[str, Any] = {}
    for origin, where in held_out_folders(folder).items():
        record = {"operators": operator_errors(where, gpu, curves)}
        if shipped.fused is not None:
            scored = score_fused(where, shipped.fused, model)
            record["operators"] |= {f"fused_attention/{name}": one for name, one in scored.items()}
        if shipped.composition is not None:
            steps, shares = priced_steps(where, gpu, model, curves, (SWEEP,))
            record["steps"] = step_errors(steps, shares, shipped.composition, layers)
        if shipped.contention is not None:
            record["contention"] = pair_errors(where, gpu, shipped.contention)
        found[origin] = {key: value for key, value in record.items() if value}
    return found

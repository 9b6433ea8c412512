"""Everything that is fitted to a calibration's folder: curves, terms of whole steps, contention, power and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from calib.collectives.curves import fit_collectives
from calib.fit.activity import activity_errors, activity_rows, fit_activity, read_counted, with_parts
from calib.fit.assemble import cost_of, named_curves
from calib.fit.composition import fit_and_score, scaled_share
from calib.fit.contention import contention_errors, contention_of
from calib.fit.fused import fit_fused
from calib.fit.hosts import fit_energy, fit_host, hot_runs, power_runs
from calib.fit.own_steps import fit_own, joined, own_errors, own_gain
from calib.fit.points import gpu_of, read_rows
from calib.fit.power import fit_power
from calib.fit.solo import Solo, fit_solo
from calib.fit.steps import ALONE, OWN_SWEEPS, SWEEPS, Steps, read_steps
from calib.fit.warming import fit_warming, read_warm, warming_errors
from sim.cost.activity import Activity
from sim.cost.gpu import GpuSpec, load_gpu
from sim.cost.measured import MeasuredCurve
from sim.cost.measured_contention import MeasuredContention
from sim.cost.measured_fused import FusedSurface
from sim.cost.measured_steps import Composition
from sim.cost.model import load_model
from sim.errors import SimctlError

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """Everything that a profile's folder holds beside its measurements."""

    gpu: GpuSpec
    run: Mapping[str, Any]
    solo: Mapping[str, Solo]
    composition: Composition | None
    contention: MeasuredContention | None
    fused: FusedSurface | None
    host: Mapping[str, Any]
    energy: Mapping[str, Any]
    hot: list[dict[str, Any]]
    activity: list[dict[str, Any]]
    jitter_sd: float
    errors: dict[str, Any]
    collectives: Mapping[str, Any] | None = None
    counted: Activity | None = None


def read_run(folder: Path) -> dict[str, Any]:
    """`run.yaml` of a calibration; SimctlError if there is none."""
    path = folder / "run.yaml"
    if not path.is_file():
        raise SimctlError(f"'{folder}' holds no calibration: there is no run.yaml in it.")
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def fit_run(folder: Path, gpu_name: str | None = None, tick: Tick = lambda text: None) -> Built:
    """Fit everything that a calibration's folder holds; `gpu_name` overrides the device that it names."""
    run = read_run(folder)
    gpu = load_gpu(gpu_name or gpu_of(run["gpu"]["name"]))
    if run["gpu"]["sms"] != gpu.sms:
        raise SimctlError(f"{folder / 'run.yaml'}: a {gpu.name} has {gpu.sms} SMs, not {run['gpu']['sms']}.")
    solo = fit_solo(folder, gpu, tick)
    tick("whole steps")
    curves = named_curves(solo)
    composition, of_steps, jitter = fit_steps(folder, gpu, run["model"], curves)
    tick("contention")
    contention, of_pairs = fit_pairs(folder, gpu)
    tick("fused attention")
    fused, of_fused = fit_fused(folder, run["model"], gpu)
    of_group = fit_collectives(folder, run)
    hot = hot_runs(folder)
    tick("activity")
    counted = read_counted(folder, gpu, curves)
    activity = activity_rows(counted, gpu)
    tick("power")
    energy, of_power = fit_power(folder, gpu, float(run["gpu"].get("max_sm_mhz") or gpu.boost_mhz))
    layers = load_model(run["model"]).layers
    errors = {
        "operators": {name: one.record for name, one in solo.items()},
        "steps": of_steps,
        "contention": of_pairs,
        "fused_attention": of_fused,
        "power": of_power,
        "activity": activity_errors(activity),
    }
    if of_group is not None:
        errors["collectives"] = of_group[1]
    found = fit_activity(counted, gpu)
    return Built(
        gpu=gpu,
        run=run,
        solo=solo,
        composition=composition,
        contention=contention,
        fused=fused,
        host=fit_host(folder, layers),
        energy=energy or fit_energy([*hot, *power_runs(folder)], gpu),
        hot=hot,
        activity=activity,
        jitter_sd=jitter,
        errors=errors,
        collectives=of_group[0] if of_group is not None else None,
        counted=None if found is None else with_parts(found, folder),
    )


def fit_steps(
    folder: Path, gpu: GpuSpec, model: str, curves: Mapping[str, MeasuredCurve]
) -> tuple[Composition | None, dict[str, Any], float]:
    """Composition terms, their errors, and the spread of a step's time between repeats; nothing without steps."""
    steps, shares = priced_steps(folder, gpu, model, curves)
    if len(steps) < 20:
        return None, {}, 0.01
    layers = load_model(model).layers
    composition, record = fit_and_score(steps, shares, layers, gpu.sms)
    runs = read_warm(folder)
    if runs is not None:
        composition = replace(composition, warming=fit_warming(runs, folder))
        record |= {"clock behind decodes": warming_errors(runs, composition.warming)}
    return *_own_terms(folder, gpu, model, curves, composition, record), repeat_sd(folder)


def _own_terms(
    folder: Path,
    gpu: GpuSpec,
    model: str,
    curves: Mapping[str, MeasuredCurve],
    terms: Composition,
    record: dict[str, Any],
) -> tuple[Composition, dict[str, Any]]:
    """The terms with what the measured model's own launches leave over, and the record with their errors."""
    layers = load_model(model).layers
    parts = [priced_steps(folder, gpu, model, curves, sweeps) for sweeps in ((*SWEEPS, ALONE), OWN_SWEEPS)]
    every, of_every = joined(parts, terms.warming, gpu.sms)
    if not every.decoding.any() or every.decoding.all():
        return terms, record
    record |= own_errors(every, of_every, terms, model, layers)
    own = fit_own(every, of_every, terms, model, layers)
    if terms.warming is not None:
        own = replace(own, own_gain=own_gain(parts[1][0], terms.warming, gpu.sms))
    return own, record


def priced_steps(
    folder: Path,
    gpu: GpuSpec,
    model: str,
    curves: Mapping[str, MeasuredCurve],
    sweeps: tuple[str, ...] = SWEEPS,
) -> tuple[Steps, Any]:
    """Measured steps with the sum of their operators, and the share of it that the composition factor is for."""
    costs = {name: cost_of(curves, gpu, model, name) for name in ("", "fa2")}
    steps = read_steps(folder, costs, sweeps)
    shares = [
        scaled_share(costs.get(back, costs[""]), launch, int(sms))
        for back, launch, sms in zip(steps.attention, steps.launch, steps.sms, strict=True)
    ]
    return steps, np.array(shares)


def repeat_sd(folder: Path) -> float:
    """Median relative sd of whole steps between repeats; at least 0.1 %."""
    rows = read_rows(folder, "steps")
    if not len(rows) or "sd_s" not in rows.columns:
        return 0.01
    return max(0.001, round(float((rows["sd_s"] / rows["time_s"]).median()), 4))


def fit_pairs(folder: Path, gpu: GpuSpec) -> tuple[MeasuredContention | None, dict[str, Any]]:
    """The contention surface and its errors; nothing where no co-runs were measured."""
    try:
        return contention_of(folder, gpu), contention_errors(folder, gpu)
    except (SimctlError, KeyError, IndexError):
        return None, {}

"""The contention surface that a profile ships, and its errors on what it has not seen beside the baselines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.contention_terms import fit_contention
from calib.fit.coruns import Corun, groups, read_corun, row_loads
from calib.fit.folds import errors
from calib.fit.points import Floats, Mask, column, read_rows
from calib.fit.warming import fit_warming, read_warm
from sim.cost import load_cost
from sim.cost.gpu import GpuSpec
from sim.cost.loads import launch_loads
from sim.cost.measured_contention import PRIORITIES, SIDES, MeasuredContention
from sim.cost.shapes import Launch
from sim.errors import SimctlError

FOLDS = 5
MEANING = {
    "random": "a fifth of the co-runs at random, five times over",
    "split": "all co-runs on one split of the SMs, of every mode",
    "mode": "one way of overlapping (half or whole) predicted from the other modes",
}


def predict(surface: MeasuredContention, corun: Corun) -> Floats:
    """What the surface answers for each co-run, shape (n, 2)."""
    found = np.ones((len(corun), 2))
    keys = np.stack([corun.prefill_sms, corun.decode_sms, corun.priority == "high"])
    for key in np.unique(keys, axis=1).T:
        at = np.flatnonzero(np.all(keys == key[:, None], axis=0))
        split = int(key[0]), int(key[1])
        overlap = max(0, sum(split) - surface.gpu.sms)
        priority = PRIORITIES[int(key[2])]
        of_both = surface.factors(
            corun.prefill.take(at), corun.decode.take(at), split, overlap, priority=priority
        )
        found[at] = np.stack([np.diag(one) for one in of_both], axis=1)
    return found


def masks(corun: Corun, kind: str) -> Iterator[Mask]:
    """What is held out, one fold after another; see `MEANING`."""
    if kind == "random":
        order = np.random.default_rng(11).permutation(len(corun))
        for i in range(FOLDS):
            yield np.isin(np.arange(len(corun)), order[i::FOLDS])
    elif kind == "split":
        partitioned = corun.regime != "streams"
        for size in np.unique(corun.prefill_sms[partitioned]):
            yield partitioned & (corun.prefill_sms == size)
    else:
        for mode in ("half", "whole"):
            if (mask := corun.mode == mode).any():
                yield mask


def held_out(corun: Corun, model: str, kind: str) -> tuple[dict[str, Floats], Mask]:
    """Predicted slowdowns by method, shape (n, 2), and which co-runs were held out by a fold of that kind."""
    found = {name: np.ones((len(corun), 2)) for name in ("surface", "base", "constant", "none")}
    seen = np.zeros(len(corun), dtype=bool)
    for mask in masks(corun, kind):
        train, left = corun.take(~mask), corun.take(mask)
        try:
            surface = fit_contention(train, model)
        except SimctlError:
            continue  # what is left does not make a surface
        found["surface"][mask] = predict(surface, left)
        found["base"][mask] = predict(replace(surface, residuals={}), left)
        found["constant"][mask] = _constant(train, left)
        seen |= mask
    return found, seen


def _constant(train: Corun, left: Corun) -> Floats:
    """Mean slowdown of a phase in the same mode and priority (if those were seen, else of all overlapping ones)."""
    found = np.ones((len(left), 2))
    for i in range(len(left)):
        same = (train.mode == left.mode[i]) & (train.priority == left.priority[i])
        same = same if same.any() else train.regime == left.regime[i]
        same = same if same.any() else np.ones(len(train), dtype=bool)
        found[i] = train.slow[same].mean(axis=0)
    return found


def kept_residuals(corun: Corun, model: str) -> dict[tuple[str, str], bool]:
    """Regimes in which residuals lower the held-out error of random fifths."""
    found, _ = held_out(corun, model, "random")
    kept = {}
    for regime, priority in groups(corun):
        mask = (corun.regime == regime) & (corun.priority == priority)
        scores = [_score(found[name][mask], corun.slow[mask]) for name in ("surface", "base")]
        kept[regime, priority] = scores[0] < scores[1]
    return kept


def _score(predicted: Floats, measured: Floats) -> float:
    size = np.abs(predicted / measured - 1.0)
    return float(np.median(size) + 0.25 * np.percentile(size, 95))


def measured_on(folder: Path, gpu: GpuSpec) -> tuple[Corun, str]:
    """Co-runs of a folder and the model that ran."""
    runs = read_warm(folder)
    corun = read_corun(folder, gpu, warming=None if runs is None else fit_warming(runs, folder))
    return corun, str(read_rows(folder, "corun")["model"].iloc[0])


def contention_of(folder: Path, gpu: GpuSpec) -> MeasuredContention:
    """The surface that a profile of this run ships; SimctlError if too few co-runs were measured."""
    corun, model = measured_on(folder, gpu)
    return fit_contention(corun, model, kept_residuals(corun, model))


def contention_errors(folder: Path, gpu: GpuSpec) -> dict[str, Any]:
    """Held-out errors of the slowed times: fold -> `mode` or `mode/high` -> side -> method -> summary.

    `shipped`: the method in use, base or surface, by regime. `stagger`: partial overlaps, see `stagger_errors`.
    """
    corun, model = measured_on(folder, gpu)
    kept = kept_residuals(corun, model)
    names = np.array(
        [f"{r}/high" if p == "high" else r for r, p in zip(corun.mode, corun.priority, strict=True)]
    )
    alone = np.stack([corun.prefill.seconds, corun.decode.seconds], axis=1)
    folds: dict[str, Any] = {}
    for kind in MEANING:
        found, seen = held_out(corun, model, kind)
        folds[kind] = {
            str(name): {
                side: {
                    method: errors((values * alone)[mask, i], (corun.slow * alone)[mask, i])
                    for method, values in found.items()
                }
                for i, side in enumerate(SIDES)
            }
            for name in np.unique(names[seen])
            for mask in [seen & (names == name)]
        }
    return {
        "meaning": MEANING,
        "shipped": {"/".join(key): "surface" if used else "base" for key, used in kept.items()},
        "folds": folds,
        "stagger": stagger_errors(folder, gpu, fit_contention(corun, model, kept)),
    }


def stagger_errors(folder: Path, gpu: GpuSpec, surface: MeasuredContention) -> dict[str, Any]:
    """Errors of prefill times while decode steps run for a part of it: at solo speed before and after, and at the
    surface's rate in between; by SMs, then method. Empty if no such sweep was run. None of it was fitted.

    On a GPU at its power cap the solo time (of a long run) has a lower clock than a short staggered run has.
    """
    rows = read_rows(folder, "stagger")
    rows = rows[rows["kind"] == "prefill_layer"] if len(rows) else rows
    if not len(rows):
        return {}
    prefill = replace(row_loads(rows, gpu), seconds=column(rows, "alone_s"))
    names = ("model", "kind", "decode_batch", "context_sum", "context_max")
    steps = rows.assign(**{n: rows[f"neighbour_{n}"] for n in names[1:]})[list(names)]
    cost = load_cost(surface.model, gpu.name, profile="spec")
    factor = np.ones(len(rows))
    for i, (sms, beside) in enumerate(zip(rows["sms"], rows["neighbour_sms"], strict=True)):
        # no solo time of the decode step was taken: the spec profile's stands in
        step = Launch((), *(int(steps[n].iloc[i]) for n in names[2:]), graph=True)
        decode = launch_loads(cost, [step], int(beside))
        split = int(sms), int(beside)
        factor[i] = surface.factors(prefill.take(np.array([i])), decode, split)[0][0, 0]
    start, end = column(rows, "neighbour_start_s"), column(rows, "neighbour_end_s")
    measured, sms = column(rows, "time_s"), column(rows, "sms")
    predicted = {"surface": staggered_s(prefill.seconds, factor, start, end), "none": prefill.seconds}
    return {
        f"prefill on {size:.0f} SMs": {
            method: errors(values[sms == size], measured[sms == size]) for method, values in predicted.items()
        }
        for size in np.unique(sms)
    }


def staggered_s(alone_s: Floats, factor: Floats, start_s: Floats, end_s: Floats) -> Floats:
    """Time of work of `alone_s` that runs `factor` times as long while start_s <= t < end_s."""
    before = np.minimum(alone_s, start_s)
    # solo seconds that get done while the neighbour runs
    during = np.minimum(alone_s - before, (end_s - start_s) / factor)
    return np.asarray(alone_s + during * (factor - 1.0))

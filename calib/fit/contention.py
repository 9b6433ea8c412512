"""The contention surface from co-runs of a prefill layer and a decode step, and its errors on what it has not seen.

`contention_of(folder)` gives the surface that a profile ships (`sim.cost.measured_contention`),
`contention_errors(folder)` the table of held-out errors beside the baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calib.fit.folds import errors
from calib.fit.points import Floats, Mask, column, numbers, read_rows
from calib.fit.robust import Bound, fit
from sim.cost import load_cost
from sim.cost.gpu import GpuSpec
from sim.cost.loads import Loads, launch_loads
from sim.cost.measured_contention import (
    OVERLAPPING,
    PRIORITIES,
    SIDES,
    Beside,
    MeasuredContention,
    Residual,
    Waiting,
    decode_axes,
    prefill_axes,
    split_axes,
)
from sim.cost.shapes import Launch
from sim.errors import SimctlError

Texts = NDArray[np.str_]
Surface = Callable[["Corun"], tuple[Floats, Floats]]

LEAST = 20  # disjoint co-runs below which nothing is fitted
LEAST_WAITING = 6  # of one regime and priority; with fewer the other priority's terms stand in
# a coefficient or a power that the data don't identify falls back to what leaves its factor out
BESIDE = {
    "k": Bound(0.01, 5.0, 0.3, 0.05),
    "other_tensor": Bound(0.02, 5.0, 0.3, 0.0),
    "other_power": Bound(0.2, 3.0, 0.9, 1.0),
    "own_tensor": Bound(0.02, 8.0, 1.5, 0.0),
    "own_power": Bound(0.02, 3.0, 1.0, 0.0),
    "share_power": Bound(0.02, 3.0, 0.7, 0.0),
}
WAITING = {
    "k": Bound(0.01, 9.0, 0.7, 0.05),
    "other_power": Bound(0.02, 2.5, 0.8, 0.0),
    "own_power": Bound(0.02, 2.5, 0.6, 0.0),
    "tensor_power": Bound(0.02, 1.0, 0.1, 0.0),
    "shared_power": Bound(0.02, 4.0, 1.5, 0.0),
}
# lengths of the residual's Gaussians along the axes of `Residual`; sd of a residual and of one co-run, by regime
LENGTHS = np.array([2.0, 2.0, 4.0, 6.0, 4.0, 6.0])
SPREAD = {"disjoint": (0.06, 0.015), "overlapped": (0.12, 0.06), "streams": (0.12, 0.06)}
FOLDS = 5
MEANING = {
    "random": "a fifth of the co-runs at random, five times over",
    "split": "all co-runs on one split of the SMs, of every mode",
    "mode": "one way of overlapping (half or whole) predicted from the other modes",
}


@dataclass(frozen=True)
class Corun:
    """Co-runs, one array element each. `prefill` and `decode` carry the measured solo seconds on the same SMs;
    `slow`, shape (n, 2): time beside the other over time alone, of prefill and decode."""

    prefill: Loads
    decode: Loads
    prefill_sms: Floats
    decode_sms: Floats
    mode: Texts
    priority: Texts
    slow: Floats

    def __len__(self) -> int:
        return len(self.slow)

    def take(self, kept: Mask) -> Corun:
        """The co-runs of a mask."""
        return Corun(
            self.prefill.take(kept),
            self.decode.take(kept),
            *(x[kept] for x in (self.prefill_sms, self.decode_sms, self.mode, self.priority, self.slow)),
        )

    @property
    def sms(self) -> tuple[Floats, Floats]:
        """SMs of prefill and decode."""
        return self.prefill_sms, self.decode_sms

    @property
    def overlap(self) -> Floats:
        """SMs that both may use."""
        return np.maximum(0.0, self.prefill_sms + self.decode_sms - self.prefill.gpu.sms)

    @property
    def regime(self) -> Texts:
        """Entry of `REGIMES`: half and whole are amounts of overlap."""
        return np.where(np.isin(self.mode, ("half", "whole")), "overlapped", self.mode)


def read_corun(folder: Path, gpu: GpuSpec, sweep: str = "corun") -> Corun:
    """Co-runs of a run's or profile's folder; SimctlError if there are none."""
    rows = read_rows(folder, sweep)
    if not len(rows):
        raise SimctlError(f"{folder}: no co-runs in measurements/{sweep}.csv.gz.")
    both = (("prefill_layer", "decode_step"), ("decode_step", "prefill_layer"))
    first, second = (
        rows[(rows["kind"] == kind) & (rows["neighbour_kind"] == other)].set_index("point")
        for kind, other in both
    )
    points = first.index.intersection(second.index, sort=False)
    if not len(points):
        raise SimctlError(f"{folder}: no prefill layer was measured beside a decode step in '{sweep}'.")
    return _corun(first.loc[points], second.loc[points], gpu)


def _corun(first: pd.DataFrame, second: pd.DataFrame, gpu: GpuSpec) -> Corun:
    alone = [column(side, "alone_s") for side in (first, second)]
    slow = np.stack([column(s, "time_s") / t for s, t in zip((first, second), alone, strict=True)], axis=1)
    # solo times are those measured in the same block; bytes and FLOPs are counted as the cost model does
    loads = row_loads(first, gpu), row_loads(second, gpu)
    return Corun(
        replace(loads[0], seconds=alone[0]),
        replace(loads[1], seconds=alone[1]),
        column(first, "sms"),
        column(second, "sms"),
        first["neighbour_mode"].to_numpy(dtype=str),
        second["priority"].to_numpy(dtype=str),
        slow,
    )


def row_loads(rows: pd.DataFrame, gpu: GpuSpec) -> Loads:
    """Bytes, FLOPs and sizes of measured prefill layers or decode steps, seconds by the spec profile."""
    cost = load_cost(str(rows["model"].iloc[0]), gpu.name, profile="spec")
    launches = []
    for row in rows.to_dict("records"):
        if row["kind"] == "prefill_layer":
            chunks = tuple(zip(numbers(row["q_tokens"]), numbers(row["history_tokens"]), strict=True))
            # layers that have neither embedding nor LM head
            launches.append(Launch(chunks=chunks, layers=(1, 1 + int(row["layers"]))))
        else:
            sizes = (int(row["decode_batch"]), int(row["context_sum"]), int(row["context_max"]))
            launches.append(Launch((), *sizes, graph=True))
    return launch_loads(cost, launches, gpu.sms)


def fit_contention(
    corun: Corun, model: str, kept: Mapping[tuple[str, str], bool] | None = None
) -> MeasuredContention:
    """The surface of co-runs. `kept`: which regimes have residuals, by (regime, priority) (None: all).

    The disjoint sets give the terms of the memory system, the others on top of these the terms of waiting, and
    residuals come last; each on logarithms of slowdowns with a soft-L1 loss.
    """
    apart = corun.take(corun.regime == "disjoint")
    if len(apart) < LEAST:
        raise SimctlError(f"Contention needs {LEAST} co-runs on disjoint SMs; {len(apart)} were measured.")
    surface = MeasuredContention(
        corun.prefill.gpu, model, "measured", coverage_of(corun), _fit_beside(apart), {}, {}
    )
    surface = replace(surface, waiting=_fit_waiting(corun, surface))
    residuals = {}
    for regime, priority in groups(corun):
        part = corun.take((corun.regime == regime) & (corun.priority == priority))
        if kept is None or kept.get((regime, priority), False):
            residuals[regime, priority] = _fit_residual(part, surface, regime, priority)
    return replace(surface, residuals=residuals)


def groups(corun: Corun) -> list[tuple[str, str]]:
    """(regime, priority) of the co-runs, most frequent first."""
    found, counts = np.unique(np.stack([corun.regime, corun.priority]), axis=1, return_counts=True)
    return [(str(found[0, i]), str(found[1, i])) for i in np.argsort(-counts, kind="stable")]


def _fit_beside(corun: Corun) -> dict[str, Beside]:
    found = {}
    for i, side in enumerate(SIDES):
        own, other = _ordered(corun, side)
        share, logs = corun.sms[i] / corun.prefill.gpu.sms, np.log(corun.slow[:, i])

        def error(terms: Mapping[str, float]) -> Floats:
            return np.log1p(Beside(**terms).excess(own, other, share)) - logs  # noqa: B023

        found[side] = Beside(**fit(error, BESIDE).values)
    return found


def _fit_waiting(corun: Corun, surface: MeasuredContention) -> dict[tuple[str, str], dict[str, Waiting]]:
    found: dict[tuple[str, str], dict[str, Waiting]] = {}
    for regime in OVERLAPPING:
        for priority in PRIORITIES:
            part = corun.take((corun.regime == regime) & (corun.priority == priority))
            if len(part) >= LEAST_WAITING:
                found[regime, priority] = {
                    side: _fit_waiting_side(part, surface, regime, side) for side in SIDES
                }
        measured = [priority for priority in PRIORITIES if (regime, priority) in found]
        if not measured:
            raise SimctlError(f"Contention needs {LEAST_WAITING} co-runs of '{regime}' SMs.")
        for priority in PRIORITIES:
            found.setdefault((regime, priority), found[regime, measured[0]])
    return found


def _fit_waiting_side(corun: Corun, surface: MeasuredContention, regime: str, side: str) -> Waiting:
    i = SIDES.index(side)
    own, other = _ordered(corun, side)
    logs = np.log(corun.slow[:, i])
    if regime == "overlapped":
        share = corun.sms[i] / corun.prefill.gpu.sms
        logs = logs - np.log1p(surface.beside[side].excess(own, other, share))
    shared = corun.overlap / corun.sms[i]
    # larger batches starve longer in plain streams; on overlapping sets nothing of it shows
    without = {"tensor_power"} if regime == "overlapped" else {"shared_power"}
    bounds = {name: bound for name, bound in WAITING.items() if name not in without}

    def error(terms: Mapping[str, float]) -> Floats:
        waiting = Waiting(**{**dict.fromkeys(without, 0.0), **terms})
        return np.log1p(waiting.excess(own, other, shared)) - logs

    return Waiting(**{**dict.fromkeys(without, 0.0), **fit(error, bounds).values})


def _fit_residual(corun: Corun, surface: MeasuredContention, regime: str, priority: str) -> Residual:
    """Gaussian process regression of what the base leaves over; two rounds, outliers of the first count less."""
    base = surface.base(corun.prefill, corun.decode, corun.sms, corun.overlap, regime, priority)
    logs = np.log(corun.slow) - np.log(np.stack(base, axis=1))
    sites = np.hstack([split_axes(*corun.sms), prefill_axes(corun.prefill), decode_axes(corun.decode)])
    away = (sites[:, None, :] - sites[None, :, :]) / LENGTHS
    spread, noise = SPREAD[regime]
    kernel = spread**2 * np.exp(-0.5 * np.sum(away**2, axis=2))
    weights = np.zeros((len(sites), 2))
    for i in range(2):
        variance = np.full(len(sites), noise**2)
        for _ in range(2):
            weights[:, i] = np.linalg.solve(kernel + np.diag(variance), logs[:, i])
            left = logs[:, i] - kernel @ weights[:, i]
            variance = noise**2 * np.sqrt(1.0 + (left / (4.0 * noise)) ** 2)
    return Residual(sites, LENGTHS, spread**2 * weights)


def _ordered(corun: Corun, side: str) -> tuple[Loads, Loads]:
    return (corun.prefill, corun.decode) if side == "prefill" else (corun.decode, corun.prefill)


def coverage_of(corun: Corun) -> str:
    """What was measured, as a sentence."""
    p, d = corun.prefill, corun.decode
    ranges = [
        f"{name} {_number(values.min())}-{_number(values.max())}"
        for name, values in (
            ("prefill SMs", corun.prefill_sms),
            ("new tokens", p.q),
            ("history", p.h),
            ("batch", d.batch),
            ("mean context", d.context),
        )
    ]
    return f"{len(corun)} co-runs: {', '.join(ranges)}"


def _number(value: float) -> str:
    return f"{value:.0f}"


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
    corun = read_corun(folder, gpu)
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
    surface's rate in between. Empty if no such sweep was run. None of it was fitted."""
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
    measured = column(rows, "time_s")
    return {
        "surface": errors(staggered_s(prefill.seconds, factor, start, end), measured),
        "none": errors(prefill.seconds, measured),
    }


def staggered_s(alone_s: Floats, factor: Floats, start_s: Floats, end_s: Floats) -> Floats:
    """Time of work of `alone_s` that runs `factor` times as long while start_s <= t < end_s."""
    before = np.minimum(alone_s, start_s)
    # solo seconds that get done while the neighbour runs
    during = np.minimum(alone_s - before, (end_s - start_s) / factor)
    return np.asarray(alone_s + during * (factor - 1.0))

"""How passes with prompts warm the clock up, from runs of passes and decode steps in turn (sweep `warm`).

The model is the engine's (`sim.engine.heat`): a mean of what is drawn, and a heat behind it, with one time constant.
Times of each kind of pass at the top clock are read off the first pass after a rest; slopes, targets and the time
constant are fitted to all passes (soft-L1 loss on logarithms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.folds import errors
from calib.fit.points import Floats, column, read_rows
from calib.fit.robust import Bound, fit
from sim.cost.measured_grid import Axis, Grid
from sim.cost.warming import Warming

SWEEP = "warm"
FULL = 1024  # tokens from which on a pass draws what power allows
LEAST = 50  # rows
LONGEST_S = 0.06  # a pass that takes longer is over the top clock before it ends
COOL = 16.0  # tokens at which a pass is like a decode step
SLOPE, TARGET, TIME = (
    Bound(0.01, 0.5, 0.14, 0.12),
    Bound(0.05, 1.0, 0.8, 0.8),
    Bound(0.005, 0.2, 0.025, 0.03),
)


@dataclass(frozen=True)
class Series:
    """One run: stretches in order, each of `launches` launches of kernel `which` of `seconds` each."""

    which: tuple[int, ...]
    seconds: Floats
    launches: Floats


@dataclass(frozen=True)
class Runs:
    """All runs: tokens of each kernel's linear layers, whether it only decodes, its seconds at the top clock."""

    tokens: tuple[int, ...]
    decodes: tuple[bool, ...]
    cool_s: Floats
    series: tuple[Series, ...]


def read_warm(folder: Path) -> Runs | None:
    """The sweep's runs, None where there are too few rows."""
    rows = read_rows(folder, SWEEP)
    if len(rows):
        long = rows.groupby("point")["time_s"].transform("max") > LONGEST_S
        rows = rows[~long].reset_index(drop=True)
    if len(rows) < LEAST:
        return None
    decodes = np.nan_to_num(column(rows, "decode_batch")).astype(int)
    prompts = np.nan_to_num(column(rows, "q_tokens")).astype(int)
    names = [*zip(prompts.tolist(), decodes.tolist(), strict=True)]
    kernels = sorted(set(names))
    seconds, count = column(rows, "mean_s"), column(rows, "count")
    # the least of its medians stands for the top clock: the first pass after a rest, or decodes among themselves
    cool = [
        min(s for s, name in zip(column(rows, "time_s"), names, strict=True) if name == one)
        for one in kernels
    ]
    series = []
    for point in dict.fromkeys(rows["point"]):
        at = np.flatnonzero((rows["point"] == point).to_numpy())
        series.append(Series(tuple(kernels.index(names[i]) for i in at), seconds[at], count[at]))
    return Runs(
        tuple(q + b for q, b in kernels), tuple(q == 0 for q, _ in kernels), np.array(cool), tuple(series)
    )


def fit_warming(runs: Runs) -> Warming:
    """The terms; `slope` there is relative to the settled price, here to the time at the top clock."""
    sizes = sorted({t for t, d in zip(runs.tokens, runs.decodes, strict=True) if not d})
    bounds = {"decode": SLOPE, "time": TIME, **{f"slope{t}": SLOPE for t in sizes}}
    bounds |= {f"target{t}": TARGET for t in sizes if t < FULL}

    def error(values: Mapping[str, float]) -> Floats:
        return np.concatenate(_errors(runs, values))

    values = fit(error, bounds, reject=False).values
    targets = [values.get(f"target{t}", 1.0) for t in sizes]
    slopes = [
        values[f"slope{t}"] / (1.0 + values[f"slope{t}"] * at) for t, at in zip(sizes, targets, strict=True)
    ]
    axis = (Axis("tokens", (COOL, *map(float, sizes))),)
    return Warming(
        Grid(axis, np.array([values["decode"], *slopes])),
        Grid(axis, np.array([0.0, *targets])),
        values["decode"],
        values["time"],
    )


def _errors(runs: Runs, values: Mapping[str, float]) -> list[Floats]:
    slopes = [
        values["decode"] if d else values[f"slope{t}"] for t, d in zip(runs.tokens, runs.decodes, strict=True)
    ]
    targets = [
        0.0 if d else values.get(f"target{t}", 1.0) for t, d in zip(runs.tokens, runs.decodes, strict=True)
    ]
    return [
        np.log(_times(one, runs.cool_s, slopes, targets, values["time"]) / one.seconds) for one in runs.series
    ]


def _times(
    one: Series, cool_s: Floats, slopes: Sequence[float], targets: Sequence[float], time_s: float
) -> Floats:
    """Seconds of each stretch's launches by the engine's rule, over the times that were measured."""
    found = np.zeros(len(one.seconds))
    heat = draw = 0.0
    for i, kernel in enumerate(one.which):
        target, x = targets[kernel], one.seconds[i] * one.launches[i] / time_s
        w = x * (0.5 + x / 6.0)
        decay = 1.0 / (1.0 + x * (1.0 + w))
        own, drawn = heat - target, draw - target
        mean = target + (own + (own + drawn) * w) * decay
        found[i] = cool_s[kernel] * (1.0 + slopes[kernel] * mean)
        heat, draw = target + (own + drawn * x) * decay, target + drawn * decay
    return found


def warming_errors(runs: Runs, found: Warming) -> dict[str, Any]:
    """Errors on the passes with prompts that it was fitted to, beside those of one settled time each."""
    settled = []
    for tokens, decodes, cool in zip(runs.tokens, runs.decodes, runs.cool_s, strict=True):
        share = 0.0 if decodes else float(found.slope.at((tokens,)) * found.target.at((tokens,)))
        settled.append(cool / (1.0 - share))
    slopes, targets = [], []
    for tokens, decodes in zip(runs.tokens, runs.decodes, strict=True):
        slope, target = float(found.slope.at((tokens,))), float(found.target.at((tokens,)))
        slopes.append(found.decode_slope if decodes else slope / (1.0 - slope * target))
        targets.append(0.0 if decodes else target)
    ours, plain, truth = [], [], []
    for one in runs.series:
        prompts = np.array([not runs.decodes[k] for k in one.which])
        ours.append(_times(one, runs.cool_s, slopes, targets, found.time_s)[prompts])
        plain.append(np.array([settled[k] for k in one.which])[prompts])
        truth.append(one.seconds[prompts])
    measured = np.concatenate(truth)
    return {
        "points": len(measured),
        "errors": {
            "composed": errors(np.concatenate(ours), measured),
            "at the settled clock": errors(np.concatenate(plain), measured),
        },
    }

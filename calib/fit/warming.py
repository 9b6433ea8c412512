"""How long passes with prompts run at the top clock, from runs of passes and decode steps in turn (sweep `warm`).

The model is the engine's (`sim.engine.heat`). Times at the top clock and settled ones are read off the runs; how long
there is room, what each size draws of it and what decodes win back are fitted to all times (soft-L1 loss on
logarithms). What idle time wins back comes from a layer with pauses of the host, light decodes' from their watts (sweep
`power_duty`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.folds import errors
from calib.fit.points import Floats, column, read_rows
from calib.fit.robust import Bound, fit
from sim.cost.clock import decode_factor, pass_factor, spent_after
from sim.cost.measured_grid import Axis, Grid
from sim.cost.warming import Warming

SWEEP, DUTY = "warm", "power_duty"
LEAST = 50  # rows
LONGEST_S = 0.06  # a pass that takes longer is over the top clock before it ends
SETTLED_S = 0.12  # into a phase the clock has settled
LEAST_PAUSE_S = 1e-4
COOL = 16.0  # tokens at which a pass draws no more than decodes do
ROOM, DRAW, REST, LOSS = (
    Bound(0.01, 0.3, 0.06, 0.06),
    Bound(0.05, 2.0, 0.9, 1.0),
    Bound(0.02, 4.0, 0.4, 0.4),
    Bound(0.003, 0.3, 0.05, 0.05),
)


@dataclass(frozen=True)
class Series:
    """One run: stretches in order, each of `launches` launches of kernel `which` of `seconds` each."""

    which: tuple[int, ...]
    seconds: Floats
    launches: Floats


@dataclass(frozen=True)
class Runs:
    """All runs: rows of each kernel's linear layers, whether it only decodes, its seconds at the top clock and at the
    settled one (of decode steps the same)."""

    tokens: tuple[int, ...]
    decodes: tuple[bool, ...]
    cool_s: Floats
    settled_s: Floats
    series: tuple[Series, ...]
    batch: tuple[int, ...] = ()  # decodes among the rows


@dataclass(frozen=True)
class Terms:
    """Prices of one kernel as the engine's functions read them."""

    heat_room_s: float
    heat_idle: float
    heat_decode: float


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
    times, late = column(rows, "time_s"), column(rows, "elapsed_s") >= SETTLED_S
    mine = {one: np.array([name == one for name in names]) for one in kernels}
    cool = np.array([times[mine[one]].min() for one in kernels])
    hot = [float(np.median(times[mine[one] & late])) if one[0] else times[mine[one]].min() for one in kernels]
    series = []
    for point in dict.fromkeys(rows["point"]):
        at = np.flatnonzero((rows["point"] == point).to_numpy())
        which = tuple(kernels.index(names[i]) for i in at)
        series.append(Series(which, column(rows, "mean_s")[at], column(rows, "count")[at]))
    of_tokens, only = tuple(q + b for q, b in kernels), tuple(q == 0 for q, _ in kernels)
    batch = tuple(b for _, b in kernels)
    return Runs(of_tokens, only, cool, np.maximum(np.array(hot), cool), tuple(series), batch)


def fit_warming(runs: Runs, folder: Path | None = None) -> Warming:
    """The terms; idle time and light decodes from `folder`'s `power_duty`, where there is one."""
    sizes = sorted({t for t, d in zip(runs.tokens, runs.decodes, strict=True) if not d})
    batches = sorted({t for t, d in zip(runs.tokens, runs.decodes, strict=True) if d})
    bounds = {"room": ROOM, "loss": LOSS, **{f"rest{b}": REST for b in batches}}
    bounds |= {f"draw{t}": DRAW for t in sizes[:-1]}
    unit = {f"draw{sizes[-1]}": 1.0}  # the room is counted in passes of the largest size

    def error(values: Mapping[str, float]) -> Floats:
        return np.concatenate(
            [np.log(_times(runs, one, {**values, **unit}) / one.seconds) for one in runs.series]
        )

    values = {**fit(error, bounds, reject=False).values, **unit}
    gains = [float(np.mean(_gains(runs)[[t == size for t in runs.tokens]])) for size in sizes]
    idle, light = _paced(folder)
    rest = {b: values[f"rest{b}"] for b in batches} | light
    return Warming(
        _grid((COOL, *map(float, sizes)), (0.0, *gains)),
        _grid((COOL, *map(float, sizes)), (0.0, *(values[f"draw{t}"] for t in sizes))),
        _grid(tuple(sorted(map(float, rest))), tuple(rest[b] for b in sorted(rest))),
        values["room"],
        idle,
        values["loss"],
    )


def _grid(knots: tuple[float, ...], values: tuple[float, ...]) -> Grid:
    return Grid((Axis("tokens", knots),), np.array(values))


def _gains(runs: Runs) -> Floats:
    return np.asarray(1.0 - runs.cool_s / runs.settled_s)


def _paced(folder: Path | None) -> tuple[float, dict[int, float]]:
    """(what an idle GPU wins back a second, the same of decode steps by batch): a layer that runs at the top clock for
    part of its time with pauses of some length needs the pauses for it; watts below the cap win back in proportion."""
    rows = read_rows(folder, DUTY) if folder is not None else []
    if not len(rows):
        return 0.0, {}
    layers, steps = (rows[rows["kind"] == kind] for kind in ("prefill_layer", "decode_step"))
    layers = layers.sort_values("gap_s")
    seconds, gap = column(layers, "time_s"), column(layers, "gap_s")
    short = np.flatnonzero(gap > LEAST_PAUSE_S)
    if not len(short):
        return 0.0, {}
    share = gap[short[0]] / (gap[short[0]] + seconds[short[0]])
    slow = (seconds[short[0]] - seconds.min()) / max(seconds[0] - seconds.min(), 1e-9)
    idle = float((1.0 - slow) * (1.0 - share) / share)
    cap_w, idle_w = float(column(layers, "power_w").max()), float(column(rows, "power_w").min())
    busy = steps[column(steps, "gap_s") < LEAST_PAUSE_S]
    watts = zip(column(busy, "decode_batch"), column(busy, "layers"), column(busy, "power_w"), strict=True)
    whole = max(column(busy, "layers"), default=0.0)
    return idle, {int(b): idle * (cap_w - w) / (cap_w - idle_w) for b, n, w in watts if n == whole}


def _times(runs: Runs, one: Series, values: Mapping[str, float]) -> Floats:
    """Seconds of each stretch's launches by the engine's rule, over the times that were measured."""
    p, gains = Terms(values["room"], 0.0, values["loss"]), _gains(runs)
    found, spent_s = np.zeros(len(one.seconds)), 0.0
    for i, k in enumerate(one.which):
        if runs.decodes[k]:
            found[i] = runs.cool_s[k] * decode_factor(p, spent_s)
            rate = -values[f"rest{runs.tokens[k]}"]
        else:
            rate = values[f"draw{runs.tokens[k]}"]
            found[i] = runs.settled_s[k] * pass_factor(p, spent_s, rate, gains[k], runs.settled_s[k])
        spent_s = spent_after(p, spent_s, rate, one.seconds[i] * one.launches[i], 0.0)
    return found


def warming_errors(runs: Runs, found: Warming) -> dict[str, Any]:
    """Errors on the passes with prompts that it was fitted to, beside those of one settled time each."""
    values = {"room": found.room_s, "loss": found.decode_loss}
    for tokens, decodes in zip(runs.tokens, runs.decodes, strict=True):
        name, grid = ("rest", found.rest) if decodes else ("draw", found.draw)
        values[f"{name}{tokens}"] = float(grid.at((tokens,)))
    ours, plain, truth = [], [], []
    for one in runs.series:
        prompts = np.array([not runs.decodes[k] for k in one.which])
        ours.append(_times(runs, one, values)[prompts])
        plain.append(np.array([runs.settled_s[k] for k in one.which])[prompts])
        truth.append(one.seconds[prompts])
    measured = np.concatenate(truth)
    return {
        "points": len(measured),
        "errors": {
            "composed": errors(np.concatenate(ours), measured),
            "at the settled clock": errors(np.concatenate(plain), measured),
        },
    }

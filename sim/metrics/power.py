"""Watts over time, out of the readings that the engine took of its work counters.

On a grid of GRID_S of simulated time a GPU asks for what its work, its kernels and its idle parts draw. The board
keeps a mean of that over `react_s` at its limit: while the mean is above, the clock is held down and the draw with it.
So a burst of prefill draws more than the limit for some tens of milliseconds, and decodes behind it draw less than they
would. What the clock costs in time is the price tables' affair: prices under load hold it already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.energy import EnergyTerms
from sim.cost.model import ModelSpec
from sim.cost.work import expert_weights, joules_per
from sim.engine.records import METER_FIELDS

Floats = NDArray[np.float64]

GRID_S = 0.01
SHOWN_S = 0.1  # peaks and percentiles are of means over so long, as NVML reports them
LEAST_RUNNING = 1e-6
BLOCK = 64  # steps of the running mean that are done at once
PIECE = 64_000  # steps whose watts are held at once; whole blocks, and whole means of SHOWN_S


@dataclass(frozen=True)
class Power:
    """Of GPUs alike over a window: joules of all of them, watts as means over SHOWN_S, shape (GPUs, means), and in how
    many of how many steps of the grid the limit held them."""

    energy_j: float
    shown: Floats
    held_steps: int
    steps: int


def means(watts: Floats) -> Floats:
    """Means over SHOWN_S of watts on the grid, whole ones; of fewer steps than one takes the mean of all."""
    wide = round(SHOWN_S / GRID_S)
    steps = watts.shape[1]
    if steps < wide:
        return np.asarray(watts.mean(axis=1, keepdims=True))
    whole = watts[:, : steps // wide * wide]
    return np.asarray(whole.reshape(len(whole), -1, wide).mean(axis=2))


def power_of(cost: Any, readings: Sequence[Floats], window_s: tuple[float, float]) -> Power | None:
    """Watts of replicas of one GPU each over a window; of a replica of several GPUs, those of one of them.

    None for prices without terms of energy, and for a window shorter than a step of the grid.
    """
    model, terms = getattr(cost, "model", None), getattr(cost, "energy", None)
    if not isinstance(model, ModelSpec) or not isinstance(terms, EnergyTerms):
        return None
    first, last = round(window_s[0] / GRID_S), int(np.ceil(window_s[1] / GRID_S - 1e-9))
    if last <= first or window_s[1] <= window_s[0] or not readings:
        return None
    shown: list[Floats] = []
    energy, held_steps, steps = 0.0, 0, 0
    for watts, held in watts_of(model, terms, readings, first, last, window_s[1]):
        held_steps += int(held.sum())
        # the last steps of a long run are fewer than a mean takes
        if not shown or watts.shape[1] >= round(SHOWN_S / GRID_S):
            shown.append(means(watts))
        steps += watts.shape[1]
        if steps == last - first:
            edge = (last - 1) * GRID_S
            watts[:, -1] *= (max(edge, window_s[1]) - edge) / GRID_S  # only a part of it is in the window
        energy += float(watts.sum() * GRID_S)
    return Power(energy, np.concatenate(shown, axis=1), held_steps, steps * len(readings))


def watts_of(
    model: ModelSpec, terms: EnergyTerms, readings: Sequence[Floats], first: int, last: int, end_s: float
) -> Iterator[tuple[Floats, NDArray[np.bool_]]]:
    """Watts and whether the limit held them, shape (GPUs, steps), of the steps first..last of the grid, of which the
    last ends at `end_s`. In pieces of PIECE steps: a run may last for days."""
    joules = [_joules(model, terms, read) for read in readings]
    mean: float | Floats = terms.idle_w
    for begin, stop in _pieces(first, last):
        edges: Floats = np.arange(begin, stop + 1, dtype=np.float64) * GRID_S
        if stop == last:
            edges[-1] = max(edges[-2], end_s)
        asked = np.stack([_asked(terms, *one, edges) for one in zip(readings, joules, strict=True)])
        means_w = running_mean(asked, mean, GRID_S / terms.react_s)
        mean = means_w[:, -1]
        if begin < first:
            continue
        held = means_w > terms.cap_w
        # what is above idle is held down
        share = (terms.cap_w - terms.idle_w) / np.maximum(means_w - terms.idle_w, 1e-9)
        yield np.where(held, terms.idle_w + (asked - terms.idle_w) * share, asked), held


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Steps before the window, for their running mean, and those of the window."""
    for start, end in ((0, first), (first, last)):
        for begin in range(start, end, PIECE):
            yield begin, min(begin + PIECE, end)


def _asked(terms: EnergyTerms, read: Floats, joules_read: Floats, edges: Floats) -> Floats:
    """Watts in each step of the grid if no limit held them."""
    time, on = read[:, 0], read[:, 1]
    joules = np.interp(edges, time, joules_read) if len(read) else np.zeros(len(edges))
    busy = np.interp(edges, time, on) if len(read) else np.zeros(len(edges))
    seconds = np.maximum(np.diff(edges), 1e-9)
    # two lanes at once count their seconds twice
    running = np.minimum(np.diff(busy) / seconds, 1.0)
    work = np.maximum(np.diff(joules), 0.0) / seconds
    while_running = terms.running_w(work / np.maximum(running, LEAST_RUNNING))
    return np.asarray(
        np.where(running > LEAST_RUNNING, running * while_running, work) + (1.0 - running) * terms.idle_w
    )


def _joules(model: ModelSpec, terms: EnergyTerms, read: Floats) -> Floats:
    """Joules of work up to each reading, at the top clock."""
    sums = dict(zip(METER_FIELDS, read.T, strict=True))
    sums |= {"launches_graph": sums["launches"], "launches_eager": 0.0 * sums["launches"]}
    joules = joules_per(model, terms).of(sums)
    if model.experts and len(read) and read[-1, 2] > 0:
        # experts that a pass of the mean size reads
        joules = joules + sums["launches"] * terms.work_j(
            "moe", 0.0, expert_weights(model, read[-1, 3] / read[-1, 2])
        )
    return np.asarray(joules)


def running_mean(values: Floats, start: float | Floats, step: float) -> Floats:
    """Exponential mean along the last axis: each step moves it by 1 - exp(-step) of the way to the step's value."""
    keep = np.exp(-step)
    powers = keep ** np.arange(1, BLOCK + 1)
    # lower triangle: weight of value j in the mean after value i
    at = np.arange(BLOCK)
    weights = np.where(
        at[:, None] >= at[None, :], (1.0 - keep) * keep ** np.abs(at[:, None] - at[None, :]), 0.0
    )
    made = np.empty_like(values)
    held = np.full(values.shape[:-1], start)
    for first in range(0, values.shape[-1], BLOCK):
        part = values[..., first : first + BLOCK]
        n = part.shape[-1]
        # not by BLAS, whose order of additions is its own
        mean = np.einsum("...j,ij->...i", part, weights[:n, :n]) + held[..., None] * powers[:n]
        made[..., first : first + n] = mean
        held = mean[..., -1]
    return made


def power_figures(parts: Sequence[Power | None]) -> dict[str, Any]:
    """`peak_power_w` and `p99_power_w` of one GPU (means over SHOWN_S), `power_cap_pct`: per cent of GPU time at the
    limit; None where nothing is known."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return {"peak_power_w": None, "p99_power_w": None, "power_cap_pct": None}
    shown = np.concatenate([part.shown.ravel() for part in known])
    held, steps = sum(part.held_steps for part in known), sum(part.steps for part in known)
    return {
        "peak_power_w": float(shown.max()),
        "p99_power_w": float(np.percentile(shown, 99)),
        "power_cap_pct": 100.0 * (held / steps),
    }

"""What the measured model's own layers and steps leave over, batch by batch and set by set, and how passes warm up.

Operators and general terms of whole steps serve every model. A library's choice of kernels by the batch, on a set of
SMs that it does not know of, is a staircase of one model's shapes: tables on top hold it for that model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calib.fit.composition import LAYER_TOKENS, composed, layers_of, usable
from calib.fit.folds import errors
from calib.fit.points import Floats, Mask
from calib.fit.steps import Steps, both
from calib.fit.surface import Smoothness, fit_grid
from sim.cost.launching import grid_tokens
from sim.cost.measured_grid import Axis, Grid
from sim.cost.measured_steps import Composition
from sim.cost.warming import Warming

FOLDS = 5
NEAR = 1.35  # sizes within that factor may be compared by their work a second
STAIRS = Smoothness(walk=0.6, pull=0.15, noise=0.01, walks={"sms": 0.15})
BATCHES = Smoothness(walk=60.0, pull=200.0, noise=1.0, walks={"sms": 60.0})


def joined(
    parts: Sequence[tuple[Steps, Floats]], warming: Warming | None, whole_sms: int
) -> tuple[Steps, Floats]:
    """Usable steps of the general sweeps and of those of own sizes, and their shares.

    Single layers on the whole GPU run at the top clock: those of own sizes, timed one like another with rests between,
    count as at the settled one where the clock's heat is known.
    """
    (first, of_first), (second, of_second) = parts
    kept, cold = usable(first, whole_sms), ~usable(second, whole_sms)
    if warming is None:
        return both(first.take(kept), second.take(~cold)), np.concatenate([of_first[kept], of_second[~cold]])
    second = replace(second, seconds=second.seconds * np.where(cold, _slower(second, cold, warming), 1.0))
    return both(first.take(kept), second), np.concatenate([of_first[kept], of_second])


def _slower(steps: Steps, cold: Mask, warming: Warming) -> Floats:
    """Seconds at the settled clock over those at the top clock: the power cap bounds the work a second, so sizes whose
    kernels do less of it than the best ones around them at the top clock lose less, or nothing."""
    tokens, each = steps.tokens, np.where(cold, steps.seconds / steps.tokens, np.inf)
    near = np.abs(np.log(tokens[:, None] / tokens[None, :])) <= np.log(NEAR)
    best = np.min(np.where(near, each[None, :], np.inf), axis=1)
    ratio = np.divide(best, each, out=np.zeros(len(each)), where=cold)
    return np.asarray(np.maximum(1.0, ratio * warming.settled(tokens)))


def own_gain(steps: Steps, warming: Warming, whole_sms: int) -> Grid | None:
    """Share of a pass's price less at the top clock, at every padded size; None without layers of own sizes."""
    cold = ~usable(steps, whole_sms)
    if not cold.any():
        return None
    slower = _slower(steps, cold, warming)
    found = {float(t): float(s) for t, s in zip(steps.tokens[cold], slower[cold], strict=True)}
    knots = tuple(sorted(found))
    return Grid((Axis("tokens", knots),), np.array([1.0 - 1.0 / found[t] for t in knots]))


def fit_own(steps: Steps, shares: Floats, terms: Composition, model: str, layers: int) -> Composition:
    """`terms` with the tables of the measured model, from usable steps at settled clocks; see `scaled_share`."""
    base = composed(steps, shares, terms, layers)
    count = np.array([float(layers_of(one, layers)) for one in steps.launch])
    decoding = steps.decoding
    # what is left over is the linear layers': their share of a pass, by the same operators as in the general factor
    linear = np.maximum(0.05, steps.linear_s / np.maximum(steps.summed_s, 1e-12))
    off = (steps.seconds / base - 1.0) / linear
    stairs = _table(steps.take(~decoding), np.log1p(off)[~decoding], STAIRS, linear[~decoding] ** 4)
    left_us = 1e6 * (steps.seconds - base) / count
    noise = np.maximum(1.0, 0.005 * 1e6 * steps.seconds / count)
    batches = _table(steps.take(decoding), left_us[decoding], BATCHES, noise[decoding] ** -2.0)
    return replace(terms, model=model, stairs=stairs, batches_us=batches)


def _table(steps: Steps, values: Floats, smooth: Smoothness, weights: Floats) -> Grid:
    tokens = steps.tokens
    sizes = {float(t) for t in grid_tokens(tokens) if t <= tokens.max()}
    knots = sorted({*sizes, *(float(t) for t in LAYER_TOKENS if tokens.min() <= t <= tokens.max())})
    axes = (Axis("tokens", tuple(knots)), Axis("sms", tuple(sorted({float(s) for s in steps.sms}))))
    return fit_grid(axes, (tokens, steps.sms), values, smooth, weights=weights)


def predicted(steps: Steps, shares: Floats, terms: Composition, layers: int) -> Floats:
    """Seconds of each step by all terms, as the cost model has them for the measured model."""
    base = composed(steps, shares, terms, layers)
    if terms.stairs is None or terms.batches_us is None:
        return base
    count = np.array([float(layers_of(one, layers)) for one in steps.launch])
    factor = np.exp(terms.stairs.at((steps.tokens, steps.sms))) - 1.0
    linear = steps.linear_s / np.maximum(steps.summed_s, 1e-12)
    beyond = 1e-6 * count * terms.batches_us.at((steps.tokens, steps.sms))
    return np.where(steps.decoding, base + beyond, base * (1.0 + linear * factor))


def own_errors(
    steps: Steps, shares: Floats, terms: Composition, model: str, layers: int
) -> Mapping[str, dict[str, Any]]:
    """Held-out errors (random fifths) with the tables and by the general terms, by kind of step."""
    found = np.zeros(len(steps))
    order = np.random.default_rng(19).permutation(len(steps))
    for i in range(FOLDS):
        out = np.isin(np.arange(len(steps)), order[i::FOLDS])
        mine = fit_own(steps.take(~out), shares[~out], terms, model, layers)
        found[out] = predicted(steps.take(out), shares[out], mine, layers)
    base = composed(steps, shares, terms, layers)
    record = {}
    for kind in sorted(set(steps.kind)):
        of_kind = np.array([one == kind for one in steps.kind], dtype=bool)
        record[f"{kind}, sizes of its own"] = {
            "points": int(of_kind.sum()),
            "errors": {
                "composed": errors(found[of_kind], steps.seconds[of_kind]),
                "general terms": errors(base[of_kind], steps.seconds[of_kind]),
            },
        }
    return record

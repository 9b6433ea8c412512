"""Composition terms: whole layers and steps against the sum of their operators, and what the terms leave over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calib.fit.folds import errors
from calib.fit.points import Floats, Mask
from calib.fit.steps import Steps
from calib.fit.surface import Smoothness, fit_grid
from sim.cost.measured_grid import Axis, Grid
from sim.cost.measured_steps import Composition
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Launch

LABEL = "measured"
# the whole GPU runs hot and a partition does not, so neighbours along SMs share little
FACTOR = Smoothness(walk=0.03, pull=0.3, noise=0.015, walks={"sms": 0.15})
GAP = Smoothness(walk=2.0, pull=20.0, noise=1.0, walks={"sms": 6.0})
SCALED = ("embedding", "norm", "gemm", "rope", "kv_write", "activation", "prefill_attention")
LAYER_TOKENS = (1, 4, 16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def usable(steps: Steps, whole_sms: int) -> Mask:
    """Steps that the terms are fitted to: as graphs; on the whole GPU sustained steps rather than single layers,
    whose short windows end before the clock has fallen."""
    bare = np.array([kind.endswith("_layer") for kind in steps.kind], dtype=bool)
    graph = np.array([mode == "graph" for mode in steps.mode], dtype=bool)
    return graph & ~(bare & (steps.sms == whole_sms))


def scaled_share(cost: ProfiledCost, launch: Launch, sms: int) -> float:
    """Share of a launch's summed time that the factor applies to."""
    parts = cost.solo(launch, sms).by_operator
    total = sum(part.seconds for part in parts)
    return sum(part.seconds for part in parts if part.name.split("/")[0] in SCALED) / total


def layers_of(launch: Launch, layers: int) -> int:
    """Layers of a launch."""
    return layers if launch.layers is None else launch.layers[1] - launch.layers[0]


def fit_composition(steps: Steps, shares: Floats, model_layers: int, whole_sms: int) -> Composition:
    """Both tables from usable steps; `shares`: what `scaled_share` says of each."""
    kept = usable(steps, whole_sms)
    decoding = steps.decoding
    chunked = steps.take(kept & ~decoding)
    share = shares[kept & ~decoding]
    ratio = (chunked.seconds / chunked.summed_s - (1.0 - share)) / share
    factor = _table(chunked, np.log(np.maximum(ratio, 0.2)), FACTOR, share**2)
    alone = steps.take(kept & decoding)
    layers = np.array([float(layers_of(one, model_layers)) for one in alone.launch])
    gap = 1e6 * (alone.seconds - alone.summed_s) / layers
    # an error of half a per cent of a layer's time, but never below a microsecond
    noise = np.maximum(1.0, 0.005 * 1e6 * alone.seconds / layers)
    gaps = _table(alone, gap, GAP, noise**-2.0)
    return Composition(factor, gaps, LABEL, 0.0)


def _table(steps: Steps, values: Floats, smooth: Smoothness, weights: Floats) -> Grid:
    tokens = steps.tokens
    inside = [t for t in LAYER_TOKENS if tokens.min() <= t <= tokens.max()] if len(steps) else []
    knots = sorted(
        {*map(float, inside), *((float(tokens.min()), float(tokens.max())) if len(steps) else (1.0,))}
    )
    sms = sorted({float(s) for s in steps.sms}) or [1.0]
    axes = (Axis("tokens", tuple(knots)), Axis("sms", tuple(sms)))
    return fit_grid(axes, (tokens, steps.sms), values, smooth, weights=weights)


def composed(steps: Steps, shares: Floats, terms: Composition, model_layers: int) -> Floats:
    """Seconds that the composition terms predict for each step, as the cost model does."""
    layers = np.array([float(layers_of(one, model_layers)) for one in steps.launch])
    tokens = steps.tokens
    factor = np.exp(terms.chunked.at((tokens, steps.sms)))
    gap = 1e-6 * terms.gap_us.at((tokens, steps.sms))
    chunked = steps.summed_s * (1.0 - shares + shares * factor)
    return np.where(steps.decoding, steps.summed_s + layers * gap, chunked)


def fit_and_score(
    steps: Steps, shares: Floats, model_layers: int, whole_sms: int
) -> tuple[Composition, dict[str, Any]]:
    """The terms, and errors of steps left out (random fifths) with them and by the plain sum, by kind of step."""
    kept = usable(steps, whole_sms)
    mine, share = steps.take(kept), shares[kept]
    predicted = np.zeros(len(mine))
    order = np.random.default_rng(17).permutation(len(mine))
    for i in range(5):
        out = np.zeros(len(mine), dtype=bool)
        out[order[i::5]] = True
        terms = fit_composition(mine.take(~out), share[~out], model_layers, whole_sms)
        predicted[out] = composed(mine.take(out), share[out], terms, model_layers)
    record: dict[str, Any] = {}
    for kind in sorted(set(mine.kind)):
        of_kind = np.array([one == kind for one in mine.kind], dtype=bool)
        entry: Mapping[str, Any] = {
            "points": int(of_kind.sum()),
            "errors": {
                "composed": errors(predicted[of_kind], mine.seconds[of_kind]),
                "sum of operators": errors(mine.summed_s[of_kind], mine.seconds[of_kind]),
            },
        }
        record[kind] = dict(entry)
    logs = np.log(predicted / mine.seconds)
    sigma = float(1.4826 * np.median(np.abs(logs)))
    whole = fit_composition(mine, share, model_layers, whole_sms)
    return Composition(whole.chunked, whole.gap_us, LABEL, sigma), record

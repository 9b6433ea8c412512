"""Terms of fused kernels out of measured shapes: a few shapes are fitted, all others say how well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from calib.fit.folds import errors
from calib.fit.points import Floats, Mask, read_rows
from calib.models import model_shape
from sim.cost.fused_ctas import NAMES, FusedShape, FusedTerms, Heads, planned_s, plans
from sim.cost.fused_table import SHAPE, cells
from sim.cost.gpu import GpuSpec
from sim.cost.measured_fused import CtaCurve

VARIANTS = ("pod", "batch_pod")
SEED = 43
FITTED = 60  # shapes of the grid that are fitted, and as many of the scattered ones
LEAST_OTHERS = 15  # shapes of a head dimension of its own
SCALE = 0.03  # log error from which a shape counts less
MOST_TURNS = 8
# where a search starts: FA2's rates on a Hopper GPU as its operators alone have them, starts and merges of microseconds
START = FusedTerms(
    flops=375e12,
    alone=0.8,
    beside=0.57,
    decode_beside=0.77,
    stream=47e9,
    bandwidth=4.65e12,
    bandwidth_p=2.6,
    prefill_s=1.5e-6,
    decode_s=1.3e-6,
    launch_s=12e-6,
    merge_s=2e-6,
    merge_row_s=1e-9,
    merge_part_s=1e-10,
)


def heads_of(model: str) -> Heads:
    """Query heads, KV heads and head dimension of a model that is calibrated."""
    shape = model_shape(model)
    return shape.heads, shape.kv_heads, shape.head_dim


def shapes_in(rows: pd.DataFrame, variant: str) -> tuple[list[FusedShape], Floats]:
    """(shapes of a table of `calib.fit.fused.shapes_of`, seconds of the variant), those that were measured."""
    if variant not in rows:
        return [], np.zeros(0)
    part = rows[rows[variant].notna()]
    found = [
        FusedShape(int(q), int(h), contexts)
        for q, h, contexts in zip(part["q"], part["h"], part["contexts"], strict=True)
    ]
    return found, part[variant].to_numpy(float)


def fit_terms(
    variant: str, shapes: Sequence[FusedShape], seconds: Floats, heads: Heads, sms: int, start: FusedTerms
) -> FusedTerms:
    """Terms with the least log error, outliers counting less; each is within a factor of ten of its start."""
    sides, logs = plans(variant, shapes, heads, sms), np.log(seconds)
    first = np.log([getattr(start, name) for name in NAMES])

    def off(x: Floats) -> Floats:
        return np.asarray(np.log(planned_s(_terms(x), sides, heads[2], sms)) - logs)

    bounds = (first - np.log(10.0), first + np.log(10.0))
    found = least_squares(
        off, first, bounds=bounds, loss="soft_l1", f_scale=SCALE, diff_step=1e-2, max_nfev=MOST_TURNS
    )
    return _terms(found.x)


def _terms(x: Floats) -> FusedTerms:
    values = dict(zip(NAMES, np.exp(x), strict=True))
    return FusedTerms(**{name: float(f"{value:.4g}") for name, value in values.items()})


def log_errors(
    variant: str,
    terms: FusedTerms,
    shapes: Sequence[FusedShape],
    seconds: Floats,
    heads: Heads,
    sms: int,
) -> Floats:
    """Logarithm of predicted over measured seconds."""
    return np.asarray(np.log(planned_s(terms, plans(variant, shapes, heads, sms), heads[2], sms) / seconds))


def chosen(sources: Sequence[int], seed: int = SEED) -> Mask:
    """Which shapes are fitted: `FITTED` of each source (all of them where there are fewer)."""
    rng, kind = np.random.default_rng(seed), np.array(sources)
    picked = np.zeros(len(kind), dtype=bool)
    for source in np.unique(kind):
        at = rng.permutation(np.flatnonzero(kind == source))
        picked[at[:FITTED]] = True
    return picked


def fit_main(
    folder: Path, variant: str, model: str, gpu: GpuSpec, start: FusedTerms = START
) -> tuple[CtaCurve, dict[str, Any]] | None:
    """The curve of the profile's own heads; None with too few shapes."""
    shapes, seconds, sources = main_shapes(folder, variant, model)
    if len(shapes) < FITTED:
        return None
    heads, picked = heads_of(model), chosen(sources)
    part = [one for one, used in zip(shapes, picked, strict=True) if used]
    terms = fit_terms(variant, part, seconds[picked], heads, gpu.sms, start)
    return judged(folder, variant, model, gpu, terms)


def judged(
    folder: Path, variant: str, model: str, gpu: GpuSpec, terms: FusedTerms
) -> tuple[CtaCurve, dict[str, Any]]:
    """The curve of given terms with its errors on shapes that were not fitted."""
    shapes, seconds, sources = main_shapes(folder, variant, model)
    left = log_errors(variant, terms, shapes, seconds, heads_of(model), gpu.sms)
    out, kind = ~chosen(sources), np.array(sources)
    record = {"fitted": int((~out).sum()), "random": errors(np.exp(left[out]), np.ones(out.sum()))}
    for source, name in enumerate(("grid", "between")):
        if (part := out & (kind == source)).any():
            record[name] = errors(np.exp(left[part]), np.ones(part.sum()))
    return CtaCurve(terms, float(left[out].std()), len(shapes)), record


def main_shapes(folder: Path, variant: str, model: str) -> tuple[list[FusedShape], Floats, list[int]]:
    """(shapes, seconds, source of each: 0 the grid, 1 between its sizes) of the profile's own heads."""
    from calib.fit.fused import gridded, shapes_of

    found: list[FusedShape] = []
    seconds, sources = [], []
    for source, sweep in enumerate(("fused", "fused_scatter")):
        rows = shapes_of(read_rows(folder, sweep), model=model)
        shapes, took = shapes_in(gridded(rows) if source == 0 else rows, variant)
        found += shapes
        seconds.append(took)
        sources += [source] * len(shapes)
    return found, np.concatenate(seconds), sources


def other_heads(folder: Path, variant: str) -> dict[tuple[str, str], tuple[list[FusedShape], Floats]]:
    """Shapes and seconds by (model, type) of the sweep of other heads."""
    from calib.fit.fused import shapes_of

    rows, found = read_rows(folder, "fused_heads"), {}
    if not len(rows):
        return {}
    types = rows["dtype"].fillna("") if "dtype" in rows else pd.Series("", index=rows.index)
    for model, dtype in sorted(set(zip(rows["model"], types, strict=True))):
        held = shapes_in(shapes_of(rows, dtype, model), variant)
        if held[0]:
            found[model, dtype] = held
    return found


def judge_others(
    folder: Path, variant: str, curves: Mapping[int, CtaCurve], own_dim: int, gpu: GpuSpec
) -> dict[str, dict[str, Any]]:
    """Errors on other heads and types of the terms of their head dimension, on shapes that were not fitted."""
    record = {}
    for (model, dtype), (shapes, seconds) in other_heads(folder, variant).items():
        heads = heads_of(model)
        if heads[2] in curves:
            left = log_errors(variant, curves[heads[2]].terms, shapes, seconds, heads, gpu.sms)
            if heads[2] != own_dim:
                left = left[unfitted(len(left))]
            record[f"{model} {dtype}".strip()] = errors(np.exp(left), np.ones(len(left)))
    return record


def unfitted(count: int) -> Mask:
    """Which shapes of a head dimension of its own are left out: every other one."""
    return np.arange(count) % 2 == 1


def fit_dims(folder: Path, variant: str, own: CtaCurve, dim: int, gpu: GpuSpec) -> dict[int, CtaCurve]:
    """Curves of other head dimensions, fitted to half of their shapes."""
    found = {dim: own}
    for (model, dtype), (shapes, seconds) in other_heads(folder, variant).items():
        heads = heads_of(model)
        if dtype or heads[2] in found or len(shapes) < LEAST_OTHERS:
            continue
        out = unfitted(len(shapes))
        part = [one for one, left in zip(shapes, out, strict=True) if not left]
        terms = fit_terms(variant, part, seconds[~out], heads, gpu.sms, own.terms)
        left = log_errors(variant, terms, shapes, seconds, heads, gpu.sms)[out]
        found[heads[2]] = CtaCurve(terms, float(left.std()), len(shapes))
    return found


def grid_of(variant: str, terms: FusedTerms, heads: Heads, sms: int) -> Floats:
    """Seconds on the grid that a profile ships."""
    wanted = list(cells())
    unlike = list(dict.fromkeys(wanted))
    seconds = planned_s(terms, plans(variant, unlike, heads, sms), heads[2], sms)
    place = {one: i for i, one in enumerate(unlike)}
    return np.asarray(seconds[[place[one] for one in wanted]].reshape(SHAPE))

"""Mixed attention out of its sweeps: terms of fused kernels, surfaces of ratios, errors on shapes that were left out.

Of POD and BatchPOD a few shapes are fitted and all others are held out (`calib.fit.fused_terms`). Ratios have folds:
`random` fifths, and `rows`: all shapes of one chunk size. The spread that is shipped of them is the largest over the
axes when whole rows are left out: kernels change their splits with the chunk, so between sizes it errs most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.fit.folds import errors
from calib.fit.fused_terms import (
    VARIANTS,
    fit_dims,
    fit_main,
    grid_of,
    heads_of,
    judge_others,
    judged,
    log_errors,
    other_heads,
    shapes_in,
)
from calib.fit.points import Floats, Mask, column, read_rows
from calib.models import model_shape
from calib.rows import read_table
from calib.sweeps.fused import Q
from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import MixedShape
from sim.cost.cta_terms import cta_terms
from sim.cost.fused_ctas import Heads
from sim.cost.fused_modes import fused_run
from sim.cost.gpu import GpuSpec
from sim.cost.measured_fused import CtaCurve, FusedSurface, Variant, coordinates

BASES = {"batched": "fa2", "streams": "fa2", "streams_fa3": "fa3"}  # variants that are ratios, and to what
# how the CTA-level model names a variant
MODES = {
    "pod": AttentionMode("pod", "flashinfer"),
    "batch_pod": AttentionMode("pod", "flashinfer-batch"),
    "batched": AttentionMode("batched"),
}
FOLDS, SEED = 5, 41
LENGTHS = (0.7, 1.0, 1.5, 2.0, 3.0, 4.5)  # doublings over which a ratio stays alike
START = (1.0, 2.0, 1.5, 2.0)
RIDGE = 0.02  # repeats differ by about a per cent
LEAST = 60
LEAST_ROW = 10  # shapes of one size that are left out together
NOT_BUILT = "MissingJITCacheError"  # of our build of the library, not a refusal
LEFT_OUT = ("OutOfMemoryError", NOT_BUILT)


def shapes_of(rows: pd.DataFrame, dtype: str = "", model: str = "") -> pd.DataFrame:
    """One row a shape of one chunk: `q`, `h`, `batch`, `context`, and seconds by variant (NaN where not measured)."""
    if not len(rows):
        return pd.DataFrame()
    kept = rows[rows["time_s"].notna() & ~rows["q_tokens"].astype(str).str.contains(";")]
    types = kept["dtype"].fillna("") if "dtype" in kept.columns else pd.Series("", index=kept.index)
    kept = kept[(types == dtype) & ((kept["model"] == model) if model else True)]
    kept = kept[kept["launch"] != "eager"].drop_duplicates(["point", "attention"])
    if not len(kept):
        return pd.DataFrame()
    times = kept.pivot(index="point", columns="attention", values="time_s")
    first = kept.drop_duplicates("point").set_index("point").loc[times.index]
    shape = pd.DataFrame(
        {
            "q": column(first, "q_tokens"),
            "h": column(first, "history_tokens"),
            "batch": column(first, "decode_batch"),
            "context": column(first, "context_sum") / column(first, "decode_batch"),
            "contexts": _contexts(first),
        },
        index=times.index,
    )
    return shape.join(times).reset_index(drop=True)


def _contexts(first: pd.DataFrame) -> list[tuple[int, ...]]:
    """Context of every decode of each row."""
    lists = first["decode_contexts"] if "decode_contexts" in first else pd.Series(np.nan, index=first.index)
    found = []
    for given, batch, total in zip(lists, first["decode_batch"], first["context_sum"], strict=True):
        alike = (int(total / batch),) * int(batch)
        found.append(tuple(map(int, given.split(";"))) if isinstance(given, str) else alike)
    return found


def fit_fused(folder: Path, model: str, gpu: GpuSpec) -> tuple[FusedSurface | None, dict[str, Any]]:
    """(what a profile ships, errors on shapes left out by variant); nothing where the sweep has too few shapes."""
    shapes = all_shapes(folder, model)
    if len(shapes) < LEAST:
        return None, {}
    sites = coordinates(*(shapes[name] for name in ("q", "h", "batch", "context")))
    curves, record = {}, {}
    for variant, base in BASES.items():
        logs, known = ratios(shapes, variant, base)
        if known.sum() < LEAST:
            continue
        lengths = best_lengths(sites[known], logs[known])
        curves[variant], record[variant] = _variant(sites, logs, known, base, lengths)
        record[variant] |= modelled(shapes, variant, model, gpu)
    ctas, tables, compared = _fused_kernels(folder, model, gpu, record)
    surface = FusedSurface(
        sites,
        curves,
        heads_of(model),
        "measured",
        coverage(shapes, heads_of(model)),
        fallbacks(folder),
        gpu.sms,
        ctas,
        compared,
        tables,
    )
    return surface, {name: modelled(shapes, name, model, gpu) | one for name, one in record.items()}


def _fused_kernels(
    folder: Path, model: str, gpu: GpuSpec, record: dict[str, Any]
) -> tuple[dict[tuple[str, int], CtaCurve], dict[tuple[str, Heads], Floats], tuple[Heads, ...]]:
    """(curves by variant and head dimension, their grids, heads that were compared); errors go into `record`."""
    ctas, tables, own = {}, {}, heads_of(model)
    compared = {own}
    for variant in VARIANTS:
        made = fit_main(folder, variant, model, gpu)
        if made is None:
            continue
        curve, record[variant] = made
        dims = fit_dims(folder, variant, curve, own[2], gpu)
        record[variant]["heads"] = judge_others(folder, variant, dims, own[2], gpu)
        ctas |= {(variant, dim): one for dim, one in dims.items()}
        seen = {own} | {heads_of(name) for name, dtype in other_heads(folder, variant) if not dtype}
        for heads in sorted(heads for heads in seen if heads[2] in dims):
            compared.add(heads)
            tables[variant, heads] = grid_of(variant, dims[heads[2]].terms, heads, gpu.sms)
    return ctas, tables, tuple(sorted(compared))


def all_shapes(folder: Path, model: str) -> pd.DataFrame:
    """Shapes of the grid and those between its sizes."""
    found = [shapes_of(read_rows(folder, sweep), model=model) for sweep in ("fused", "fused_scatter")]
    parts = [gridded(part) for part in found if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def modelled(shapes: pd.DataFrame, variant: str, model: str, gpu: GpuSpec) -> dict[str, Any]:
    """Errors of the CTA-level model's seconds, which knows kernels alone: what GPUs without a surface are priced by."""
    if variant not in MODES:
        return {}
    heads, terms, mode = model_shape(model), cta_terms(gpu), MODES[variant]
    if variant not in shapes:
        return {}
    part = shapes[shapes[variant].notna()]
    seconds = [
        fused_run(
            terms,
            mode,
            MixedShape(int(q), int(h), int(b), float(c), heads.heads, heads.kv_heads, heads.head_dim),
        ).seconds
        for q, h, b, c in zip(part["q"], part["h"], part["batch"], part["context"], strict=True)
    ]
    return {"cta_model": errors(np.array(seconds), part[variant].to_numpy(float))}


def gridded(shapes: pd.DataFrame) -> pd.DataFrame:
    """Shapes with chunks of the sweep's grid: a lone longer one would claim coverage that it cannot give."""
    return shapes[shapes["q"] <= Q[-1]].reset_index(drop=True) if len(shapes) else shapes


def ratios(shapes: pd.DataFrame, variant: str, base: str) -> tuple[Floats, Mask]:
    """(log of time over the serial time, which are known)."""
    if variant not in shapes.columns or f"serial_{base}" not in shapes.columns:
        return np.zeros(len(shapes)), np.zeros(len(shapes), dtype=bool)
    logs = np.log(shapes[variant].to_numpy(float) / shapes[f"serial_{base}"].to_numpy(float))
    known = np.isfinite(logs)
    return np.where(known, logs, 0.0), known


def _variant(
    sites: Floats, logs: Floats, known: Mask, base: str, lengths: Floats
) -> tuple[Variant, dict[str, Any]]:
    mean = float(logs[known].mean())
    weights = np.zeros(len(sites))
    weights[known] = solve(gaussians(sites[known], lengths), logs[known] - mean)
    left = held_out(sites[known], logs[known], lengths)
    rows = [rows_out(sites[known], logs[known], lengths, axis) for axis in range(sites.shape[1])]
    curve = Variant(
        base=base,
        mean=mean,
        lengths=lengths,
        weights=weights,
        low=float(np.exp(logs[known].min())),
        high=float(np.exp(logs[known].max())),
        sigma=float(max(errors_of.std() for errors_of, _ in rows)),
        points=int(known.sum()),
    )
    truth = np.exp(logs[known])
    chunks, at = rows[0]
    record = {
        "lengths": [float(v) for v in lengths],
        "random": errors(truth * np.exp(left), truth),
        "rows": errors(truth[at] * np.exp(chunks), truth[at]),
    }
    return curve, record


def recheck_fused(
    folder: Path, model: str, gpu: GpuSpec, stated: Mapping[str, Any], shipped: FusedSurface | None
) -> dict[str, Any]:
    """Errors on left-out shapes computed anew: of the shipped terms, and with the lengths that a record states."""
    shapes, own = all_shapes(folder, model), heads_of(model)
    if not len(shapes) or shipped is None:
        return {}
    sites = coordinates(*(shapes[name] for name in ("q", "h", "batch", "context")))
    found = {}
    for variant, record in stated.items():
        if variant in VARIANTS:
            dims = {dim: one for (name, dim), one in shipped.ctas.items() if name == variant}
            found[variant] = judged(folder, variant, model, gpu, dims[own[2]].terms)[1]
            found[variant]["heads"] = judge_others(folder, variant, dims, own[2], gpu)
        else:
            logs, known = ratios(shapes, variant, BASES[variant])
            found[variant] = _variant(sites, logs, known, BASES[variant], np.array(record["lengths"]))[1]
        found[variant] |= modelled(shapes, variant, model, gpu)
    return found


def gaussians(sites: Floats, lengths: Floats) -> Floats:
    """Of every site next to every other."""
    apart = (sites[:, None, :] - sites[None, :, :]) / lengths
    return np.asarray(np.exp(-0.5 * (apart**2).sum(axis=-1)))


def solve(near: Floats, logs: Floats) -> Floats:
    """Weights that reproduce the logs up to their noise."""
    return np.asarray(np.linalg.solve(near + RIDGE * np.eye(len(near)), logs))


def held_out(sites: Floats, logs: Floats, lengths: Floats) -> Floats:
    """Log errors of shapes, each predicted from the folds that it is not in."""
    fold = np.random.default_rng(SEED).permutation(len(logs)) % FOLDS
    near, left = gaussians(sites, lengths), np.zeros(len(logs))
    for i in range(FOLDS):
        train, out = fold != i, fold == i
        mean = logs[train].mean()
        weights = solve(near[np.ix_(train, train)], logs[train] - mean)
        left[out] = near[np.ix_(out, train)] @ weights + mean - logs[out]
    return left


def rows_out(sites: Floats, logs: Floats, lengths: Floats, axis: int) -> tuple[Floats, Any]:
    """(log errors, which shapes) with all shapes of one inner value of an axis left out at a time."""
    near, left, at = gaussians(sites, lengths), [], []
    values, counts = np.unique(sites[:, axis], return_counts=True)
    # sizes of the grid: those between them are one shape each
    for value in values[1:-1][counts[1:-1] >= LEAST_ROW]:
        out = sites[:, axis] == value
        mean = logs[~out].mean()
        weights = solve(near[np.ix_(~out, ~out)], logs[~out] - mean)
        left.append(near[np.ix_(out, ~out)] @ weights + mean - logs[out])
        at.append(np.flatnonzero(out))
    return np.concatenate(left), np.concatenate(at)


def best_lengths(sites: Floats, logs: Floats) -> Floats:
    """Lengths along the four axes, one after the other, by held-out error."""
    lengths = np.array(START)
    for axis in range(sites.shape[1]):
        tried = []
        for length in LENGTHS:
            lengths[axis] = length
            tried.append((float(np.median(np.abs(held_out(sites, logs, lengths)))), length))
        lengths[axis] = min(tried)[1]
    return lengths


def coverage(shapes: pd.DataFrame, heads: tuple[int, int, int]) -> str:
    """The measured range as a sentence."""
    named = (("q", "one chunk of"), ("h", "history"), ("batch", "batch"), ("context", "mean context"))
    parts = [f"{text} {shapes[key].min():g}-{shapes[key].max():g}" for key, text in named]
    return f"{len(shapes)} shapes: {', '.join(parts)}, {heads[0]} query and {heads[1]} KV heads of {heads[2]}, all SMs"


def fallbacks(folder: Path) -> tuple[tuple[str, str], ...]:
    """(what was asked of which wrapper, why it was refused) of everything that gave no result or a wrong one."""
    path = folder / "measurements" / "fused_limits.csv.gz"
    found = []
    for row in read_table(path).to_dict("records") if path.is_file() else ():
        asked = f"{row['label']} ({row['attention']})"
        reason = row.get("skip")
        if isinstance(reason, str) and not reason.startswith(LEFT_OUT):
            found.append((asked, reason))
        elif not isinstance(reason, str) and not row["error"] < 2e-2:
            found.append((asked, "the result is wrong"))
    return tuple(sorted(found))


def score_fused(folder: Path, surface: FusedSurface, model: str) -> dict[str, Any]:
    """Errors on the random shapes of a folder, by variant: of ratios to the measured serial time, and of seconds of
    fused kernels, where `mean context` takes ragged contexts as alike; then those of other heads."""
    found: dict[str, Any] = {}
    rows = read_rows(folder, "fused_random")
    shapes = shapes_of(rows, model=model)
    for variant, curve in surface.curves.items() if len(shapes) else ():
        logs, known = ratios(shapes, variant, curve.base)
        part = shapes[known]
        predicted = surface.ratio(variant, part["q"], part["h"], part["batch"], part["context"])
        if known.any():
            found[variant] = errors(predicted, np.exp(logs[known]))
    others = read_rows(folder, "fused_heads_random")
    for name, table in ((model, rows), *((other, others) for other in sorted(set(others.get("model", ()))))):
        found |= _score_kernels(
            shapes_of(table, model=name), surface, name, "" if name == model else f" ({name})"
        )
    return found


def _score_kernels(
    shapes: pd.DataFrame, surface: FusedSurface, model: str, note: str
) -> dict[str, dict[str, Any]]:
    found, heads = {}, heads_of(model)
    for variant in VARIANTS:
        drawn, seconds = shapes_in(shapes, variant)
        if not drawn or (variant, heads[2]) not in surface.ctas:
            continue
        terms = surface.ctas[variant, heads[2]].terms
        means = [
            replace(one, contexts=(sum(one.contexts) // len(one.contexts),) * len(one.contexts))
            for one in drawn
        ]
        for name, asked in ((f"{variant}{note}", drawn), (f"{variant}{note}, mean context", means)):
            left = log_errors(variant, terms, asked, seconds, heads, surface.sms)
            found[name] = errors(np.exp(left), np.ones(len(left)))
    return found

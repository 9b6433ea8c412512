"""Curves of a measured profile: a physics form with fitted terms times a table of residuals, per measured shape.

A residual table belongs to the constants of a shape, such as (n, k) of a linear layer or the heads of a model.
Shapes with other constants get the form alone, or times the residual that all measured ones share, and are labelled
as extrapolated. Everything is numpy; nothing here knows how the tables were fitted (`calib.fit`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cost.gpu import GpuSpec
from sim.cost.measured_blocks import Blocks, BlocksCurve
from sim.cost.measured_flat import Flat, FlatCurve
from sim.cost.measured_grid import Grid
from sim.cost.operators import decode_keys
from sim.cost.shapes import (
    DecodeAttention,
    Elementwise,
    Experts,
    Floats,
    Gemm,
    PrefillAttention,
    Shape,
    Timing,
)
from sim.cost.spec import RooflineCurve, roofline
from sim.errors import SimctlError

if TYPE_CHECKING:
    from sim.cost.profile_schema import CurveEntry

Key = tuple[int, ...]
# axis names of the tables, by kind of shape; SMs come last
FEATURES = {
    "gemm": ("m",),
    "experts": ("m",),
    "elementwise": ("rows",),
    "prefill": ("q", "h"),
    "decode": ("batch", "context"),
}
METHODS = ("form", "table")  # a table multiplies the form, or stands for the time itself
Form = RooflineCurve | FlatCurve | BlocksCurve
KINDS: dict[type, str] = {RooflineCurve: "waves", FlatCurve: "flat", BlocksCurve: "blocks"}


def constants(shape: Shape) -> Key:
    """What is fixed in a shape for one operator of one model: (n, k), experts, bytes per row, or heads.

    The skew of a routing is none: the form follows the experts that it touches and the tiles that it makes."""
    if isinstance(shape, Gemm):
        return (shape.n, shape.k, shape.dtype_bytes)
    if isinstance(shape, Experts):
        return (shape.n, shape.k, shape.experts, shape.chosen, shape.dtype_bytes)
    if isinstance(shape, Elementwise):
        return (shape.bytes_per_row,)
    return (shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype_bytes)


def features(shape: Shape) -> tuple[Any, ...]:
    """The raw values along the axes of `FEATURES`; a decode batch counts by its mean context."""
    if isinstance(shape, Gemm | Experts):
        return (shape.m,)
    if isinstance(shape, Elementwise):
        return (shape.rows,)
    if isinstance(shape, PrefillAttention):
        return (shape.q, shape.h)
    batch = np.asarray(shape.batch, dtype=np.float64)
    return (batch, decode_keys(shape) / np.maximum(batch, 1.0))


# heads of the model whose attention was measured on every set of SMs: what residuals are pooled by
POOLED_HEADS, POOLED_KV_HEADS = 32, 8


def pooled_scale(shape: Shape) -> float:
    """Factor on the first feature of a shape for the residual that all constants share: a kernel of fewer heads rounds
    as one of fewer tokens or sequences does, since it has as few blocks."""
    if isinstance(shape, PrefillAttention):
        return shape.q_heads / POOLED_HEADS
    return shape.kv_heads / POOLED_KV_HEADS if isinstance(shape, DecodeAttention) else 1.0


@dataclass(frozen=True)
class MeasuredCurve:
    """One operator. `form`: its physics with fitted terms; `tables`: residual (log of measured over form) or, with
    method `table`, log seconds, over the features and SMs, by shape constants.

    `stairs`: sizes that were measured, if a size takes the time of the next one up. `pooled`: residual for other
    constants. `shared_s`: what a chunk after the first costs less in a launch of several. `skew`: nanoseconds for each
    token by which the longest context exceeds the mean, over batch and SMs: a batch too large to split its
    sequences (`splits_up_to`) waits for the longest. `sigma`: sd of the log error on held-out points, `sigma_off`
    off coverage. `other`: the curve of constants that have no table here; the `pooled` residual of such a one may lie
    over n and k too.
    """

    form: Form
    tables: Mapping[Key, Grid]
    label: str
    coverage: str
    extrapolation: str = "flag"
    method: str = "form"
    stairs: tuple[int, ...] = ()
    pooled: Grid | None = None
    shared_s: float | None = None
    skew: Grid | None = None
    sigma: float = 0.0
    sigma_off: float = 0.0
    other_label: str = ""
    other: MeasuredCurve | None = None

    def table_of(self, shape: Shape) -> Grid | None:
        """The table of a shape's constants, here or of other models."""
        found = self.tables.get(constants(shape))
        return found if found is not None or self.other is None else self.other.table_of(shape)

    def label_for(self, shape: Shape) -> str:
        """The label, or that of an extrapolation where the shape's constants were not measured."""
        return self.label if self.table_of(shape) is not None else self.other_label or self.label

    def covered(self, shape: Shape, sms: int) -> bool:
        """Were these constants measured, and does every element lie within the measured range of each axis?"""
        table = self.table_of(shape)
        return table is not None and table.holds((*features(shape), sms))

    def fixed_s(self, shape: Shape) -> float:
        """The part of a call's time that chunks of one launch share."""
        return self.form.fixed_s(shape) if self.shared_s is None else self.shared_s

    def spread(self, shape: Shape, sms: int) -> float:
        """Relative standard error of the curve at a shape."""
        if self.other is not None and constants(shape) not in self.tables:
            return self.other.spread(shape, sms)
        return self.sigma if self.covered(shape, sms) else max(self.sigma, self.sigma_off)

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds of one call per array element; see `Curve.timing`."""
        if self.other is not None and constants(shape) not in self.tables:
            return self.other.timing(shape, sms, clock)
        shape = self._on_stairs(self._clipped(shape))
        base = self.form.timing(shape, sms, clock)
        table = self.tables.get(constants(shape))
        if table is not None and self.method == "table":
            # the form tells only how time moves with the clock and how many SMs are busy
            own = np.exp(table.at((*features(shape), sms)))
            same = np.ndim(clock) == 0 and clock == 1.0
            seconds = own if same else own * base.seconds / self.form.timing(shape, sms).seconds
        else:
            seconds = base.seconds * np.exp(self._residual(table, shape, sms))
        active = np.minimum(base.sm_s / (base.seconds * sms), 1.0)
        tail = self._skewed(shape, sms)
        # of the sequences that outlast the rest one is left for most of the time, with a CTA a KV head
        few = np.minimum(shape.kv_heads, sms) if isinstance(shape, DecodeAttention) else 0
        return Timing(seconds=seconds + tail, sm_s=active * seconds * sms + tail * few)

    def _residual(self, table: Grid | None, shape: Shape, sms: int) -> Floats | float:
        """Log residual of the form: of the shape's own table, else of all measured ones, else none.

        A table of one SM count changes with the SMs as the others do.
        """
        if table is None:
            return self.shared(shape, sms)
        own, knots = table.at((*features(shape), sms)), table.axes[-1].knots
        if len(knots) > 1:
            return own
        return own + self.shared(shape, sms) - self.shared(shape, int(knots[0]))

    def shared(self, shape: Shape, sms: Any) -> Floats | float:
        """Log residual that all measured constants share."""
        if self.pooled is None:
            return 0.0
        if isinstance(shape, Gemm) and len(self.pooled.axes) == 4:
            return self.pooled.at((shape.m, shape.n, shape.k, sms))
        first, *rest = features(shape)
        return self.pooled.at((np.asarray(first) * pooled_scale(shape), *rest, sms))

    def _clipped(self, shape: Shape) -> Shape:
        """The shape, or the nearest measured one where the curve is to answer as at the edge of its coverage."""
        table = self.tables.get(constants(shape))
        if self.extrapolation != "clip" or table is None:
            return shape
        edges = [(axis.knots[0], axis.knots[-1]) for axis in table.axes[:-1]]
        inside = [np.clip(v, *edge) for v, edge in zip(features(shape), edges, strict=True)]
        if isinstance(shape, Gemm | Experts):
            return replace(shape, m=inside[0].astype(np.int64))
        if isinstance(shape, Elementwise):
            return replace(shape, rows=inside[0].astype(np.int64))
        if isinstance(shape, PrefillAttention):
            return replace(shape, q=inside[0].astype(np.int64), h=inside[1].astype(np.int64))
        return replace(shape, batch=inside[0].astype(np.int64), context_sum=inside[0] * inside[1])

    def _on_stairs(self, shape: Shape) -> Shape:
        if not self.stairs or not isinstance(shape, Gemm):
            return shape
        steps = np.asarray(self.stairs)
        m = np.asarray(shape.m)
        at = np.minimum(np.searchsorted(steps, m), len(steps) - 1)
        return Gemm(np.maximum(steps[at], m), shape.n, shape.k, shape.dtype_bytes)

    def _skewed(self, shape: Shape, sms: int) -> Floats | float:
        if self.skew is None or not isinstance(shape, DecodeAttention) or shape.context_max is None:
            return 0.0
        batch = np.maximum(np.asarray(shape.batch, dtype=np.float64), 1.0)
        longer = np.maximum(np.asarray(shape.context_max) - np.asarray(shape.context_sum) / batch, 0.0)
        return self._skew_s(batch, batch > splits_up_to(shape.kv_heads, self.form.gpu), shape, sms) * longer

    def _skew_s(self, batch: Floats, whole: Any, shape: DecodeAttention, sms: int) -> Floats:
        """Seconds a token of overhang, for batches whose sequences are `whole` or split."""
        assert self.skew is not None
        # the library splits sequences or not, by the whole GPU: nothing lies between
        knots = np.asarray(self.skew.axes[0].knots)
        for side in (True, False):
            held = knots[(knots > splits_up_to(shape.kv_heads, self.form.gpu)) == side]
            if len(held):
                batch = np.where(whole == side, np.clip(batch, held[0], held[-1]), batch)
        return np.asarray(1e-9 * np.maximum(self.skew.at((batch, sms)), 0.0))

    def overhang_s(self, shape: DecodeAttention, sms: int) -> Floats:
        """Seconds of one call for each token by which the longest sequence, or piece of a split one, exceeds the mean;
        0 where that was not measured."""
        batch = np.maximum(np.asarray(shape.batch, dtype=np.float64), 1.0)
        if self.skew is None:
            return np.zeros(len(batch))
        return self._skew_s(batch, np.full(len(batch), True), shape, sms)


def splits_up_to(kv_heads: int, gpu: GpuSpec) -> int:
    """Largest decode batch whose sequences are split among CTAs: two CTAs an SM, one a sequence and KV head
    (FlashInfer plans so for the whole GPU, whatever partition the kernel runs on)."""
    return 2 * gpu.sms // kv_heads


def form_of(gpu: GpuSpec, kind: str, terms: Mapping[str, float], label: str, where: str = "terms") -> Form:
    """The form `waves` (`sim.cost.spec.Roofline`'s terms), `flat` (`Flat`'s) or `blocks` (`Blocks`')."""
    if kind == "flat":
        return FlatCurve(gpu, Flat.from_data(terms, where), label)
    if kind == "blocks":
        return BlocksCurve(gpu, Blocks.from_data(terms, where), label)
    if kind != "waves":
        raise SimctlError(f"{where}: unknown form '{kind}'; known: waves, flat, blocks.")
    # no profiler says which part of the fixed cost has a resident warp: two thirds, as in the spec profile
    whole = {"idle_launch_s": terms["launch_s"] / 3.0, **terms}
    return RooflineCurve(gpu, roofline(whole, where), label)


@lru_cache(maxsize=8)
def _read(path: str, size: int, changed_ns: int) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SimctlError(f"Curve file '{path}' is not readable JSON: {error}.") from error
    if not isinstance(data, dict):
        raise SimctlError(f"Curve file '{path}' must hold one JSON object.")
    return data


def read_curves(path: Path) -> dict[str, Any]:
    """The content of a profile's `curves.json`, read once a process for the same file."""
    facts = path.stat()
    return _read(str(path), facts.st_size, facts.st_mtime_ns)


def load_curve(path: Path, entry: CurveEntry, gpu: GpuSpec) -> MeasuredCurve:
    """The curve of a `profile.yaml` entry of form `measured`: the part of `curves.json` under its operator."""
    curves = read_curves(path).get("curves", {})
    found = curves.get(entry.operator)
    if isinstance(found, dict) and "same_as" in found:
        # a family's plain name stands for one of its variants
        found = curves.get(found["same_as"])
    if not isinstance(found, dict):
        raise SimctlError(f"{path} has no curve for '{entry.operator}'.")
    return curve_from_data(
        found, gpu, entry.label, entry.coverage, entry.extrapolation, f"{path}, {entry.operator}"
    )


def curve_from_data(
    data: Mapping[str, Any], gpu: GpuSpec, label: str, coverage: str, extrapolation: str, where: str
) -> MeasuredCurve:
    """A curve of one entry of `curves.json`; SimctlError names `where` and the key."""
    try:
        other = data.get("other_label", "")
        form = form_of(gpu, data["form"], data["terms"], label, f"{where}, terms")
        if data.get("method", "form") not in METHODS:
            raise SimctlError(f"{where}: method '{data['method']}' is none of {', '.join(METHODS)}.")
        return MeasuredCurve(
            form=form,
            tables={
                tuple(one["constants"]): Grid.from_data(one["grid"], f"{where}, tables")
                for one in data["tables"]
            },
            label=label,
            coverage=coverage,
            extrapolation=extrapolation,
            method=data.get("method", "form"),
            stairs=tuple(data.get("stairs") or ()),
            pooled=Grid.from_data(data["pooled"], f"{where}, pooled") if data.get("pooled") else None,
            shared_s=data.get("shared_s"),
            skew=Grid.from_data(data["skew"], f"{where}, skew") if data.get("skew") else None,
            sigma=data.get("sigma", 0.0),
            sigma_off=data.get("sigma_off", 0.0),
            other_label=other,
            other=(
                curve_from_data(data["other"], gpu, label, coverage, extrapolation, f"{where}, other")
                if data.get("other")
                else None
            ),
        )
    except KeyError as error:
        raise SimctlError(f"{where}: key {error} is missing.") from error


def curve_data(curve: MeasuredCurve, terms: Mapping[str, float]) -> dict[str, Any]:
    """The JSON-like mapping that `curve_from_data` reads back."""
    tables = [{"constants": list(key), "grid": grid.as_data()} for key, grid in sorted(curve.tables.items())]
    found: dict[str, Any] = {
        "terms": {name: float(f"{value:.6g}") for name, value in terms.items()},
        "form": KINDS[type(curve.form)],
        "method": curve.method,
        "tables": tables,
        "sigma": round(curve.sigma, 5),
        "sigma_off": round(curve.sigma_off, 5),
        "other_label": curve.other_label,
    }
    if curve.stairs:
        found["stairs"] = list(curve.stairs)
    if curve.pooled is not None:
        found["pooled"] = curve.pooled.as_data()
    if curve.shared_s is not None:
        found["shared_s"] = float(f"{curve.shared_s:.6g}")
    if curve.skew is not None:
        found["skew"] = curve.skew.as_data()
    if curve.other is not None:
        found["other"] = curve_data(curve.other, asdict(curve.other.form.terms))
    return found

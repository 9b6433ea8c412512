"""Curves of a measured profile: a physics form with fitted terms times a table of residuals, per measured shape.

A residual table belongs to the constants of a shape, such as (n, k) of a linear layer or the heads of a model.
Shapes with other constants get the form alone, or times the residual that all measured ones share, and are labelled
as extrapolated. Everything is numpy; nothing here knows how the tables were fitted (`calib.fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.gpu import GpuSpec
from sim.cost.measured_grid import Grid
from sim.cost.operators import decode_keys
from sim.cost.shapes import (
    DecodeAttention,
    Elementwise,
    Floats,
    Gemm,
    PrefillAttention,
    Shape,
    Timing,
)
from sim.cost.measured_flat import Flat, FlatCurve
from sim.cost.spec import RooflineCurve, roofline
from sim.errors import SimctlError

Key = tuple[int, ...]
# axis names of the tables, by kind of shape; SMs come last
FEATURES = {
    "gemm": ("m",),
    "elementwise": ("rows",),
    "prefill": ("q", "h"),
    "decode": ("batch", "context"),
}
METHODS = ("form", "table")  # a table multiplies the form, or stands for the time itself
FORMS = ("waves", "flat")
Form = RooflineCurve | FlatCurve


def shape_kind(shape: Shape) -> str:
    """Key of `FEATURES` for a shape."""
    if isinstance(shape, Gemm):
        return "gemm"
    if isinstance(shape, Elementwise):
        return "elementwise"
    return "prefill" if isinstance(shape, PrefillAttention) else "decode"


def constants(shape: Shape) -> Key:
    """What is fixed in a shape for one operator of one model: (n, k), bytes per row, or heads."""
    if isinstance(shape, Gemm):
        return (shape.n, shape.k, shape.dtype_bytes)
    if isinstance(shape, Elementwise):
        return (shape.bytes_per_row,)
    return (shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype_bytes)


def features(shape: Shape) -> tuple[Any, ...]:
    """The raw values along the axes of `FEATURES`; a decode batch counts by its mean context."""
    if isinstance(shape, Gemm):
        return (shape.m,)
    if isinstance(shape, Elementwise):
        return (shape.rows,)
    if isinstance(shape, PrefillAttention):
        return (shape.q, shape.h)
    batch = np.asarray(shape.batch, dtype=np.float64)
    return (batch, decode_keys(shape) / np.maximum(batch, 1.0))


@dataclass(frozen=True)
class MeasuredCurve:
    """One operator. `form`: its physics with fitted terms; `tables`: residual (log of measured over form) or, with
    method `table`, log seconds, over the features and SMs, by shape constants.

    `stairs`: sizes that were measured, if a size takes the time of the next one up. `pooled`: residual for other
    constants. `per_chunk_s`: what a chunk after the first costs less in a launch of several. `skew`: log time per
    doubling of the longest over the mean context. `sigma`: sd of the log error on held-out points.
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
    skew: float = 0.0
    sigma: float = 0.0
    sigma_off: float = 0.0
    other_label: str = ""

    def label_for(self, shape: Shape) -> str:
        """The label, or that of an extrapolation where the shape's constants were not measured."""
        return self.label if constants(shape) in self.tables else self.other_label or self.label

    def covered(self, shape: Shape, sms: int) -> bool:
        """Were these constants measured, and does every element lie within the measured range of each axis?"""
        table = self.tables.get(constants(shape))
        return table is not None and table.holds((*features(shape), sms))

    def fixed_s(self, shape: Shape) -> float:
        """The part of a call's time that chunks of one launch share."""
        return self.form.fixed_s(shape) if self.shared_s is None else self.shared_s

    def spread(self, shape: Shape, sms: int) -> float:
        """Relative standard error of the curve at a shape."""
        return self.sigma if self.covered(shape, sms) else max(self.sigma, self.sigma_off)

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds of one call per array element; see `Curve.timing`."""
        shape = self._on_stairs(shape)
        base = self.form.timing(shape, sms, clock)
        table = self.tables.get(constants(shape))
        if table is not None and self.method == "table":
            # the form tells only how time moves with the clock and how many SMs are busy
            own = np.exp(table.at((*features(shape), sms)))
            same = np.ndim(clock) == 0 and clock == 1.0
            seconds = own if same else own * base.seconds / self.form.timing(shape, sms).seconds
        else:
            table = table or self.pooled
            factor = 1.0 if table is None else np.exp(table.at((*features(shape), sms)))
            seconds = base.seconds * factor
        seconds = seconds * self._skewed(shape)
        active = np.minimum(base.sm_s / (base.seconds * sms), 1.0)
        return Timing(seconds=seconds, sm_s=active * seconds * sms)

    def _on_stairs(self, shape: Shape) -> Shape:
        if not self.stairs or not isinstance(shape, Gemm):
            return shape
        steps = np.asarray(self.stairs)
        m = np.asarray(shape.m)
        at = np.minimum(np.searchsorted(steps, m), len(steps) - 1)
        return Gemm(np.maximum(steps[at], m), shape.n, shape.k, shape.dtype_bytes)

    def _skewed(self, shape: Shape) -> Floats | float:
        if not self.skew or not isinstance(shape, DecodeAttention) or shape.context_max is None:
            return 1.0
        mean = np.asarray(shape.context_sum) / np.maximum(np.asarray(shape.batch), 1)
        ratio = np.maximum(np.asarray(shape.context_max) / np.maximum(mean, 1.0), 1.0)
        return np.asarray(np.exp(self.skew * np.log2(ratio)))


def form_of(gpu: GpuSpec, kind: str, terms: Mapping[str, float], label: str, where: str = "terms") -> Form:
    """The form `waves` (`sim.cost.spec.Roofline`'s terms) or `flat` (`Flat`'s)."""
    if kind == "flat":
        return FlatCurve(gpu, Flat.from_data(terms, where), label)
    # no profiler says which part of the fixed cost has a resident warp: two thirds, as in the spec profile
    whole = {"idle_launch_s": terms["launch_s"] / 3.0, **terms}
    return RooflineCurve(gpu, roofline(whole, where), label)


def curve_from_data(data: Mapping[str, Any], gpu: GpuSpec, label: str, coverage: str, extrapolation: str, where: str) -> MeasuredCurve:
    """A curve of one entry of `curves.json`; SimctlError names `where` and the key."""
    try:
        other = data.get("other_label", "")
        form = form_of(gpu, data["form"], data["terms"], label, f"{where}, terms")
        if data.get("method", "form") not in METHODS:
            raise SimctlError(f"{where}: method '{data['method']}' is none of {', '.join(METHODS)}.")
        return MeasuredCurve(
            form=form,
            tables={
                tuple(one["constants"]): Grid.from_data(one["grid"], f"{where}, tables") for one in data["tables"]
            },
            label=label,
            coverage=coverage,
            extrapolation=extrapolation,
            method=data.get("method", "form"),
            stairs=tuple(data.get("stairs") or ()),
            pooled=Grid.from_data(data["pooled"], f"{where}, pooled") if data.get("pooled") else None,
            shared_s=data.get("shared_s"),
            skew=data.get("skew", 0.0),
            sigma=data.get("sigma", 0.0),
            sigma_off=data.get("sigma_off", 0.0),
            other_label=other,
        )
    except KeyError as error:
        raise SimctlError(f"{where}: key {error} is missing.") from error


def curve_data(curve: MeasuredCurve, terms: Mapping[str, float]) -> dict[str, Any]:
    """The JSON-like mapping that `curve_from_data` reads back."""
    tables = [{"constants": list(key), "grid": grid.as_data()} for key, grid in sorted(curve.tables.items())]
    found: dict[str, Any] = {
        "terms": {name: float(f"{value:.6g}") for name, value in terms.items()},
        "form": "flat" if isinstance(curve.form, FlatCurve) else "waves",
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
    if curve.skew:
        found["skew"] = round(curve.skew, 6)
    return found

"""Attention of mixed batches on one GPU as measured: fused kernels by their CTAs, other ways by a surface of ratios.

POD's and BatchPOD's seconds follow from their plans and a few terms (`sim.cost.fused_ctas`), for any heads of the head
dimension that was measured. Of the other ways the ratio to the serial time is fitted that was measured in the same
block, so a clock that drifts is not in it. Fitted by `calib.fit.fused`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sim.cost.fused_ctas import FusedShape, FusedTerms, Heads, fused_s, fused_terms
from sim.cost.fused_table import looked_up, packed, unpacked
from sim.cost.shapes import Floats
from sim.errors import SimctlError

AXES = ("prefill_tokens", "history", "decode_batch", "mean_context")
HISTORY_OFFSET = 512  # tokens: histories shorter than this are alike
BASES = ("fa2", "fa3")


@dataclass(frozen=True)
class Variant:
    """One way to run mixed attention. `base`: back end of the serial prefill that the ratio is of; `mean` and `weights`
    (one a site) make its logarithm by Gaussians of `lengths`; `low`, `high` bound it to what was measured; `sigma`: sd
    of the log error between measured sizes; `points`: sites that were measured."""

    base: str
    mean: float
    lengths: Floats
    weights: Floats
    low: float
    high: float
    sigma: float
    points: int


@dataclass(frozen=True)
class CtaCurve:
    """Terms of a fused kernel of one head dimension; `sigma`: sd of the log error of shapes that were not fitted;
    `points`: shapes that were measured."""

    terms: FusedTerms
    sigma: float
    points: int


@dataclass(frozen=True)
class FusedSurface:
    """Mixed attention over (new tokens of one chunk, its history, decode batch, mean context), on the whole GPU.

    `curves`: ratios of `heads` (query and KV heads and head dimension of one GPU) alone, with `sites`, shape (n, 4), in
    units of `coordinates`. `ctas`: seconds by variant and head dimension; `measured`: heads that they were compared
    with; `tables`: their seconds on the grid of `sim.cost.fused_table`. `fallbacks`: (what was asked, why it was
    refused).
    """

    sites: Floats
    curves: Mapping[str, Variant]
    heads: Heads
    label: str
    coverage: str
    fallbacks: tuple[tuple[str, str], ...] = ()
    sms: int = 132
    ctas: Mapping[tuple[str, int], CtaCurve] = field(default_factory=dict)
    measured: tuple[Heads, ...] = ()
    tables: Mapping[tuple[str, Heads], Floats] = field(default_factory=dict)

    @property
    def variants(self) -> tuple[str, ...]:
        """What was measured: `pod`, `batch_pod`, `batched`, `streams`, `streams_fa3`."""
        return tuple(dict.fromkeys([*(name for name, _ in self.ctas), *self.curves]))

    def answers(self, variant: str, heads: Heads) -> bool:
        """Is there a curve of these heads?"""
        return (variant, heads[2]) in self.ctas or (variant in self.curves and heads == self.heads)

    def of_ctas(self, variant: str) -> bool:
        """Does the variant have seconds of its own, not a ratio to separate kernels?"""
        return any(name == variant for name, _ in self.ctas)

    def label_of(self, variant: str, heads: Heads) -> str:
        """Where its answers come from."""
        if heads in self.measured or (variant in self.curves and heads == self.heads):
            return self.label
        return f"extrapolated from other heads of {heads[2]}, {self.label}"

    def seconds(self, variant: str, heads: Heads, shapes: Sequence[FusedShape]) -> Floats:
        """Seconds of one layer's attention by a fused kernel, for each shape."""
        return fused_s(variant, self.ctas[variant, heads[2]].terms, shapes, heads, self.sms)

    def base(self, variant: str) -> str:
        """Back end (fa2, fa3) of the prefill attention whose serial time the ratio of `variant` is of."""
        return self.curves[variant].base if variant in self.curves else BASES[0]

    @property
    def sigma(self) -> Mapping[str, float]:
        """Sd of the log error of held-out shapes by variant."""
        own = {name: curve.sigma for (name, dim), curve in self.ctas.items() if dim == self.heads[2]}
        return {name: curve.sigma for name, curve in self.curves.items()} | own

    def ratio(
        self, variant: str, prefill_tokens: Any, history: Any, decode_batch: Any, mean_context: Any
    ) -> Floats:
        """Time of one layer's attention over that of prefill (with `base(variant)`) and then decode at the same shape.

        Arguments broadcast; beyond the measured range the answer is that of its edge.
        """
        curve = self.curves[variant]
        at = coordinates(prefill_tokens, history, decode_batch, mean_context)
        near = self._gaussians(curve, at, slice(0, 4))
        return self._of(curve, near @ curve.weights)

    def table(
        self, variant: str, prefill_tokens: Any, history: Any, decode_batch: Any, mean_context: Any
    ) -> Floats:
        """`ratio` of every prefill shape beside every decode shape: the first two arguments broadcast to a shape A, the
        last two to a shape B, and the answer has the shape A + B."""
        curve = self.curves[variant]
        prefill, decode = (
            stacked(prefill_tokens, np.add(history, HISTORY_OFFSET)),
            stacked(decode_batch, mean_context),
        )
        of_prefill = self._gaussians(curve, prefill, slice(0, 2))
        of_decode = self._gaussians(curve, decode, slice(2, 4))
        flat = (of_prefill.reshape(-1, len(self.sites)) * curve.weights) @ of_decode.reshape(
            -1, len(self.sites)
        ).T
        return self._of(curve, flat.reshape(*prefill.shape[:-1], *decode.shape[:-1]))

    def table_s(
        self, variant: str, heads: Heads, q: Sequence[int], keys: Any, batch: Any, context: Any
    ) -> Floats | None:
        """Seconds of every combination of four lists (a chunk's tokens, the keys that its rows see on average, decode
        batch, mean context); None where a profile holds no grid of these heads."""
        grid = self.tables.get((variant, heads))
        return None if grid is None else looked_up(grid, q, keys, batch, context)

    def _gaussians(self, curve: Variant, at: Floats, axes: slice) -> Floats:
        """Of every point next to every site along `axes`, shape (..., sites); off the sites' range as at its edge."""
        sites = self.sites[:, axes]
        inside = np.clip(at, sites.min(axis=0), sites.max(axis=0)) / curve.lengths[axes]
        sites = sites / curve.lengths[axes]
        apart = (inside**2).sum(axis=-1)[..., None] - 2.0 * inside @ sites.T + (sites**2).sum(axis=1)
        return np.asarray(np.exp(-0.5 * np.maximum(apart, 0.0)))

    @staticmethod
    def _of(curve: Variant, logs: Floats) -> Floats:
        return np.asarray(np.clip(np.exp(curve.mean + logs), curve.low, curve.high))

    def covered(
        self, variant: str, prefill_tokens: Any, history: Any, decode_batch: Any, mean_context: Any
    ) -> Any:
        """Does each shape lie within the measured range?"""
        at = coordinates(prefill_tokens, history, decode_batch, mean_context)
        inside = (at >= self.sites.min(axis=0)) & (at <= self.sites.max(axis=0))
        return inside.all(axis=-1) & (variant in self.variants)

    def as_data(self) -> dict[str, Any]:
        """A JSON-like mapping that `load_fused` reads."""
        curves = {
            name: {
                "base": one.base,
                "mean": round(one.mean, 6),
                "lengths": [float(v) for v in one.lengths],
                "low": round(one.low, 5),
                "high": round(one.high, 5),
                "sigma": round(one.sigma, 5),
                "points": one.points,
                "weights": [round(float(w), 5) for w in one.weights],
            }
            for name, one in self.curves.items()
        }
        sites = [[round(float(v), 5) for v in site] for site in self.sites]
        kernels = [
            {
                "variant": name,
                "head_dim": dim,
                "terms": one.terms.as_data(),
                "sigma": round(one.sigma, 5),
                "points": one.points,
            }
            for (name, dim), one in self.ctas.items()
        ]
        return {
            "heads": list(self.heads),
            "sms": self.sms,
            "kernels": kernels,
            "measured_heads": [list(heads) for heads in self.measured],
            "tables": [
                {"variant": name, "heads": list(heads), "log_us_thousandths": packed(grid)}
                for (name, heads), grid in self.tables.items()
            ],
            "variants": curves,
            "sites": sites,
            "fallbacks": [list(pair) for pair in self.fallbacks],
        }


def coordinates(prefill_tokens: Any, history: Any, decode_batch: Any, mean_context: Any) -> Floats:
    """Binary logarithms along `AXES`, shape (..., 4)."""
    return stacked(prefill_tokens, np.add(history, HISTORY_OFFSET), decode_batch, mean_context)


def stacked(*values: Any) -> Floats:
    """Binary logarithms of values that broadcast, along a new last axis."""
    same = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in values))
    return np.asarray(np.log2(np.maximum(np.stack(same, axis=-1), 1.0)))


def load_fused(path: Path, label: str, coverage: str = "") -> FusedSurface:
    """The surface of a file that `as_data` made; SimctlError names the file and the key."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimctlError(f"'{path}' is not a readable surface of fused attention: {error}.") from error
    try:
        curves = {
            name: Variant(
                base=str(one["base"]),
                mean=float(one["mean"]),
                lengths=np.array(one["lengths"], dtype=np.float64),
                weights=np.array(one["weights"], dtype=np.float64),
                low=float(one["low"]),
                high=float(one["high"]),
                sigma=float(one["sigma"]),
                points=int(one["points"]),
            )
            for name, one in data["variants"].items()
        }
        sites = np.array(data["sites"], dtype=np.float64)
        heads = _heads(data["heads"])
        fallbacks = tuple((str(asked), str(why)) for asked, why in data.get("fallbacks", []))
        ctas = {
            (str(one["variant"]), int(one["head_dim"])): CtaCurve(
                fused_terms(one["terms"]), float(one["sigma"]), int(one["points"])
            )
            for one in data.get("kernels", [])
        }
        tables = {
            (str(one["variant"]), _heads(one["heads"])): unpacked(one["log_us_thousandths"])
            for one in data.get("tables", [])
        }
        measured = tuple(_heads(heads) for heads in data.get("measured_heads", []))
        sms = int(data.get("sms", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SimctlError(f"'{path}' lacks a part of a surface of fused attention: {error!r}.") from error
    for name, curve in curves.items():
        if curve.base not in BASES:
            raise SimctlError(f"'{path}', {name}: base '{curve.base}' is none of {', '.join(BASES)}.")
        if sites.ndim != 2 or sites.shape[1] != len(AXES) or curve.weights.shape != (len(sites),):
            raise SimctlError(f"'{path}', {name}: sites and weights do not belong together.")
    return FusedSurface(sites, curves, heads, label, coverage, fallbacks, sms, ctas, measured, tables)


def _heads(counts: Any) -> Heads:
    q_heads, kv_heads, head_dim = (int(count) for count in counts)
    return q_heads, kv_heads, head_dim

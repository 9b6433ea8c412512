"""Attention of mixed batches on one GPU against the same done one after the other: a measured surface for each way.

What is fitted is the ratio to the serial time that was measured in the same block, so a clock that drifts is not in it.
Fitted by `calib.fit.fused`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
class FusedSurface:
    """Ratios over (new tokens of one chunk, its history, decode batch, mean context), on the whole GPU.

    `sites`, shape (n, 4), in units of `coordinates`. `heads`: query and KV heads and head dimension on one GPU, that
    it holds for. `fallbacks`: (what was asked, why it was refused).
    """

    sites: Floats
    curves: Mapping[str, Variant]
    heads: tuple[int, int, int]
    label: str
    coverage: str
    fallbacks: tuple[tuple[str, str], ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """What there is a surface for: `pod`, `batch_pod`, `batched`, `streams`, `streams_fa3`."""
        return tuple(self.curves)

    def base(self, variant: str) -> str:
        """Back end (fa2, fa3) of the prefill attention whose serial time the ratio of `variant` is of."""
        return self.curves[variant].base

    @property
    def sigma(self) -> Mapping[str, float]:
        """Sd of the log error of held-out shapes by variant."""
        return {name: curve.sigma for name, curve in self.curves.items()}

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
        return inside.all(axis=-1) & (variant in self.curves)

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
        heads = list(self.heads)
        return {
            "heads": heads,
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
        q_heads, kv_heads, head_dim = (int(count) for count in data["heads"])
        fallbacks = tuple((str(asked), str(why)) for asked, why in data.get("fallbacks", []))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SimctlError(f"'{path}' lacks a part of a surface of fused attention: {error!r}.") from error
    for name, curve in curves.items():
        if curve.base not in BASES:
            raise SimctlError(f"'{path}', {name}: base '{curve.base}' is none of {', '.join(BASES)}.")
        if sites.ndim != 2 or sites.shape[1] != len(AXES) or curve.weights.shape != (len(sites),):
            raise SimctlError(f"'{path}', {name}: sites and weights do not belong together.")
    return FusedSurface(sites, curves, (q_heads, kv_heads, head_dim), label, coverage, fallbacks)

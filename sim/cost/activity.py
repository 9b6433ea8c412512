"""SM-seconds with a resident warp in one call of an operator, after hardware counters of single kernels.

A curve knows how long a call takes, counters know on how many SMs:

- element-wise kernels hold an SM a row until all are held;
- linear layers hold as many SMs as the library's kernel has CTAs, and lose some to uneven tiles: shares by tokens, as
  counted for each (n, k), other sizes as the mean of these;
- decode attention runs two CTAs an SM, planned for the whole GPU: a full wave of split contexts, or waves of one
  sequence and KV head each, whose last, partial one takes its share of a wave at least `partial`;
- prefill attention as its curve deals blocks to SMs; those that get less still start (`start_s`).

`kept` of all that remains: ends are uneven. On part of the GPU the same CTAs fill more of fewer SMs, of which linear
layers keep `parted`.

A profiler runs kernels alone: `launch_s` a kernel without a warp, which in a step the kernels around it hide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.cost.gpu import GpuSpec
from sim.cost.measured_terms import read_terms
from sim.cost.shapes import DecodeAttention, Elementwise, Floats, Gemm, PrefillAttention, Shape, Timing
from sim.errors import SimctlError

CTAS = 2  # of decode attention on an SM
ALL_SMS = ("rope",)  # operators with several CTAs a row


@dataclass(frozen=True)
class Terms:
    """Of one family of kernels, see the module's text."""

    kept: float
    launch_s: float = 0.0
    start_s: float = 0.0
    partial: float = 0.0


FAMILIES = ("elementwise", "decode", "prefill")


@dataclass(frozen=True)
class Activity:
    """`families`: terms by kind of shape; `counted`: for (n, k), tokens in ascending order and shares of the SMs."""

    gpu: GpuSpec
    families: Mapping[str, Terms]
    counted: Mapping[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]
    label: str
    coverage: str = field(default="")
    parted: float = 1.0

    def known(self, shape: Shape) -> bool:
        """Is there anything to say of such a shape?"""
        if isinstance(shape, Gemm):
            return bool(self.counted)
        return family_of(shape) in self.families

    def timing(
        self, operator: str, shape: Shape, found: Timing, sms: int, bare: Timing | None = None
    ) -> Timing:
        """The curve's timing with SM-seconds by counters. `bare`: the curve's without the overhang of a ragged batch,
        which is left as the curve has it."""
        if not self.known(shape):
            return found
        base = found if bare is None else bare
        sm_s = np.minimum(self.sm_s(operator, shape, base, sms), base.seconds * sms)
        return replace(found, sm_s=sm_s + (found.sm_s - base.sm_s))

    def sm_s(self, operator: str, shape: Shape, base: Timing, sms: int) -> Floats:
        """SM-seconds of one call that takes `base.seconds`, per array element."""
        if isinstance(shape, Gemm):
            held = self._of_linear(shape) * self.gpu.sms / sms
            kept = 1.0 if sms == self.gpu.sms else self.parted
            return np.asarray(np.minimum(held, 1.0) * kept * base.seconds * sms)
        terms = self.families[family_of(shape)]
        if isinstance(shape, Elementwise):
            rows = np.asarray(shape.rows, dtype=np.float64)
            whole = operator.split("/")[0] in ALL_SMS
            ctas: Floats = np.full(rows.shape, float(sms)) if whole else np.minimum(rows, float(sms))
            return np.asarray(terms.kept * ctas * base.seconds)
        if isinstance(shape, DecodeAttention):
            return np.asarray(terms.kept * self._waves(shape, terms, sms) * base.seconds * sms)
        share = base.sm_s / (base.seconds * sms)
        return np.asarray((terms.kept * share * base.seconds + terms.start_s * (1.0 - share)) * sms)

    def alone(self, operator: str, shape: Shape, base: Timing, sms: int) -> Floats:
        """Share of SM cycles with a resident warp as a profiler counts it, which runs the call's kernels alone."""
        if isinstance(shape, Gemm):
            return np.asarray(self.sm_s(operator, shape, base, sms) / (base.seconds * sms))
        launch: Any = self.families[family_of(shape)].launch_s
        if isinstance(shape, DecodeAttention):
            launch = launch * np.where(self._split(shape), 2.0, 1.0)  # and one that merges the parts
        return np.asarray(self.sm_s(operator, shape, base, sms) / ((base.seconds + launch) * sms))

    def _of_linear(self, shape: Gemm) -> Floats:
        m = np.log2(np.maximum(np.asarray(shape.m, dtype=np.float64), 1.0))
        own = self.counted.get((shape.n, shape.k))
        chosen = [own] if own is not None else list(self.counted.values())
        each = [
            np.interp(m, np.log2(np.asarray(tokens, dtype=np.float64)), shares) for tokens, shares in chosen
        ]
        return np.asarray(np.mean(each, axis=0))

    def _split(self, shape: DecodeAttention) -> Any:
        return np.asarray(shape.batch) * shape.kv_heads * 2 <= CTAS * self.gpu.sms

    def _waves(self, shape: DecodeAttention, terms: Terms, sms: int) -> Floats:
        """Mean share of the SMs that the waves of CTAs hold."""
        units = np.asarray(shape.batch, dtype=np.float64) * shape.kv_heads
        # split contexts are planned to fill the whole GPU once
        units = np.where(self._split(shape), CTAS * self.gpu.sms, units)
        waves = np.maximum(units / (CTAS * sms), 1e-9)
        full = np.floor(waves)
        part = waves - full
        lasts = np.where(part > 0, np.maximum(part, terms.partial), 0.0)
        alone = np.minimum(1.0, units / sms)  # less than a wave: an SM takes one CTA before any takes two
        return np.asarray(np.where(full < 1, np.maximum(alone, part), (full + part * lasts) / (full + lasts)))


def family_of(shape: Shape) -> str:
    """Key of `Activity.families` for a shape."""
    if isinstance(shape, Elementwise):
        return "elementwise"
    if isinstance(shape, DecodeAttention):
        return "decode"
    return "prefill" if isinstance(shape, PrefillAttention) else ""


def activity_data(found: Activity) -> dict[str, Any]:
    """The JSON-like mapping that `load_activity` reads back."""
    return {
        "families": {name: asdict(terms) for name, terms in sorted(found.families.items())},
        "counted": [
            {"constants": list(key), "tokens": list(tokens), "shares": list(shares)}
            for key, (tokens, shares) in sorted(found.counted.items())
        ],
        "parted": found.parted,
    }


def load_activity(path: Path, gpu: GpuSpec, label: str, coverage: str) -> Activity:
    """The activity of a profile's file; SimctlError names it and what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        families = {
            name: read_terms(Terms, terms, f"{path}, families, {name}", positive=False)
            for name, terms in data["families"].items()
        }
        counted = {
            (int(one["constants"][0]), int(one["constants"][1])): (
                tuple(int(m) for m in one["tokens"]),
                tuple(float(share) for share in one["shares"]),
            )
            for one in data["counted"]
        }
        parted = float(data["parted"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SimctlError(
            f"Activity file '{path}' is not readable: {type(error).__name__} {error}."
        ) from error
    for name in families:
        if name not in FAMILIES:
            raise SimctlError(f"{path}: unknown family '{name}'; known: {', '.join(FAMILIES)}.")
    return Activity(gpu, families, counted, label, coverage, parted)

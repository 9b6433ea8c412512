"""The plain roofline as a curve: fixed cost plus the larger of compute and bytes, bandwidth flat beyond a knee in SMs.

No tiles and no waves. It is what the form with waves has to beat, and what is kept where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.gpu import GpuSpec
from sim.cost.measured_terms import Unbounded, read_terms
from sim.cost.operators import flops, hbm_bytes
from sim.cost.shapes import Shape, Timing


@dataclass(frozen=True)
class Flat:
    """`fixed_s` seconds a call; shares of the peak FLOP/s and bandwidth; `knee`: share of SMs that draws the latter."""

    fixed_s: float
    compute: float
    memory: float
    knee: float

    @classmethod
    def from_data(cls, terms: Mapping[str, Any], where: str) -> Flat:
        """Terms of a mapping; SimctlError names `where`."""
        return read_terms(cls, terms, where, positive=True)


@dataclass(frozen=True)
class FlatCurve(Unbounded):
    """A roofline of one operator on one GPU, without coverage limits of its own."""

    gpu: GpuSpec
    terms: Flat
    label: str
    coverage: str = ""
    extrapolation: str = "flag"

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds of one call per array element; all SMs count as busy while it works."""
        t, share = self.terms, np.asarray(sms) / self.gpu.sms
        compute = flops(shape) / (t.compute * self.gpu.peak_flops * share * clock)
        memory = hbm_bytes(shape) / (t.memory * self.gpu.hbm_bytes_per_s * np.minimum(1.0, share / t.knee))
        seconds = np.asarray(t.fixed_s + np.maximum(compute, memory))
        return Timing(seconds=seconds, sm_s=seconds * sms)

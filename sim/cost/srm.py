"""The SM-scaling roofline of Bullet (arXiv:2504.19516, section 3.2): what a pass should take on some of the SMs.

Compute grows with the SMs; bandwidth grows with them up to an inflection and stays there. Attention is one more
kernel. What the form leaves out (waves, launch costs, efficiency) is for the calibration factor alpha to absorb;
`wave_term` puts the waves' tails into the form instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.base import CostModel
from sim.cost.model import ModelSpec
from sim.cost.operators import calls, decode_shape, flops, hbm_bytes, linear_operators, prefill_shape
from sim.cost.shapes import Floats, Gemm, Ints, Launch, PrefillAttention, Shape
from sim.cost.waves import attention_blocks, gemm_blocks, idle_share

BLOCKS_PER_SM = 2  # of the GEMMs of the paper's Table 2; its attention has one


def bandwidth(peak: float, sms: Any, inflection: Any) -> Any:
    """D_p = D_peak min(1, N_p / N_d): bytes/s that `sms` SMs reach."""
    return peak * np.minimum(1.0, np.asarray(sms) / inflection)


def compute(peak: float, sms: Any, total: int) -> Any:
    """C_p = C_peak N_p / N: FLOP/s of `sms` of `total` SMs."""
    return peak * np.asarray(sms) / total


@dataclass(frozen=True)
class Srm:
    """The form for one model on one GPU; `inflection` is N_d."""

    model: ModelSpec
    sms: int
    peak_flops: float
    peak_bytes: float
    inflection: float
    wave_term: bool = False

    def kernel_s(self, shape: Shape, sms: Any, slowed: Any = 1.0) -> Floats:
        """T' = max(flop / C_p, mem / D_p) of one call; `slowed`: D_p over what is left of it beside a neighbour.

        `sms` and `slowed` broadcast against the shape's arrays, here and below.
        """
        rate = compute(self.peak_flops, sms, self.sms)
        busy = 1.0 - self._idle(shape, sms) if self.wave_term else 1.0
        moved = bandwidth(self.peak_bytes, sms, self.inflection) / slowed
        seconds: Floats = np.maximum(flops(shape) / (rate * busy), hbm_bytes(shape) / moved)
        return seconds

    @staticmethod
    def _idle(shape: Shape, sms: Any) -> Any:
        if isinstance(shape, Gemm):
            return idle_share(gemm_blocks(np.maximum(shape.m, 1), shape.n), sms, BLOCKS_PER_SM)
        if isinstance(shape, PrefillAttention):
            return idle_share(attention_blocks(np.maximum(shape.q, 1), shape.q_heads), sms)
        return 0.0

    def linear_s(self, rows: str, count: Ints, sms: Any, slowed: Any = 1.0) -> Floats:
        """All operators of a pass whose size follows `tokens` or `sequences`; nothing for none."""
        total: Floats = np.zeros(())
        for operator, times in self._linear(rows):
            total = total + times * self.kernel_s(operator.shape(count), sms, slowed)
        return np.where(np.asarray(count) > 0, total, 0.0)

    def _linear(self, rows: str) -> Iterator[tuple[Any, int]]:
        for operator in linear_operators(self.model):
            if operator.rows == rows:
                yield operator, calls(operator, self.model, None)

    def prefill_s(self, q: Ints, h: Ints, sms: Any) -> Floats:
        """Prefill attention of all layers."""
        return self.model.layers * self.kernel_s(prefill_shape(self.model, q, h), sms)

    def decode_s(self, batch: Ints, context_sum: Floats, sms: Any, slowed: Any = 1.0) -> Floats:
        """Decode attention of all layers."""
        shape = decode_shape(self.model, batch, context_sum)
        return self.model.layers * self.kernel_s(shape, sms, slowed)


def find_inflection(cost: CostModel) -> float:
    """N_d: where the form comes nearest, by least squares of the logarithm, to a decode step bound by memory."""
    probe = Launch(decode_batch=32, decode_context_sum=32 * 8192, decode_context_max=8192, graph=True)
    sizes = np.unique(np.linspace(max(1, cost.gpu.sms // 16), cost.gpu.sms, 9).astype(int))
    measured = np.log([cost.solo(probe, int(sms)).gpu_s for sms in sizes])
    knees = np.arange(1, cost.gpu.sms + 1)
    form = -np.log(bandwidth(1.0, sizes[None, :], knees[:, None]))
    off = measured - form
    spread = np.sum((off - off.mean(axis=1, keepdims=True)) ** 2, axis=1)
    return float(knees[int(np.argmin(spread))])


def make_srm(cost: CostModel, wave_term: bool = False) -> Srm:
    """The form with the data sheet's peaks and the inflection of the profile."""
    gpu = cost.gpu
    return Srm(cost.model, gpu.sms, gpu.peak_flops, gpu.hbm_bytes_per_s, find_inflection(cost), wave_term)

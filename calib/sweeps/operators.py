"""Every operator alone, on the whole GPU and on every partition size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from calib.bench import Bench
from calib.kernels import attention, elementwise, gemm
from calib.models import ROLES
from calib.sweep import Point
from calib.sweeps.common import SoloSweep, affordable, near_sizes, sizes

SKEWS = (2, 4, 8, 16, 32)  # longest context over the mean
CHUNKINGS = ((512, 2), (512, 4), (256, 4), (256, 8), (128, 8), (1024, 2), (64, 16))


class GemmSweep(SoloSweep):
    """The four linear layers of a block against tokens and SMs."""

    name = "gemm"
    weight = 16.0
    axes = ("m", "sms")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        grid = product(ROLES[:4], gemm.M_AXIS, sizes(lab, full))
        return affordable(lab, [{"kind": "gemm", "role": r, "m": m, "sms": s} for r, m, s in grid], full)


class RowSweep(SoloSweep):
    """An operator with one axis: rows."""

    axes = ("m", "sms")

    def __init__(self, name: str, weight: float, axis: Sequence[int], labels: Sequence[str] = ("",)) -> None:
        self.name, self.weight, self.axis, self.labels = name, weight, axis, labels

    def points(self, lab: Bench, full: bool) -> list[Point]:
        where = sizes(lab, full) if full or self.name == "lm_head" else [*near_sizes(lab), lab.facts.sms]
        made: list[Point] = []
        for label, m, sms in product(self.labels, self.axis, where):
            made.append({"kind": self.name, "m": m, "sms": sms} | ({"label": label} if label else {}))
        return affordable(lab, made, full)


class ReadSweep(SoloSweep):
    """Streaming reads against size and SMs."""

    name = "stream_read"
    weight = 0.7
    axes = ("size", "sms")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        grid = product(elementwise.READ_AXIS, sizes(lab, full))
        return [{"kind": "stream_read", "size": size, "sms": sms} for size, sms in grid]


class PrefillAttentionSweep(SoloSweep):
    """Chunk against prefix, FA3 on every size and FA2 (or SDPA without FlashInfer) on some; several chunks."""

    name = "prefill_attention"
    weight = 12.0
    axes = ("q", "h", "sms")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        some = sizes(lab, full) if full else [*near_sizes(lab)[1::2], lab.facts.sms]
        for backend, where in (("fa3", sizes(lab, full)), ("fa2", some)):
            for q, h, sms in product(attention.Q_AXIS, attention.H_AXIS, where):
                made.append(self._point([q], [h], backend, sms))
            for (q, count), h, sms in product(CHUNKINGS, (0, 2048), some):
                made.append(self._point([q] * count, [h] * count, backend, sms))
        return affordable(lab, made, full)

    def _point(self, q: list[int], h: list[int], backend: str, sms: int) -> Point:
        return {"kind": self.name, "q": q, "h": h, "attention": backend, "sms": sms}


class DecodeAttentionSweep(SoloSweep):
    """Batch against context; skewed batches of the same mean; planned for graphs and, on some sizes, not."""

    name = "decode_attention"
    weight = 9.0
    axes = ("contexts", "batch", "sms")
    most_tokens = 4 << 20

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        for batch, context, sms in product(attention.BATCH_AXIS, attention.CONTEXT_AXIS, sizes(lab, full)):
            made.append(self._point([context] * batch, sms))
        some = sizes(lab, full) if full else [*near_sizes(lab)[2::3], lab.facts.sms]
        for skew, batch, mean, sms in product(SKEWS, (16, 64, 128), (512, 2048, 4096), some):
            if skew < batch:
                made.append(self._point(skewed(batch, mean, skew), sms))
        fits = [p for p in made if sum(p["contexts"]) <= self.most_tokens]
        return affordable(lab, fits, full)

    def _point(self, contexts: list[int], sms: int) -> Point:
        return {
            "kind": self.name,
            "contexts": contexts,
            "batch": len(contexts),
            "attention": "fa2",
            "sms": sms,
        }


def skewed(batch: int, mean: int, skew: int) -> list[int]:
    """`batch` contexts of mean `mean`: one of skew x mean, the others equal and shorter."""
    longest = skew * mean
    rest = max(1, (batch * mean - longest) // (batch - 1))
    return [longest] + [rest] * (batch - 1)


def operator_sweeps() -> list[Any]:
    """The sweeps of this module."""
    return [
        GemmSweep(),
        RowSweep("lm_head", 1.5, gemm.HEAD_M_AXIS),
        PrefillAttentionSweep(),
        DecodeAttentionSweep(),
        RowSweep("norm", 0.7, elementwise.M_AXIS),
        RowSweep("rope", 0.7, elementwise.M_AXIS),
        RowSweep("activation", 0.7, elementwise.M_AXIS),
        RowSweep("kv_write", 0.7, elementwise.M_AXIS),
        RowSweep("sampling", 0.5, elementwise.ROWS_AXIS, ("greedy", "random")),
        ReadSweep(),
    ]

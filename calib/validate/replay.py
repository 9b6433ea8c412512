"""Replay: the simulator prices the very launches that the GPU ran, one by one, beside the very neighbours they had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calib.validate.clock import Busy, heat_factors
from sim.cost.attention import AttentionMode
from sim.cost.pairs import compile_pairs, pair_factor
from sim.cost.profiled import ProfiledCost
from sim.cost.step import (
    decode_attention_s,
    decode_pass_s,
    dense_s,
    fused_saving_s,
    head_s,
    overhang_s,
    prefill_attention_s,
    step_s,
)
from sim.engine.layout import DECODE_LANE, PREFILL_LANE

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """A logged launch: new tokens and history of each chunk, decodes, the sum of their contexts, and by how many
    tokens the longest of them stands out. `fused`: its attention ran in one kernel; `ahead`: it was launched behind a
    step that still ran; `rows`: of its linear layers, padding included (0: as the simulator pads)."""

    lane: int
    sms: int
    layers: tuple[int, int]
    chunks: tuple[tuple[int, int], ...]
    batch: int
    context: int
    overhang: int
    start_s: float
    end_s: float
    fused: bool = False
    ahead: bool = False
    rows: int = 0


def shapes_of(steps: pd.DataFrame) -> list[Shape]:
    """The rows of a step log."""
    return [
        Shape(
            int(row.lane),
            int(row.sms),
            (int(row.first_layer), int(row.last_layer)),
            tuple(zip(_numbers(row.q_tokens), _numbers(row.history_tokens), strict=True)),
            int(row.decode_batch),
            int(row.context_sum),
            int(row.overhang),
            float(row.start_s),
            float(row.end_s),
            # logs of serial executors do not have these columns
            bool(getattr(row, "fused", 0)),
            int(getattr(row, "ahead", 0)) > 0,
            int(getattr(row, "rows", 0)),
        )
        for row in steps.itertuples(index=False)
    ]


def _numbers(cell: str) -> list[int]:
    return [int(part) for part in cell.split(";")] if cell else []


# the executor's decode stream, whatever the policy's knob says
DECODE_PRIORITY = "high"

_Neighbour = tuple[Shape, tuple[float, float]]


class Replay:
    """Prices of one run's launches: tables as large as the largest of them, on every SM set that it used."""

    def __init__(
        self, cost: ProfiledCost, shapes: list[Shape], attention: AttentionMode | None = None
    ) -> None:
        self._layers, total = cost.model.layers, cost.gpu.sms
        rows = [max(_rows(s), s.rows if s.chunks else 0) for s in shapes]
        seqs = max(len(s.chunks) + s.batch for s in shapes)
        self._sizes = [total, *sorted({s.sms for s in shapes} - {total})]
        partitions = self._sizes[1:]
        self._p: Any = cost.compile(
            max_tokens=max(*rows, seqs),
            max_seqs=seqs,
            max_context=cost.model.max_context,
            partitions=partitions,
            compiled=False,
            attention=attention,
        )
        pairs = _pairs(shapes)
        self._x: Any = compile_pairs(cost, partitions, pairs, priority=DECODE_PRIORITY) if pairs else None

    def seconds(self, shapes: list[Shape]) -> tuple[Floats, Floats]:
        """Predicted seconds of every launch, in the order given (the order of their ends): the whole, and the GPU's."""
        solo = self.solo(shapes)
        whole = self._seconds(shapes, solo)
        return whole, whole - np.array([total - gpu_s for total, gpu_s in solo])

    def _seconds(self, shapes: list[Shape], solo: list[tuple[float, float]]) -> Floats:
        if self._x is None:
            return np.array([total for total, _ in solo])
        lanes = {
            lane: [i for i, s in enumerate(shapes) if s.lane == lane] for lane in (PREFILL_LANE, DECODE_LANE)
        }
        return np.array(
            [
                self._beside(
                    shape,
                    solo[i],
                    [(shapes[k], solo[k]) for k in lanes[1 - shape.lane] if _meet(shape, shapes[k])],
                )
                for i, shape in enumerate(shapes)
            ]
        )

    def solo(self, shapes: list[Shape]) -> list[tuple[float, float]]:
        """(seconds of the whole launch, of these the GPU's) of each, alone on its SMs, at the clock that it found."""
        parts = [self._parts(shape) for shape in shapes]
        busy = [
            Busy(s.lane, s.sms, _rows(s) if s.chunks else 0, s.batch, s.start_s, s.end_s, gpu_s)
            for s, (gpu_s, _, _) in zip(shapes, parts, strict=True)
        ]
        hot = heat_factors(self._p, self._sizes[0], busy)
        return [
            (step_s(self._p, gpu_s * factor, host_s, gap_s, 0), gpu_s * factor)
            for (gpu_s, host_s, gap_s), factor in zip(parts, hot, strict=True)
        ]

    def _parts(self, s: Shape) -> tuple[float, float, float]:
        """GPU seconds at a settled clock, host seconds beside them, and the gap of a launch alone on its SMs."""
        p, part = self._p, self._sizes.index(s.sms)
        if not s.chunks:
            gpu_s = decode_pass_s(p, part, s.batch, s.context) + overhang_s(p, part, s.batch, s.overhang)
            if s.ahead:
                return gpu_s, 0.0, 0.0
            return gpu_s, p.host_graph_s[s.batch], p.gap_graph_s[s.batch]
        new, rows = sum(q for q, _ in s.chunks), len(s.chunks) + s.batch
        gpu_s = dense_s(p, part, max(new + s.batch, s.rows), False)
        prefill_s = sum(prefill_attention_s(p, part, q, h) for q, h in s.chunks)
        decode_s = decode_attention_s(p, part, s.batch, s.context) + overhang_s(p, part, s.batch, s.overhang)
        gpu_s += prefill_s - (len(s.chunks) - 1) * p.pre_fixed_s[part] + decode_s
        if s.fused:
            pairs = sum(q * h + q * (q + 1) // 2 for q, h in s.chunks)
            apart_s = prefill_s + decode_s
            gpu_s -= fused_saving_s(p, len(s.chunks), new, pairs, s.batch, s.context, apart_s)
        share = (s.layers[1] - s.layers[0]) / self._layers
        gpu_s *= share
        gap_s = p.gap_eager_s[rows] * share + (p.gap_group_s if share < 1.0 else 0.0)
        if s.layers[1] == self._layers:
            gpu_s += head_s(p, part, rows)
        return gpu_s, p.host_eager_s[rows] * share, gap_s

    def _beside(self, shape: Shape, solo: tuple[float, float], neighbours: list[_Neighbour]) -> float:
        """Seconds with the slowdowns of the neighbours while they ran, and none between them."""
        total, gpu_s = solo
        now, left = shape.start_s, total
        for other, beside_s in sorted(neighbours, key=lambda pair: pair[0].start_s):
            gap = max(0.0, other.start_s - now)
            if left <= gap:
                return now + left - shape.start_s
            now, left = now + gap, left - gap
            # the neighbour counts while it is on the GPU itself, for all of its time but what the host takes
            host_s = beside_s[0] - min(beside_s)
            on_gpu = max(0.0, 1.0 - host_s / (other.end_s - other.start_s))
            factor = 1.0 + (self._slowdown(shape, other) - 1.0) * min(1.0, gpu_s / total) * on_gpu
            together = max(0.0, other.end_s - now)
            if left * factor <= together:
                return now + left * factor - shape.start_s
            now, left = now + together, left - together / factor
        return now + left - shape.start_s

    def _slowdown(self, shape: Shape, other: Shape) -> float:
        prefill, decode = (shape, other) if shape.lane == PREFILL_LANE else (other, shape)
        at = self._sizes.index(prefill.sms) * len(self._sizes) + self._sizes.index(decode.sms)
        table = self._x.factor_prefill if shape.lane == PREFILL_LANE else self._x.factor_decode
        history = sum(h for _, h in prefill.chunks) // max(1, len(prefill.chunks))
        tokens, mean = sum(q for q, _ in prefill.chunks), decode.context // max(1, decode.batch)
        return float(
            pair_factor(self._x, table, int(self._x.config[at]), tokens, history, decode.batch, mean)
        )


def _rows(s: Shape) -> int:
    return sum(q for q, _ in s.chunks) + s.batch


def _meet(a: Shape, b: Shape) -> bool:
    return a.start_s < b.end_s and b.start_s < a.end_s


def _pairs(shapes: list[Shape]) -> list[tuple[int, int]]:
    """(prefill SMs, decode SMs) that ran side by side."""
    found = {}
    last: dict[int, Shape] = {}
    for shape in sorted(shapes, key=lambda s: s.start_s):
        other = last.get(1 - shape.lane)
        if other is not None and _meet(shape, other):
            pair = (shape.sms, other.sms) if shape.lane == PREFILL_LANE else (other.sms, shape.sms)
            found[pair] = None
        held = last.get(shape.lane)
        if held is None or shape.end_s > held.end_s:
            last[shape.lane] = shape
    return list(found)

"""Two things at a time: a prefill layer beside a decode step, pairs of operators, staggered starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from calib.bench import Bench
from calib.partition import HIGH, NORMAL
from calib.sweep import Point
from calib.sweeps.common import PairSweep, near_sizes, side, side_row, size_beside
from calib.sweeps.steps import MOST_CONTEXT, decode_point

Q = (256, 512, 1024, 2048, 4096, 8192)
H = (0, 2048, 8192)
BATCH = (8, 32, 64, 128, 256)
CONTEXT = (512, 2048, 8192)
# (mode, b's priority) and its share of the points measured in a given time
MODES = (
    ("disjoint", NORMAL, 0.50),
    ("whole", NORMAL, 0.13),
    ("streams", NORMAL, 0.10),
    ("whole", HIGH, 0.08),
    ("streams", HIGH, 0.05),
    ("half", NORMAL, 0.09),
    ("half", HIGH, 0.05),
)


def prefill_shape(q: int, h: int, layers: int = 1) -> Point:
    """Layers over one chunk."""
    return {"kind": "prefill_layer", "q": [q], "h": [h], "layers": layers, "attention": "fa3"}


def decode_shape(lab: Bench, batch: int, context: int) -> Point:
    """A whole decode step, without its partition."""
    point = decode_point(batch, context, lab.model.layers, 0)
    del point["sms"]
    return point


def splits(lab: Bench, full: bool) -> list[int]:
    """SMs of the prefill side."""
    total, available = lab.facts.sms, lab.sizes()
    every = [size for size in available if size < total and total - size in available and size >= 16]
    near = [size for size in every if size % 8 == 0 and total - size >= 16]
    return near if full else [size for size in near_sizes(lab) if size in near]


def shared_out(points: Sequence[Point], seed: int) -> list[Point]:
    """Points such that any prefix holds each mode by its share, and within a mode every split equally often.

    Shapes are in random order within a mode and split. On a space of this many axes corners first would spend
    the whole of a short budget on corners.
    """
    rng = np.random.default_rng(seed)
    shares, queues = [share for _, _, share in MODES], []
    for mode, priority, _ in MODES:
        mine = [p for p in points if (p["mode"], p["priority"]) == (mode, priority)]
        cells: dict[int, list[Point]] = {}
        for i in rng.permutation(len(mine)):
            cells.setdefault(mine[i]["sms"], []).append(mine[i])
        turns = [(turn, rng.random(), p) for cell in cells.values() for turn, p in enumerate(cell)]
        queues.append([p for _, _, p in sorted(turns, key=lambda item: item[:2])])
    ordered: list[Point] = []
    taken = [0] * len(queues)
    while len(ordered) < len(points):
        # next comes the mode that is furthest behind its share
        due = [
            (n + 1) / share if n < len(queue) else float("inf")
            for n, share, queue in zip(taken, shares, queues, strict=True)
        ]
        i = int(np.argmin(due))
        ordered.append(queues[i][taken[i]])
        taken[i] += 1
    return ordered


class CorunSweep(PairSweep):
    """A whole prefill layer beside a whole decode step: the surface that contention is read from."""

    name = "corun"
    weight = 24.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        for mode, priority, _ in MODES:
            where = [lab.facts.sms] if mode == "streams" else splits(lab, full)
            for sms, q, h, batch, context in product(where, Q, H, BATCH, CONTEXT):
                beside = size_beside(lab, sms, mode)
                if beside is None or batch * context > MOST_CONTEXT:
                    continue
                made.append(
                    {
                        "a": prefill_shape(q, h),
                        "b": decode_shape(lab, batch, context),
                        "sms": sms,
                        "sms_b": beside,
                        "mode": mode,
                        "priority": priority,
                    }
                )
        return made

    def order(self, lab: Bench, points: Sequence[Point], seed: int) -> list[Point]:
        return shared_out(points, seed)


class OperatorPairSweep(PairSweep):
    """Single operators beside each other: what extends contention to shapes off the surface."""

    name = "pairs"
    weight = 5.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        first: list[Point] = [
            {"kind": "gemm", "role": "gate_up", "m": 2048},
            {"kind": "gemm", "role": "down", "m": 512},
            {"kind": "prefill_attention", "q": [2048], "h": [4096], "attention": "fa3"},
            {"kind": "prefill_attention", "q": [512], "h": [8192], "attention": "fa3"},
        ]
        second: list[Point] = [
            {"kind": "gemm", "role": "gate_up", "m": 32},
            {"kind": "decode_attention", "contexts": [4096] * 32, "attention": "fa2"},
            {"kind": "decode_attention", "contexts": [1024] * 128, "attention": "fa2"},
            {"kind": "stream_read", "size": 256 << 20},
        ]
        made: list[Point] = []
        for mode, priority, _ in MODES:
            where = [lab.facts.sms] if mode == "streams" else splits(lab, full)
            for a, b, sms in product(first, second, where):
                beside = size_beside(lab, sms, mode)
                if beside is not None:
                    made.append(
                        {
                            "a": a,
                            "b": b,
                            "sms": sms,
                            "sms_b": beside,
                            "mode": mode,
                            "priority": priority,
                        }
                    )
        return made

    def order(self, lab: Bench, points: Sequence[Point], seed: int) -> list[Point]:
        return shared_out(points, seed)


class StaggerSweep(PairSweep):
    """Eight prefill layers while a burst of decode steps starts later and ends earlier: tests the rates of the
    steady surface on partial overlap."""

    name = "stagger"
    weight = 3.0
    axes = ("sms", "q", "batch", "delay", "share")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        where = splits(lab, full)
        where = where if full else where[1::2]
        grid = product(where, (1024, 4096), (32, 128), (0.0, 0.2, 0.5), (0.25, 0.6))
        return [
            {
                "a": prefill_shape(q, 0, layers=8),
                "b": decode_shape(lab, batch, 1024),
                "sms": sms,
                "sms_b": lab.facts.sms - sms,
                "mode": "disjoint",
                **{"q": q, "batch": batch, "delay": delay, "share": share},
            }
            for sms, q, batch, delay, share in grid
        ]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        a, b = side(lab, point["a"], point["sms"]), side(lab, point["b"], point["sms_b"])
        alone_s = lab.time(a.kernel, a.sms).median_s
        result = lab.stagger(a, b, point["mode"], point["delay"] * alone_s, point["share"])
        row = side_row(a, b, point["mode"], result.a, result.alone_a)
        return [{**row, "neighbour_start_s": result.start_s, "neighbour_end_s": result.end_s}]

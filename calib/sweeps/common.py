"""What the sweeps share: which partition sizes, how a solo time or a co-run becomes rows."""

from __future__ import annotations

from typing import Any

from calib.analytic import expected_s
from calib.bench import Bench, Side
from calib.kernels import make
from calib.kernels.base import Kernel
from calib.measure import Sample
from calib.partition import NORMAL
from calib.rows import as_neighbour
from calib.sweep import Point, Sweep

LONGEST_QUICK_S = 0.02  # solo points that would take longer a launch are left out
LONGEST_FULL_S = 0.2


def sizes(lab: Bench, full: bool) -> list[int]:
    """Partition sizes to time on, the whole GPU included: all, or about eight of side A with their remainders."""
    total, available = lab.facts.sms, lab.sizes()
    if full:
        return available
    near = near_sizes(lab)
    return sorted({size for a in near for size in (a, total - a) if size in available} | {total})


def near_sizes(lab: Bench) -> list[int]:
    """Sides A for quick sweeps: the smallest, then every second one that leaves as much as the smallest."""
    total, available = lab.facts.sms, lab.sizes()
    splits = [size for size in available if size < total and total - size in available]
    smallest = min((size for size in splits if size >= 8), default=min(splits, default=total))
    legal = [
        size for size in splits if size >= smallest and size % smallest == 0 and total - size >= smallest
    ]
    return sorted({*legal[:1], *legal[1::2]})


def affordable(lab: Bench, points: list[Point], full: bool) -> list[Point]:
    """Points whose kernel is expected to take a bearable time on its SMs."""
    longest = LONGEST_FULL_S if full else LONGEST_QUICK_S
    return [p for p in points if expected_s(make(lab.model, p), lab.facts, p["sms"]) <= longest]


def solo_row(kernel: Kernel, sms: int, sample: Sample, **more: Any) -> dict[str, Any]:
    """The row of a kernel that ran alone."""
    return {
        "kind": kernel.kind,
        "label": kernel.label,
        **kernel.columns(),
        "sms": sms,
        "flops": kernel.flops,
        "bytes": kernel.bytes,
        **sample.columns(),
        **more,
    }


class SoloSweep(Sweep):
    """Points with kind, shape, `sms` and optionally `launch`."""

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        kernel = make(lab.model, point)
        sample = lab.time(kernel, point["sms"], point.get("launch", "graph"))
        return [solo_row(kernel, point["sms"], sample)]


def side(lab: Bench, shape: Point, sms: int, priority: str = NORMAL) -> Side:
    """One side of a co-run."""
    return Side(make(lab.model, shape), sms, priority)


def side_row(mine: Side, other: Side, mode: str, sample: Sample, alone: Sample) -> dict[str, Any]:
    """The row of one side of a co-run."""
    kernel = other.kernel
    neighbour = {"kind": kernel.kind, "label": kernel.label, **kernel.columns()}
    return {
        **solo_row(mine.kernel, mine.sms, sample),
        "priority": mine.priority,
        "alone_s": alone.median_s,
        **as_neighbour({**neighbour, "sms": other.sms, "priority": other.priority, "mode": mode}),
    }


class PairSweep(Sweep):
    """Points with shapes `a` and `b`, sizes `sms` (of a) and `sms_b`, `mode` and b's `priority`."""

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        a = side(lab, point["a"], point["sms"])
        b = side(lab, point["b"], point["sms_b"], point.get("priority", NORMAL))
        pair = lab.pair(a, b, point["mode"])
        return [
            side_row(a, b, point["mode"], pair.a, pair.alone_a),
            side_row(b, a, point["mode"], pair.b, pair.alone_b),
        ]

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        a, b = side(lab, point["a"], point["sms"]), side(lab, point["b"], point["sms_b"])
        neighbour = {"kind": b.kernel.kind, **b.kernel.columns(), "sms": b.sms, "mode": point["mode"]}
        return {"kind": a.kernel.kind, **a.kernel.columns(), "sms": a.sms, **as_neighbour(neighbour)}


def size_beside(lab: Bench, sms: int, mode: str) -> int | None:
    """SMs of side b beside `sms` of side a: the rest, the rest and half of a's, or all; None if there is no such
    partition."""
    total = lab.facts.sms
    if mode in ("whole", "streams"):
        return total
    wanted = total - sms if mode == "disjoint" else total - sms // 2
    return wanted if wanted in lab.sizes() else None

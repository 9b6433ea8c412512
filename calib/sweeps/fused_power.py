"""Watts and joules of mixed attention by variant, each held for a second or two; POD's own wrapper runs in no graph."""

from __future__ import annotations

from typing import Any

from calib.bench import Bench
from calib.energy import REST_S
from calib.sweep import Point, Sweep
from calib.sweeps.power import SECONDS, measure_solo

VARIANTS = ("serial_fa2", "batch_pod", "serial_fa3", "streams_fa3", "batched")
MIXES = ((2048, 8192, 64, 8192), (1024, 0, 128, 1024))


class FusedPowerSweep(Sweep):
    """Each variant of a mixed batch rested, then held."""

    name = "fused_power"
    weight = 2.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made = [
            {"q": [q], "h": [h], "contexts": [context] * batch, "attention": variant}
            for q, h, batch, context in MIXES
            for variant in VARIANTS
        ]
        fixed = {"kind": "fused_attention", "sms": lab.facts.sms, "seconds": SECONDS[full]}
        return [{**fixed, **point, "late": turn} for turn, point in enumerate(made)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        return measure_solo(lab, point, point["seconds"], REST_S)

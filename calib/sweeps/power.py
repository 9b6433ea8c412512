"""Watts and clocks of operators, steps and co-runs in runs of seconds, and synthetic CTAs by every rule."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from calib.bench import Bench, Side
from calib.energy import REST_S, Drawn
from calib.kernels import make
from calib.kernels.tickets import ALONE, RULES, Mix
from calib.sweep import Point, Sweep
from calib.sweeps.common import side, side_row, size_beside, solo_row
from calib.sweeps.corun import decode_shape, prefill_shape
from calib.sweeps.steps import decode_point

SECONDS = {False: 1.2, True: 1.6}
MIXES = 50


class PowerSweep(Sweep):
    """Each point rested and then held for a second or two: two rows, the hot one with watts and joules."""

    name = "power"
    weight = 8.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total, layers = lab.facts.sms, lab.model.layers
        prefill = {"kind": "prefill_step", "layers": layers, "attention": "fa3"}
        mixed = {"kind": "mixed_step", "layers": layers, "attention": "fa3"}
        fused = {"kind": "fused_attention", "q": [1024], "h": [8192], "contexts": [4096] * 64}
        solo: list[Point] = [
            *({"kind": "gemm", "role": "gate_up", "m": m} for m in (2048, 64, 512, 8192)),
            {"kind": "gemm", "role": "down", "m": 2048},
            *(
                {"kind": "prefill_attention", "q": [2048], "h": [4096], "attention": a}
                for a in ("fa3", "fa2")
            ),
            *(
                {"kind": "decode_attention", "contexts": [context] * batch, "attention": "fa2"}
                for batch, context in ((64, 4096), (256, 4096), (128, 1024))
            ),
            *({**fused, "attention": variant} for variant in ("serial_fa2", "batch_pod", "serial_fa3")),
            {"kind": "stream_read", "size": 1 << 30},
            decode_point(64, 2048, layers, total),
            {**prefill, "q": [2048], "h": [0]},
            {**mixed, "q": [1024], "h": [1024], "contexts": [2048] * 64},
            decode_point(256, 1024, layers, total),
            {**prefill, "q": [512], "h": [4096]},
            {**mixed, "q": [448], "h": [4096], "contexts": [1024] * 64},
            decode_point(8, 1024, layers, total),
            *({"kind": kind, "m": 4096} for kind in ("norm", "activation", "rope", "kv_write")),
            {"kind": "lm_head", "m": 256},
            *({"kind": "gemm", "role": "gate_up", "m": 2048, "sms": s} for s in (32, 64, 96)),
            *(
                {"kind": "decode_attention", "contexts": [4096] * 64, "attention": "fa2", "sms": s}
                for s in (32, 64)
            ),
        ]
        made = [{"sms": total, **point} for point in solo if point.get("sms", total) in lab.sizes()]
        made[14:14] = self._pairs(lab)
        return [{**point, "seconds": SECONDS[full], "late": turn} for turn, point in enumerate(made)]

    def _pairs(self, lab: Bench) -> list[Point]:
        a, b = prefill_shape(2048, 0), decode_shape(lab, 64, 2048)
        cases = [("disjoint", sms) for sms in (64, 96, 112)] + [("streams", lab.facts.sms)]
        return [
            {"a": a, "b": b, "mode": mode, "sms": sms, "sms_b": size_beside(lab, sms, mode)}
            for mode, sms in cases
            if size_beside(lab, sms, mode) is not None
        ]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        return (measure_pair if "a" in point else measure_solo)(lab, point, point["seconds"], REST_S)

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return super().shape(lab, point["a"] | {"sms": point["sms"]} if "a" in point else point)


def measure_solo(lab: Bench, point: Point, seconds: float, rest_s: float) -> list[dict[str, Any]]:
    """The rested row and the hot one of a kernel held for `seconds`."""
    kernel = make(lab.model, point)
    drawn = lab.draw((Side(kernel, point["sms"]),), "", seconds, rest_s)
    rested = solo_row(kernel, point["sms"], drawn.cold[0], elapsed_s=0.0)
    hot = solo_row(kernel, point["sms"], drawn.hot[0], **board_columns(drawn))
    if drawn.power_w is not None:
        hot["energy_j"] = drawn.power_w * drawn.hot[0].median_s
    return [rested, hot]


def measure_pair(lab: Bench, point: Point, seconds: float, rest_s: float) -> list[dict[str, Any]]:
    """A row for each side of two that run beside each other for `seconds`; watts are the board's."""
    a, b = side(lab, point["a"], point["sms"]), side(lab, point["b"], point["sms_b"])
    drawn = lab.draw((a, b), point["mode"], seconds, rest_s)
    rows = [side_row(a, b, point["mode"], drawn.hot[0], drawn.cold[0])]
    rows.append(side_row(b, a, point["mode"], drawn.hot[1], drawn.cold[1]))
    return [{**row, **board_columns(drawn)} for row in rows]


def board_columns(drawn: Drawn) -> dict[str, Any]:
    """Board watts by the counter where there is one, performance counters, and how long the run was."""
    watts = {} if drawn.power_w is None else {"power_w": drawn.power_w}
    return {**watts, **drawn.counters, "elapsed_s": drawn.seconds}


# jobs and loops of mixes that say what each kind costs beside the other; `seed` tells them from the random ones
BESIDE_JOBS = ((132, 132), (264, 264), (132, 264), (264, 132))
BESIDE_WORK = ((200, 60), (100, 100))
BESIDE_SEED = 2000


class TicketSweep(Sweep):
    """Random mixes of synthetic CTAs by every rule, their base times, the stress that finds a lock, and what each kind
    costs beside the other."""

    name = "tickets"
    weight = 2.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total = lab.facts.sms
        made: list[Point] = []
        for kind, k, waves in product(ALONE, (1, 2, 4), (0, 1, 3)):
            # one CTA, a full wave of the SMs' slots, three waves
            count = max(1, waves * total * k)
            jobs = (count, 0) if kind == "compute_alone" else (0, count)
            made.append(_mix(kind, jobs, (120, 60), k, 0.0, 0, total))
        rng = np.random.default_rng(40)
        for draw in range(MIXES):
            jobs = (int(2 ** rng.uniform(4.5, 9.3)), int(2 ** rng.uniform(4.5, 10)))
            work = (int(rng.uniform(40, 250)), int(rng.uniform(20, 120)))
            k, spread = int(rng.choice([2, 2, 4])), float(rng.choice([0.0, 0.0, 0.5]))
            for rule in RULES:
                made.append(_mix(rule, jobs, work, k, spread, draw, total))
            for kind, alone in zip(ALONE, ((jobs[0], 0), (0, jobs[1])), strict=True):
                made.append(_mix(kind, alone, work, k, spread, draw, total))
        small = [size for size in (8, 16, 64, 100) if size in lab.sizes()]
        for draw, sms in enumerate(small * 4):
            jobs = (int(rng.integers(1, 900)), int(rng.integers(1, 900)))
            for rule in RULES:
                made.append(_mix(rule, jobs, (20, 10), 4, 1.5, 1000 + draw, sms))
        for draw, (jobs, work, k) in enumerate(product(BESIDE_JOBS, BESIDE_WORK, (2, 4))):
            for rule in ("proportional", "cta_parallel"):
                made.append(_mix(rule, jobs, work, k, 0.0, BESIDE_SEED + draw, total))
        return [{**point, "late": i} for i, point in enumerate(made)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        mix = Mix(**point["mix"])
        ran = lab.mix(mix, point["sms"])
        columns = {"sms": point["sms"], "flops": mix.flops, "bytes": mix.bytes, "seed": mix.seed}
        return [{**mix.columns(), **columns, **ran.sample.columns(), "span_s": ran.span_s}]

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return {**Mix(**point["mix"]).columns(), "sms": point["sms"]}


def _mix(
    rule: str, jobs: tuple[int, int], work: tuple[int, int], k: int, spread: float, seed: int, sms: int
) -> Point:
    fields = dict(
        zip(("computes", "bandwidths", "compute_work", "bandwidth_work"), (*jobs, *work), strict=True)
    )
    return {"mix": {"rule": rule, **fields, "ctas_per_sm": k, "spread": spread, "seed": seed}, "sms": sms}

"""Watts of mixes drawn at random, of work with host pauses, and how fast the clock follows a change of work."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from calib.bench import Bench, Side
from calib.energy import Phased, Turn
from calib.kernels import make
from calib.measure import Sample
from calib.sweep import Point, Sweep
from calib.sweeps.common import size_beside, solo_row
from calib.sweeps.corun import decode_shape, prefill_shape
from calib.sweeps.power import board_columns, measure_pair, measure_solo
from calib.sweeps.steps import decode_point, mixed_shape

HELD_S = 1.0
REST_S = 0.15
DRAWS = 8  # of each kind of mix
GAPS_S = (0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.3)
BINS_S = (0.01, 0.2, 0.1)  # bins of a phase: fine ones, until then, coarse ones
SETTLED = 0.5  # share of an alternating run from which on its times count


class PowerMixSweep(Sweep):
    """Mixes that no fit may use, drawn from the seed: two sides, mixed, decode and prefill steps, fused attention,
    single operators; and a few fixed points of the power sweep, to tell one card from another."""

    name = "power_mix"
    weight = 8.0
    axes = ("late",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def points(self, lab: Bench, full: bool) -> list[Point]:
        rng = np.random.default_rng([self.seed, 60])
        kinds: list[Callable[[Bench, np.random.Generator], Point]] = [
            _pair,
            _mixed,
            _decode,
            _fused,
            _prefill,
            _operator,
        ]
        made = [draw(lab, rng) for _ in range(DRAWS if full else 2) for draw in kinds]
        # a fixed point after every fifth: whatever is cut off, both are there
        fixed = _fixed(lab)
        for i, point in enumerate(fixed):
            made.insert(min(len(made), 3 + 6 * i), point)
        return [{**point, "late": turn} for turn, point in enumerate(made)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        return (measure_pair if "a" in point else measure_solo)(lab, point, HELD_S, REST_S)

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return super().shape(lab, point["a"] | {"sms": point["sms"]} if "a" in point else point)


def _whole(lab: Bench, kind: str) -> Point:
    return {"kind": kind, "layers": lab.model.layers, "attention": "fa3", "sms": lab.facts.sms}


def _log(rng: np.random.Generator, low: float, high: float) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))


def _pair(lab: Bench, rng: np.random.Generator) -> Point:
    sms = int(rng.choice([size for size in range(32, 121, 8) if size_beside(lab, size, "disjoint")]))
    a = prefill_shape(_log(rng, 256, 6000), int(rng.choice([0, 0, 1024, 4096])))
    b = decode_shape(lab, _log(rng, 8, 160), _log(rng, 400, 5000))
    return {"a": a, "b": b, "mode": "disjoint", "sms": sms, "sms_b": size_beside(lab, sms, "disjoint")}


def _mixed(lab: Bench, rng: np.random.Generator) -> Point:
    return {**_whole(lab, "mixed_step"), **mixed_shape(rng, lab.model.layers)}


def _decode(lab: Bench, rng: np.random.Generator) -> Point:
    return decode_point(_log(rng, 1, 240), _log(rng, 200, 4000), lab.model.layers, lab.facts.sms)


def _prefill(lab: Bench, rng: np.random.Generator) -> Point:
    return {
        **_whole(lab, "prefill_step"),
        "q": [_log(rng, 64, 4096)],
        "h": [int(rng.choice([0, 0, 2000, 7000]))],
    }


def _fused(lab: Bench, rng: np.random.Generator) -> Point:
    shape = {
        "q": [_log(rng, 256, 2048)],
        "h": [_log(rng, 1024, 12000)],
        "contexts": [_log(rng, 800, 9000)] * _log(rng, 16, 128),
    }
    variant = str(rng.choice(["serial_fa2", "serial_fa3", "batch_pod"]))
    return {"kind": "fused_attention", **shape, "attention": variant, "sms": lab.facts.sms}


def _operator(lab: Bench, rng: np.random.Generator) -> Point:
    role = str(rng.choice(["qkv", "o", "gate_up", "down", "norm", "activation", "rope"]))
    if role in ("norm", "activation", "rope"):
        return {"kind": role, "m": _log(rng, 512, 8000), "sms": lab.facts.sms}
    sms = int(rng.choice([size for size in (132, 132, 100, 64, 24, 8) if size in lab.sizes()]))
    return {"kind": "gemm", "role": role, "m": _log(rng, 16, 6000), "sms": sms}


def _fixed(lab: Bench) -> list[Point]:
    """Points of the power sweep, and light ones, which show what the board draws whatever it does."""
    total = lab.facts.sms
    gate_up = {"kind": "gemm", "role": "gate_up", "m": 2048}
    made: list[Point] = [
        {**gate_up, "sms": total},
        {"kind": "stream_read", "size": 1 << 30, "sms": 8},
        decode_point(64, 2048, lab.model.layers, total),
        {**gate_up, "sms": 8},
        {"kind": "decode_attention", "contexts": [4096] * 64, "attention": "fa2", "sms": total},
        {"kind": "stream_read", "size": 1 << 30, "sms": total},
        {**gate_up, "sms": 32},
        {"kind": "rope", "m": 4096, "sms": total},
        {"kind": "norm", "m": 4096, "sms": total},
        {"kind": "stream_read", "size": 1 << 30, "sms": 32},
    ]
    return [point for point in made if point["sms"] in lab.sizes()]


class PowerDutySweep(Sweep):
    """Steps with pauses of the host between them: what the board draws while nothing is in flight."""

    name = "power_duty"
    weight = 2.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total = lab.facts.sms
        work: list[Point] = [
            decode_point(64, 2048, 4, total),
            {"kind": "prefill_layer", "q": [2048], "h": [0], "layers": 1, "attention": "fa3", "sms": total},
            decode_point(8, 1024, lab.model.layers, total),
        ]
        order = [0, 3, 6, 1, 4, 2, 5]
        made = [{**kind, "gap_s": GAPS_S[i]} for i in order for kind in (work if full else work[:1])]
        return [{**point, "late": turn} for turn, point in enumerate(made)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        kernel = make(lab.model, point)
        drawn = lab.paced(Side(kernel, point["sms"]), point["gap_s"], HELD_S)
        row = solo_row(kernel, point["sms"], drawn.hot[0], **board_columns(drawn))
        return [{**row, "gap_s": drawn.gap_s}]


class ClockStepSweep(Sweep):
    """Two kinds of work in turn without a pause: how clock, watts and times follow. Long phases give a row for each
    stretch of time; where they alternate quickly, a row a kind over the settled part."""

    name = "clock_step"
    weight = 2.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        decode = decode_point(64, 2048, 4, lab.facts.sms)
        prefill = {"kind": "prefill_layer", "q": [2048], "h": [0], "layers": 1, "attention": "fa3"}
        gemm = {"kind": "gemm", "role": "gate_up", "m": 2048}
        layers = {"work": [prefill, decode]}

        def turns(first_s: float, second_s: float, whole_s: float) -> list[list[float]]:
            count = round(whole_s / (first_s + second_s))
            return [
                [which, seconds] for _ in range(count) for which, seconds in ((0, first_s), (1, second_s))
            ]

        made: list[Point] = [
            {**layers, "order": [[1, 0.8], [0, 1.2], [1, 0.8], [0, 0.8]], "alternate": False},
            {**layers, "order": turns(0.02, 0.02, 1.2), "alternate": True},
            {"work": [gemm, decode], "order": [[0, 1.2], [1, 0.8], [0, 0.8]], "alternate": False},
            {**layers, "order": turns(0.1, 0.1, 1.6), "alternate": True},
            {**layers, "order": turns(0.02, 0.06, 1.2), "alternate": True},
            {**layers, "order": turns(0.06, 0.02, 1.2), "alternate": True},
            {**layers, "order": turns(0.005, 0.005, 1.2), "alternate": True},
            {**layers, "order": turns(0.3, 0.3, 2.4), "alternate": True},
        ]
        return [{**point, "late": turn} for turn, point in enumerate(made[: None if full else 2])]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        sides = [Side(make(lab.model, one), lab.facts.sms) for one in point["work"]]
        ran = lab.phases(sides, [(int(which), seconds) for which, seconds in point["order"]])
        return (_means if point["alternate"] else _stretches)(lab, sides, ran)

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return super().shape(lab, {**point["work"][0], "sms": lab.facts.sms})


def _stretches(lab: Bench, sides: list[Side], ran: Phased) -> list[dict[str, Any]]:
    """A row for each stretch of each phase; `elapsed_s` is its middle, since the phase began."""
    rows = []
    for phase in sorted({turn.phase for turn in ran.turns}):
        mine = [turn for turn in ran.turns if turn.phase == phase]
        start, end = mine[0].start_s, mine[-1].end_s
        fine, until, coarse = BINS_S
        edges = [*np.arange(0.0, until, fine), *np.arange(until, end - start, coarse), end - start]
        for low, high in pairwise(edges):
            part = [turn for turn in mine if low <= (turn.start_s + turn.end_s) / 2 - start < high]
            rows += _row(lab, sides, ran, part, (start + low, start + high), (low + high) / 2)
    return rows


def _means(lab: Bench, sides: list[Side], ran: Phased) -> list[dict[str, Any]]:
    """A row a kernel over the settled part; `elapsed_s` is how long one of its phases lasts."""
    end = ran.turns[-1].end_s
    rows = []
    for which in range(len(sides)):
        late = [turn for turn in ran.turns if turn.which == which and turn.start_s >= SETTLED * end]
        spans = [turn.end_s - turn.start_s for turn in late]
        each = sum(spans) / max(1, len({turn.phase for turn in late}))
        rows += _row(lab, sides, ran, late, (SETTLED * end, end), each)
    return rows


def _row(
    lab: Bench, sides: list[Side], ran: Phased, turns: list[Turn], window: tuple[float, float], elapsed: float
) -> list[dict[str, Any]]:
    if not turns:
        return []
    seen = [reading for at, reading in ran.readings if window[0] <= at < window[1]]
    times = [(turn.end_s - turn.start_s) / turn.launches for turn in turns]
    kernel = sides[turns[0].which].kernel
    row = solo_row(kernel, lab.facts.sms, Sample(times, "graph", readings=seen), elapsed_s=elapsed)
    now = [reading.now_w for reading in seen if reading.now_w is not None]
    return [{**row, "phase": turns[0].phase, **({"power_w": float(np.mean(now))} if now else {})}]

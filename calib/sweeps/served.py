"""What a server's launches need beyond grids: every captured batch on the sets that lanes use, and how passes warm up.

A library picks its kernels by the batch, for the whole GPU, so on a partition a decode step is a staircase that no
coarse grid shows. A pass with prompts starts at the clock that decodes leave and ends at the one that power allows.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from calib.bench import Bench, Side
from calib.energy import Turn
from calib.kernels import make
from calib.measure import Sample
from calib.sweep import Point, Sweep
from calib.sweeps.common import SoloSweep, solo_row
from calib.sweeps.steps import decode_point
from sim.cost.launching import grid_tokens

EVERY = (*range(8, 129, 8), 160, 192, 256)
SOME = (8, 24, 32, 40, 56, 64, 80, 96, 128)
# around the wave of CTAs of decode attention that starts at 2 x SMs / KV heads
EDGES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    33,
    34,
    36,
    40,
    44,
    48,
    52,
    56,
    60,
    64,
    72,
    80,
    88,
    96,
    104,
    112,
    120,
    128,
    160,
)
SETS = (20, 68, 132, 52, 36, 84, 100, 116)
CONTEXT = 1024
LAYER_SETS = (132, 64, 112)
MOST_ROWS = 2048  # up to which passes are launched as graphs, padded to a multiple
BIN_S = 0.02
REPEATS = 3


class DecodeSizesSweep(SoloSweep):
    """A whole decode step at the batch sizes that graphs are captured for, on the sets of SMs beside a prefill lane."""

    name = "decode_sizes"
    weight = 6.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total, layers, sets = lab.facts.sms, lab.model.layers, lab.sizes()
        made = []
        for turn, sms in enumerate(SETS if full else SETS[:2]):
            few = EVERY if turn < 2 else SOME
            for batch, context in (
                [(b, c) for c in (512, 2048) for b in EDGES] if sms == total else [(b, CONTEXT) for b in few]
            ):
                if sms in sets:
                    made.append({**decode_point(batch, context, layers, sms), "late": turn})
        return made


class LayerSizesSweep(SoloSweep):
    """One prefill layer at every size that passes are padded to, on the whole GPU and on sets beside a decode lane."""

    name = "layer_sizes"
    weight = 2.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        layer = {"kind": "prefill_layer", "h": [0], "layers": 1, "attention": "fa3"}
        rows = sorted({int(size) for size in grid_tokens(range(8, MOST_ROWS + 1))})
        return [
            {**layer, "q": [q], "sms": sms, "late": turn}
            for turn, sms in enumerate(LAYER_SETS if full else LAYER_SETS[:1])
            for q in (rows if full else rows[::8])
            if sms in lab.sizes()
        ]


class WarmSweep(Sweep):
    """Passes with prompts and decode steps in turn on the whole GPU: times of every pass since its phase began, and
    of decodes in stretches of `BIN_S`. `elapsed_s`: since the phase began; `phase`: its number."""

    name = "warm"
    weight = 6.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        layers = lab.model.layers
        decode = decode_point(32, 1400, layers, lab.facts.sms)

        def prompt(q: int) -> Point:
            return {"kind": "prefill_step", "q": [q], "h": [0], "layers": layers, "attention": "fa3"}

        mixed = {**prompt(480), "kind": "mixed_step", "contexts": [1400] * 32}
        turns = [[1, 0.3], [0, 0.25]] * REPEATS
        # how far the clock comes back between two passes
        pauses = [
            part for pause in (0.01, 0.02, 0.04, 0.08, 0.16) for part in ([0, 0.2], [1, pause], [0, 0.03])
        ]
        made: list[Point] = [
            {"work": [prompt(1024), decode], "order": turns},
            {"work": [prompt(2048), decode], "order": turns},
            {"work": [mixed, decode], "order": turns},
            {"work": [prompt(1024), decode], "order": pauses},
            {"work": [prompt(256), prompt(2048)], "order": turns},
            {"work": [prompt(512), decode], "order": turns},
            {"work": [prompt(256), decode], "order": turns},
            {"work": [prompt(4096), decode], "order": turns},
            {"work": [decode_point(128, 1400, layers, lab.facts.sms), prompt(2048)], "order": turns},
            {"work": [prompt(512), prompt(2048)], "order": turns},
            {"work": [prompt(8192), decode], "order": [[1, 0.3], [0, 0.65]] * 2},
        ]
        return [{**point, "late": turn} for turn, point in enumerate(made[: None if full else 1])]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        sides = [Side(make(lab.model, one), lab.facts.sms) for one in point["work"]]
        ran = lab.phases(sides, [(int(which), seconds) for which, seconds in point["order"]])
        found = []
        for phase, turns in groupby(ran.turns, lambda turn: turn.phase):
            mine = list(turns)
            start = mine[0].start_s
            for part in _parts(mine, sides[mine[0].which].kernel.kind == "decode_step"):
                times = [(turn.end_s - turn.start_s) / turn.launches for turn in part]
                seen = [r for at, r in ran.readings if part[0].start_s <= at < part[-1].end_s]
                sample = Sample(times, "graph", readings=seen)
                columns = {"elapsed_s": part[0].start_s - start, "phase": phase}
                found.append(solo_row(sides[part[0].which].kernel, lab.facts.sms, sample, **columns))
        return found

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return super().shape(lab, {**point["work"][0], "sms": lab.facts.sms})


def _parts(turns: list[Turn], binned: bool) -> list[list[Turn]]:
    """Each turn by itself, or in stretches of `BIN_S`."""
    if not binned:
        return [[turn] for turn in turns]
    start = turns[0].start_s
    return [list(part) for _, part in groupby(turns, lambda turn: int((turn.start_s - start) / BIN_S))]

"""Whole layers and whole steps alone: the surfaces that co-runs refer to, and the test of composition."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from calib.bench import Bench
from calib.kernels import make
from calib.sweep import Point, Sweep
from calib.sweeps.common import SoloSweep, affordable, near_sizes, sizes, solo_row

LAYER_Q = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LAYER_H = (0, 1024, 4096, 8192, 16384)
BATCH = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256)
CONTEXT = (128, 512, 1024, 2048, 4096, 8192)
MOST_CONTEXT = 1 << 20  # tokens of a decode batch
HOT_S = {False: 4.0, True: 30.0}


class PrefillLayerSweep(SoloSweep):
    """One layer over one chunk, weights going round the model."""

    name = "prefill_layer"
    weight = 7.0
    axes = ("q", "h", "sms")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        grid = product(LAYER_Q, LAYER_H, sizes(lab, full))
        made = [{"kind": self.name, "q": [q], "h": [h], "attention": "fa3", "sms": s} for q, h, s in grid]
        return affordable(lab, made, full)


class DecodeStepSweep(SoloSweep):
    """A whole decode step as one CUDA graph."""

    name = "decode_step"
    weight = 9.0
    axes = ("batch", "contexts", "sms")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        where = sizes(lab, full) if full else [*near_sizes(lab), lab.facts.sms]
        return [
            decode_point(batch, context, lab.model.layers, sms)
            for batch, context, sms in product(BATCH, CONTEXT, where)
            if batch * context <= MOST_CONTEXT
        ]


class StepSweep(Sweep):
    """Whole steps on the whole GPU, as a graph and eagerly: prefill, decode, and mixed steps of random shapes."""

    name = "steps"
    weight = 9.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        layers, sms = lab.model.layers, lab.facts.sms
        made: list[Point] = [
            {
                "kind": "prefill_step",
                "q": [q],
                "h": [h],
                "layers": layers,
                "attention": backend,
                "sms": sms,
                "late": 0 if backend == "fa3" else 20,
            }
            for backend, q, h in product(
                ("fa3", "fa2"), (16, 128, 256, 512, 1024, 2048, 4096, 8192), (0, 4096)
            )
        ]
        made += [
            {**decode_point(b, c, layers, sms), "late": 0}
            for b, c in product((1, 8, 32, 64, 128, 256), (512, 4096))
        ]
        rng = np.random.default_rng(20)
        for draw in range(300 if full else 60):
            backend = "fa3" if draw % 3 else "fa2"
            made.append({**mixed_shape(rng, layers), "attention": backend, "sms": sms, "late": draw // 2})
        return made

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        measured = []
        for launch in ("graph", "eager"):
            kernel = make(lab.model, point)
            measured.append(solo_row(kernel, point["sms"], lab.time(kernel, point["sms"], launch)))
        return measured


class HotSweep(Sweep):
    """Each kind of step without a pause for seconds: how clock, power and time settle."""

    name = "hot"
    weight = 5.0
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        layers, total, seconds = lab.model.layers, lab.facts.sms, HOT_S[full]
        prefill = {"kind": "prefill_step", "h": [0], "layers": layers, "attention": "fa3"}
        mixed = {"kind": "mixed_step", "q": [1024], "h": [1024], "contexts": [2048] * 64, "layers": layers}
        steps: list[Point] = [
            {**prefill, "q": [2048], "sms": total},
            decode_point(64, 2048, layers, total),
            {**prefill, "q": [8192], "sms": total},
            {**mixed, "attention": "fa3", "sms": total},
            decode_point(256, 1024, layers, total),
            {**prefill, "q": [512], "sms": total},
        ]
        # a compute-bound run heats, a decode run cools: alternating shows both directions
        return [{**step, "seconds": seconds, "late": turn} for turn, step in enumerate(steps)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        kernel = make(lab.model, point)
        samples = lab.sustained(kernel, point["sms"], "graph", point["seconds"])
        return [solo_row(kernel, point["sms"], sample, elapsed_s=elapsed) for elapsed, sample in samples]


def decode_point(batch: int, context: int, layers: int, sms: int) -> Point:
    """A decode step of `batch` sequences of `context` tokens."""
    return {
        "kind": "decode_step",
        "contexts": [context] * batch,
        "batch": batch,
        "layers": layers,
        "attention": "fa3",
        "sms": sms,
    }


def mixed_shape(rng: np.random.Generator, layers: int) -> Point:
    """A random mixed step: one to four chunks of a token budget, and a decode batch of lognormal contexts."""
    budget = int(rng.choice([256, 512, 1024, 2048, 4096]))
    batch = int(rng.integers(1, min(257, budget)))
    chunks = int(rng.choice([1, 1, 1, 2, 3, 4]))
    left = max(chunks, budget - batch)
    cuts = np.sort(rng.choice(np.arange(1, left), size=chunks - 1, replace=False)) if chunks > 1 else []
    q = np.diff([0, *cuts, left]).astype(int).tolist()
    h = [int(rng.choice([0, rng.integers(1, 8192)])) for _ in q]
    contexts = np.clip(rng.lognormal(7.0, 0.9, batch), 16, 16384).astype(int).tolist()
    while sum(contexts) > MOST_CONTEXT:
        contexts = [max(16, c // 2) for c in contexts]
    return {"kind": "mixed_step", "q": q, "h": h, "contexts": contexts, "batch": batch, "layers": layers}

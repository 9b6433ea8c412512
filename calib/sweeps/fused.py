"""Attention of mixed batches, fused and not, on the same shapes; what the fused kernels refuse; attention's share."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from calib.analytic import expected_s
from calib.bench import Bench
from calib.kernels import make
from calib.kernels.fused import VARIANTS
from calib.sweep import Point, Sweep
from calib.sweeps.common import solo_row
from sim.errors import CalibrationError

Q = (64, 128, 256, 512, 1024, 2048, 4096)
H = (0, 1024, 2048, 4096, 8192, 16384, 28672)
BATCH = (4, 8, 16, 32, 64, 128, 192, 256)
CONTEXT = (512, 1024, 2048, 4096, 8192, 16384, 32768)
MOST_TOKENS = 1 << 20
LEAST_SHARE = 0.1  # of the serial time that either side has, in four of five points
ERROR_LIMIT = 2e-2
# shapes that others published, or that an earlier look was at: chunks, histories, contexts
NAMED = (
    ([1024], [8192], [8192] * 32),
    ([2048], [4096], [4096] * 64),
    ([512], [16384], [16384] * 16),
    ([512], [2048], [2048] * 128),
    ([2048], [0], [2048] * 128),  # FlashInfer pull request 2079
    ([1024], [11264], [12288] * 80),  # POD-Attention, table 1: C0, C1 and C2 on one GPU of a pair
    ([12288], [0], [12288] * 64),
    ([1024], [15360], [16384] * 60),  # POD-Attention, figure 4
)
OTHER_MODELS = ("llama-3.1-8b-tp2", "llama-2-7b", "yi-6b", "llama-3.1-70b-tp4", "llama-3.1-70b-tp8")
SHARE_CONTEXTS = (4096, 8192, 16384, 32768)
SHARE_CHUNK, SHARE_BATCHES = 1024, (16, 60)


class FusedSweep(Sweep):
    """Every variant of a shape in one block, so that a drifting clock is no difference between them."""

    name = "fused"
    weight = 6.0

    def __init__(self) -> None:
        self._errors: dict[tuple[Any, ...], float] = {}

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made = [_point(q, h, contexts) for q, h, contexts in NAMED if len(q) == 1]
        made += [{**_point([2048, 2048], [0, 0], [2048] * 128), "late": 1}]
        grid = [
            _point([q], [h], [context] * batch)
            for q, h, batch, context in product(Q, H, BATCH, CONTEXT)
            if q + h + batch * context <= MOST_TOKENS
        ]
        rng = np.random.default_rng(30)
        made += mixed_order(lab, grid, rng)
        return made

    def order(self, lab: Bench, points: Any, seed: int) -> list[Point]:
        return list(points)  # in random order already: corners of four axes would take the whole of a budget

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        rows = [self._one(lab, {**point, "attention": variant}) for variant in variants_of(point)]
        if not lab.healthy():
            raise CalibrationError(str(rows[-1].get("skip", "unknown")))
        return rows

    def _one(self, lab: Bench, point: Point) -> dict[str, Any]:
        try:
            kernel: Any = make(lab.model, point)
            wrong = self._wrong(lab, point)
            if wrong:
                raise CalibrationError(wrong)
            return solo_row(kernel, lab.facts.sms, lab.time(kernel, lab.facts.sms, kernel.launch))
        except Exception as error:  # a variant that refuses leaves the others of the shape
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            return {**self.shape(lab, point), "skip": reason}

    def _wrong(self, lab: Bench, point: Point) -> str:
        """Why a variant must not be timed: its error on a small shape against float32, looked at once."""
        key = (point.get("model"), point.get("dtype"), point["attention"])
        if key not in self._errors:
            small = {**point, **_point([300], [500], [700, 33, 1500, 64])}
            self._errors[key] = lab.error(make(lab.model, small))
        error = self._errors[key]
        return "" if error < ERROR_LIMIT else f"relative error {error:.3g} against float32"

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        columns = {"kind": "fused_attention", "label": point.get("attention"), "sms": lab.facts.sms}
        for name, key in (("q_tokens", "q"), ("history_tokens", "h")):
            columns[name] = ";".join(map(str, point[key]))
        contexts = point["contexts"]
        batch = {"decode_batch": len(contexts), "context_sum": sum(contexts)}
        return {**columns, **batch, "attention": point.get("attention"), "dtype": point.get("dtype")}


class FusedShapesSweep(FusedSweep):
    """The same for other heads, float16 and head dimension 64: few shapes each."""

    name = "fused_shapes"
    weight = 2.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        for turn, (q, h, contexts) in enumerate(NAMED):
            made += [{**_point(q, h, contexts), "model": m, "late": turn} for m in OTHER_MODELS]
            made.append({**_point(q, h, contexts), "dtype": "float16", "late": turn})
            made.append({**_point(q, h, contexts), "model": "llama-3.2-1b", "late": turn})
            made.append({**_point(q, h, contexts), "model": "llama-2-7b", "dtype": "float16", "late": turn})
        fits = [
            p
            for p in made
            if _tokens(p) * make(lab.model, {**p, "attention": "serial_fa2"}).model.kv_heads
            <= 12 * MOST_TOKENS
        ]
        return sorted(fits, key=lambda p: p["late"])


class FusedRandomSweep(FusedSweep):
    """Held out: random shapes off the grid, one in three with ragged contexts, drawn from `seed`."""

    name = "fused_random"
    weight = 6.0

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        self.count, self.seed = count, seed

    def points(self, lab: Bench, full: bool) -> list[Point]:
        rng = np.random.default_rng([self.seed, 31])
        made: list[Point] = []
        while len(made) < self.count:
            q, h = (
                int(2 ** rng.uniform(6, 12.3)),
                int(rng.choice([0, 2 ** rng.uniform(9, 14.8)], p=[0.2, 0.8])),
            )
            batch, mean = int(2 ** rng.uniform(2, 8)), 2 ** rng.uniform(9, 14.8)
            contexts = [int(mean)] * batch
            if rng.random() < 1 / 3:
                contexts = np.clip(mean * rng.lognormal(-0.32, 0.8, batch), 16, 32768).astype(int).tolist()
            if q + h + sum(contexts) <= MOST_TOKENS:
                made.append(_point([q], [h], contexts))
        return mixed_order(lab, made, rng)


class AttentionShareSweep(Sweep):
    """A mixed layer beside its attention alone, by context: what share of a step attention is."""

    name = "attention_share"
    weight = 1.5
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        grid = product(SHARE_CONTEXTS, SHARE_BATCHES, ("fa2", "fa3"))
        return [
            {
                "q": [SHARE_CHUNK],
                "h": [context - SHARE_CHUNK],
                "contexts": [context] * batch,
                "attention": backend,
                "layers": 1,
                "kind": "mixed_layer",
                "late": turn,
            }
            for turn, (context, batch, backend) in enumerate(grid)
            if context * (batch + 1) <= 2 * MOST_TOKENS
        ]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        layer = make(lab.model, point)
        part = {**point, "kind": "fused_attention", "attention": f"serial_{point['attention']}"}
        attention = make(lab.model, part)
        total = lab.facts.sms
        return [solo_row(one, total, lab.time(one, total)) for one in (layer, attention)]


class LimitsSweep(Sweep):
    """What the fused wrappers do with what they may not support: error against float32, or the reason they give."""

    name = "fused_limits"
    weight = 0.5
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        asked: list[Point] = [
            {**_point([70], [130], [40, 333]), "label": "a chunk of 70 tokens"},
            {**_point([1], [130], [40, 333]), "label": "a chunk of one token"},
            {**_point([5], [0], [1]), "label": "a chunk of 5 tokens, one decode of one token"},
            {**_point([300, 70], [130, 0], [40, 333]), "label": "two chunks"},
            {**_point([300], [130], [40, 333]), "label": "replayed in a CUDA graph", "launch": "graph"},
            {**_point([300], [130], [40, 333]), "label": "float16", "dtype": "float16"},
            *(
                {**_point([300], [130], [40, 333]), "label": f"heads of {model}", "model": model}
                for model in (*OTHER_MODELS, "qwen2.5-7b", "llama-3.2-1b")
            ),
            {**_point([2048], [28672], [4096] * 128), "label": "2048 on 28672, 128 decodes", "late": 2},
            {
                **_point([300], [130], [40, 333]),
                "label": "heads of llama-2-7b, float16",
                "model": "llama-2-7b",
                "dtype": "float16",
            },
        ]
        made = product(asked, ("pod", "batch_pod"))
        return [{"late": i, **point, "attention": variant} for i, (point, variant) in enumerate(made)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        shape = {"kind": "fused_attention", "label": point["label"], "attention": point["attention"]}
        shape |= {"sms": lab.facts.sms}
        try:
            kernel = make(lab.model, point)
            look = lab.replayed_error if point.get("launch") == "graph" else lab.error
            return [{**shape, "error": look(kernel)}]
        except Exception as error:  # the reason is what is asked for
            if not lab.healthy():
                raise
            return [{**shape, "skip": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}]


def variants_of(point: Point) -> tuple[str, ...]:
    """POD's own wrapper takes one chunk."""
    return tuple(v for v in VARIANTS if v != "pod" or len(point["q"]) == 1)


def mixed_order(lab: Bench, points: list[Point], rng: np.random.Generator) -> list[Point]:
    """In random order, four balanced shapes (each side has a share of the serial time) for one that is not."""
    shuffled = [points[i] for i in rng.permutation(len(points))]
    near = [p for p in shuffled if balanced(lab, p)]
    far = [p for p in shuffled if not balanced(lab, p)]
    ordered: list[Point] = []
    for i, point in enumerate(near):
        ordered.append(point)
        if i % 4 == 3 and far:
            ordered.append(far.pop())
    return ordered + far


def balanced(lab: Bench, point: Point) -> bool:
    """Would each side have a share of the serial time?"""
    sides = (
        {"kind": "prefill_attention", "q": point["q"], "h": point["h"], "attention": "fa2"},
        {"kind": "decode_attention", "contexts": point["contexts"], "attention": "fa2"},
    )
    # FA2 prefill reaches about a third of the peak that an expected time is made of
    a, b = (expected_s(make(lab.model, side), lab.facts, lab.facts.sms) for side in sides)
    share = 2.5 * a / (2.5 * a + b)
    return LEAST_SHARE <= share <= 1 - LEAST_SHARE


def _point(q: list[int], h: list[int], contexts: list[int]) -> Point:
    return {"kind": "fused_attention", "q": q, "h": h, "contexts": contexts}


def _tokens(point: Point) -> int:
    return int(sum(point["q"]) + sum(point["h"]) + sum(point["contexts"]))

"""Mixed batches scattered between the sizes of the grid, and those of other heads: what curves are fitted to.

A kernel's plan (tiles, KV splits) changes at sizes that a grid of powers of two never sees, so sizes are drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calib.bench import Bench
from calib.models import model_shape
from calib.sweep import Point
from calib.sweeps.fused import MOST_TOKENS, FusedSweep, mixed_order

SCATTERED, SEED = 400, 59  # no seed of the held-out shapes
# model whose heads, type, shapes: of one that is served whole the most
HEADS = (
    ("llama-2-7b", "bfloat16", 120),
    ("llama-3.2-1b", "bfloat16", 40),
    ("llama-3.1-8b-tp2", "bfloat16", 24),
    ("yi-6b", "bfloat16", 24),
    ("llama-2-7b", "float16", 16),
    ("llama-3.1-8b", "float16", 16),
)
HELD_OUT = 40  # random shapes of `HEADS[0]` that no curve is fitted to


class ScatterSweep(FusedSweep):
    """Shapes log-uniform in chunk, history, batch and context; a chunk in five has no history."""

    name = "fused_scatter"
    weight = 9.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        rng = np.random.default_rng(SEED)
        return mixed_order(lab, [scattered(rng, MOST_TOKENS) for _ in range(SCATTERED)], rng)


class HeadsSweep(FusedSweep):
    """The same for other heads and types: of each in turn, so that a cut-off leaves some of all."""

    name = "fused_heads"
    weight = 5.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[tuple[float, Point]] = []
        for n, (model, dtype, count) in enumerate(HEADS):
            rng = np.random.default_rng([SEED, n])
            named = {"model": model} | ({} if dtype == "bfloat16" else {"dtype": dtype})
            made += [((i + 0.5) / count, {**scattered(rng, room(lab, model)), **named}) for i in range(count)]
        return [point for _, point in sorted(made, key=lambda pair: pair[0])]


class HeadsRandomSweep(FusedSweep):
    """Held out: random shapes of other heads."""

    name = "fused_heads_random"
    weight = 1.5

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def points(self, lab: Bench, full: bool) -> list[Point]:
        rng, model = np.random.default_rng([self.seed, 37]), HEADS[0][0]
        return [{**scattered(rng, room(lab, model)), "model": model} for _ in range(HELD_OUT)]


def room(lab: Bench, model: str) -> int:
    """Tokens of context that the cache of the lab's model holds with another's heads."""
    held = model_shape(model)
    return int(MOST_TOKENS * min(1.0, lab.model.kv_bytes_per_token / held.kv_bytes_per_token))


def scattered(rng: np.random.Generator, most: int) -> dict[str, Any]:
    """One chunk beside decodes of equal contexts, `most` tokens in all."""
    while True:
        q = int(2 ** rng.uniform(6, 12.3))
        h = 0 if rng.random() < 0.2 else int(2 ** rng.uniform(8, 14.8))
        batch, context = int(2 ** rng.uniform(2, 8)), int(2 ** rng.uniform(9, 14.8))
        if q + h + batch * context <= most:
            return {"kind": "fused_attention", "q": [q], "h": [h], "contexts": [context] * batch}

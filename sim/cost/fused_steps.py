"""What a fused kernel looked like in each step of a log: virtual decode CTAs, tiles, occupancy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from sim.cost.attention import SERIAL, AttentionMode
from sim.cost.cta_grid import MixedShape
from sim.cost.cta_terms import CtaTerms, cta_terms
from sim.cost.fused_modes import FusedRun, fused_run

BUCKETS_PER_OCTAVE = 4  # lengths and batches are told apart as finely


def fused_columns(cost: Any, mode: AttentionMode | None, steps: Any) -> dict[str, Any]:
    """`virtual_ctas`, `tile` and `occupancy` of every row by the CTA-level model; 0 and empty where nothing ran fused.

    `steps`: columns of the step log. Nothing for runs with separate attention.
    """
    mode = cost.attention if mode is None else mode
    if mode is None or mode.mode == SERIAL.mode:
        return {}
    names = ("prefill_tokens", "chunks", "history_tokens", "decode_batch", "context_sum", "fallback")
    tokens, chunks, history, batch, context, fallback = (np.asarray(steps[name]) for name in names)
    terms, model = cta_terms(cost.gpu), cost.model
    heads = (model.q_heads, model.kv_heads, model.head_dim)
    virtual, tile, occupancy = np.zeros(len(tokens), np.int64), [""] * len(tokens), np.zeros(len(tokens))
    for row in np.flatnonzero((tokens > 0) & (batch > 0) & (fallback == 0)):
        mean = max(1, context[row] // batch[row])
        sizes = (tokens[row], history[row] // chunks[row], batch[row], mean)
        run = _run(terms, mode, heads, *(_bucket(int(size)) for size in sizes))
        virtual[row], tile[row], occupancy[row] = run.virtual, run.tile, run.occupancy
    return {"virtual_ctas": virtual, "tile": tile, "occupancy": occupancy}


def _bucket(size: int) -> int:
    """The size on a grid of some steps an octave."""
    step = max(1, (1 << size.bit_length()) >> (BUCKETS_PER_OCTAVE // 2 + 1))
    return size // step * step


@lru_cache(maxsize=1 << 14)
def _run(
    terms: CtaTerms,
    mode: AttentionMode,
    heads: tuple[int, int, int],
    q: int,
    h: int,
    batch: int,
    context: int,
) -> FusedRun:
    return fused_run(terms, mode, MixedShape(q, h, batch, context, *heads))

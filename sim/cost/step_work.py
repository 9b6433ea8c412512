"""Bytes and watts of each launch of a step log, by the work that its row tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sim.cost.energy import EnergyTerms
from sim.cost.model import ModelSpec
from sim.cost.work import byte_sums, expert_weights, joules_per


def work_columns(cost: Any, steps: Any) -> dict[str, Any]:
    """`hbm_bytes`, `joules` above idle and `watts` of every row, of one GPU: mean watts of the board from start to end
    if nothing ran beside it; the limit holds what would be more.

    `steps`: columns of the step log. Nothing for prices that say nothing of watts. Chunks of one launch count as alike.
    """
    model, terms = getattr(cost, "model", None), getattr(cost, "energy", None)
    if not isinstance(model, ModelSpec) or not isinstance(terms, EnergyTerms):
        return {}
    totals, seconds = _totals(model, steps), np.asarray(steps["end_s"] - steps["start_s"], dtype=np.float64)
    passes = totals["launches_graph"] + totals["launches_eager"]
    joules = joules_per(model, terms).of(totals)
    moved = byte_sums(model).of(totals)
    if model.experts:
        read = passes * np.array([expert_weights(model, float(m)) for m in totals["dense_tokens"] / passes])
        moved, joules = moved + read, joules + terms.work_j("moe", 0.0, read)
    asked = terms.active_w + joules / np.maximum(seconds, 1e-9)
    above = np.minimum(asked, terms.cap_w - terms.idle_w)
    return {"hbm_bytes": np.asarray(moved), "joules": above * seconds, "watts": terms.idle_w + above}


def _totals(model: ModelSpec, steps: Any) -> Mapping[str, Any]:
    """Each row's work, as `sim.cost.work.total_work` wants its sums."""
    names = ("layers", "prefill_tokens", "chunks", "history_tokens", "decode_batch", "context_sum")
    layers, tokens, chunks, history, batch, context = (np.asarray(steps[name], np.float64) for name in names)
    share = layers / model.layers
    some = np.maximum(chunks, 1.0)
    return {
        "launches_graph": share * (chunks == 0),
        "launches_eager": share * (chunks > 0),
        "dense_tokens": share * (tokens + batch),
        "head_rows": share * (chunks + batch),
        "prefill_pairs": share * (tokens * history / some + tokens * (tokens / some + 1.0) / 2.0),
        "prefill_kv_tokens": share * (tokens + history),
        "decode_kv_tokens": share * context,
    }

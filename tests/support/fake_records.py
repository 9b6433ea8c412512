"""Run records written by hand, for tests of what is computed from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sim.engine.records import RunRecords

TOTALS = (
    "iterations",
    "decisions",
    "busy_s",
    "gpu_s",
    "host_bound_s",
    "dense_tokens",
    "head_rows",
    "prefill_pairs",
    "prefill_kv_tokens",
    "decode_kv_tokens",
    "sm_active_s",
    "kv_block_s",
    "waiting_s",
    "running_s",
    "launches_graph",
    "launches_eager",
    "flagged",
    "split_evaluations",
    "decision_s",
)


SM_TOTALS = ("tail", "host", "contention", "switch", "lent", "attention", "lockstep", "idle_lane")


def request(arrival: float, first: float, end: float, **other: Any) -> dict[str, Any]:
    """A finished request of 4 output tokens unless told otherwise; times in seconds."""
    row = {
        "arrival_s": arrival,
        "prompt_tokens": 100,
        "output_tokens": 4,
        "slo_class": "default",
        "priority": 0,
        "replica": 0,
        "status": "finished",
        "reason": "",
        "first_scheduled_s": arrival,
        "first_token_s": first,
        "finish_s": end,
        "max_itl_s": (end - first) / 2,
        "preemptions": 0,
    }
    row |= other
    row.setdefault("generated_tokens", row["output_tokens"] if row["status"] == "finished" else 0)
    return row


def records(
    rows: list[dict[str, Any]], window: tuple[float, float] = (0.0, 10.0), **other: Any
) -> RunRecords:
    """Records of the rows; tokens after the first come at equal gaps, unless `itl` is given."""
    frame = pd.DataFrame(rows)
    frame.insert(0, "request_id", range(len(rows)))
    gaps = [
        ((end - first) / (tokens - 1), first + (end - first) * (k + 1) / (tokens - 1))
        for first, end, tokens in zip(
            frame["first_token_s"], frame["finish_s"], frame["output_tokens"], strict=True
        )
        if np.isfinite(end)
        for k in range(tokens - 1)
    ]
    itl_s, itl_end = np.array(gaps, np.float64).reshape(-1, 2).T
    totals = (
        dict.fromkeys(TOTALS, 1.0) | {f"sm_{name}_s": 0.0 for name in SM_TOTALS} | other.pop("totals", {})
    )
    return RunRecords(
        requests=frame,
        itl_s=other.pop("itl_s", itl_s),
        itl_count=other.pop("itl_count", np.ones(len(itl_s), np.int64)),
        itl_end_s=other.pop("itl_end_s", itl_end),
        totals=totals,
        window_totals=totals,
        window_s=window,
        end_s=window[1],
        num_blocks=100,
        block_size=16,
        replicas=1,
        **other,
    )

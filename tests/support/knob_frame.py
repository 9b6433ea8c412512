"""Does a knob do what it says? A run of an overloaded replica, in numbers that knobs are about."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from stub_cost import TICK, rough_tables, stub_cost
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.policies import make_policy
from sim.workload.workload import Workload

COST = stub_cost(rough_tables(TICK))
POOL_TOKENS = 20 * 16
UP, DOWN = 1, -1


@dataclass(frozen=True)
class Moves:
    """Setting `knob` of `policy` to `value` moves `metric` UP or DOWN, other knobs being as in `given`."""

    policy: str
    knob: str
    value: Any
    metric: str
    direction: int
    given: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.policy}-{self.knob}"


def overload() -> Workload:
    """80 requests that come faster than they can be served; every fourth is urgent."""
    rng = np.random.default_rng(2)
    n = 80
    load = workload(
        np.cumsum(rng.exponential(0.001, n)).tolist(),
        rng.integers(1, 150, n).tolist(),
        rng.integers(1, 60, n).tolist(),
    )
    return replace(load, priority=np.where(np.arange(n) % 4 == 0, 0, 1).astype(np.int16))


def metrics(records: RunRecords) -> dict[str, float]:
    """What happened, in the words that knobs use."""
    frame, steps = records.requests, records.steps
    assert steps is not None
    ttft = frame["first_token_s"] - frame["arrival_s"]
    prompts = steps[steps["chunks"] > 0]
    several = prompts[prompts["chunks"] > 1]
    return {
        "mean_ttft": float(ttft.mean()),
        "urgent_ttft": float(ttft[frame["priority"] == 0].mean()),
        "max_itl": float(frame["max_itl_s"].max()),
        "makespan": records.end_s,
        "preemptions": float(frame["preemptions"].sum()),
        "mean_decode_batch": float(steps.loc[steps["chunks"] == 0, "decode_batch"].mean()),
        "largest_batch": float(steps["decode_batch"].max()),
        "largest_prefill": float(prompts["prefill_tokens"].max()),
        "largest_step": float((steps["prefill_tokens"] + steps["decode_batch"]).max()),
        "most_chunks": float(steps["chunks"].max()),
        "longest_chunk": float((prompts["prefill_tokens"] / prompts["chunks"]).max()),
        "tokens_of_several": float(several["prefill_tokens"].max()) if len(several) else 0.0,
        "prefilled": float(steps["prefill_tokens"].sum()),
        "mixed_steps": float(((steps["chunks"] > 0) & (steps["decode_batch"] > 0)).sum()),
        "kv_tokens_held": records.totals["kv_block_s"] * records.block_size / records.end_s,
        "rejected": float((frame["status"] == "rejected").sum()),
    }


def check_move(row: Moves, base: dict[str, Any]) -> None:
    """Run with and without the change; `base`: knobs that make the policy fit the overload."""
    entry = {"name": row.policy, **base, **row.given}
    before, after = outcome(entry), outcome({**entry, row.knob: row.value})
    change = after[row.metric] - before[row.metric]
    assert change * row.direction > 0, f"{row}: {row.metric} goes from {before[row.metric]} by {change}"


def outcome(entry: dict[str, Any]) -> dict[str, float]:
    """Metrics of a policy on the overload, with a pool that is too small for it."""
    policy = make_policy(entry)
    size = policy.block_size or 16
    records = simulate(
        overload(), policy, COST, num_gpu_blocks=POOL_TOKENS // size, jitter=False, record_steps=True
    )
    return metrics(records)

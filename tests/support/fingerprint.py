"""A hash of everything that a run leaves behind, and a fixed set of runs to compare by it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from sim.engine import RunRecords, simulate


def fingerprint(records: RunRecords) -> str:
    """Hash of all columns and totals but `decisions`, which depends on how often the policy was asked."""
    digest = hashlib.sha256()
    frames = [records.requests] if records.steps is None else [records.requests, records.steps]
    for frame in frames:
        for name in frame:
            column = frame[name].to_numpy()
            digest.update(str(name).encode())
            digest.update(repr(column.tolist()).encode() if column.dtype == object else column.tobytes())
    for array in (records.itl_s, records.itl_count, records.itl_end_s):
        digest.update(np.ascontiguousarray(array).tobytes())
    for totals in (records.totals, records.window_totals):
        kept = sorted((key, value) for key, value in totals.items() if key != "decisions")
        digest.update(repr(kept).encode())
    digest.update(repr((records.window_s, records.end_s, records.num_blocks, records.notes)).encode())
    return digest.hexdigest()


# knobs that leave little room, so that requests wait and are evicted
TIGHT: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_batched_tokens": 64, "max_num_seqs": 16},
    "sarathi": {"token_budget": 64, "max_num_seqs": 16},
    "sglang": {"chunked_prefill_size": 64, "max_running_requests": 16},
    "vllm-v0": {"max_num_batched_tokens": 1024, "max_num_seqs": 16},
    "static-batch": {"max_batch_size": 16},
}


def standard_runs(name: str, **options: Any) -> dict[str, str]:
    """Fingerprints of runs of one policy that reach every router and kind of load."""
    from stub_cost import TICK, real_cost, rough_tables, stub_cost
    from workloads import workload

    from sim.policies import make_policy

    rng = np.random.default_rng(7)
    n = 150
    arrivals = np.cumsum(rng.exponential(0.002, n)).tolist()
    prompts, outputs = rng.integers(1, 400, n).tolist(), rng.integers(1, 120, n).tolist()
    two = {"replicas": 2, "router": "least-outstanding", "warmup_s": 0.1, "horizon_s": 0.4}
    found = {}
    for cost_name, cost in (("real", real_cost()), ("stub", stub_cost(rough_tables(TICK, wobble=True)))):
        for kind, most, more in (("open", None, {}), ("closed", 20, {}), ("two", None, two)):
            records = simulate(
                workload(arrivals, prompts, outputs, max_concurrency=most),
                make_policy({"name": name, **TIGHT[name]}),
                cost,
                num_gpu_blocks=1100 if name == "sglang" else 80,
                record_steps=True,
                **more,
                **options,
            )
            found[f"{cost_name} {kind}"] = fingerprint(records)
    return found

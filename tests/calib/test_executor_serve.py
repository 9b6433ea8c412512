"""The executor's serving loop on a device that takes exactly what the price tables say: it must be the simulation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lane_cost import lane_cost
from stub_cost import TICK, real_cost, rough_tables, stub_cost
from workloads import workload

from calib.executor.dry import DryDevice
from calib.executor.serve import serve
from sim.engine import simulate
from sim.engine.cluster import open_cluster
from sim.errors import SimctlError
from sim.policies import make_policy

ENTRIES: list[dict[str, Any]] = [
    {"name": "vllm", "max_num_batched_tokens": 64, "max_num_seqs": 8},
    {"name": "sarathi", "token_budget": 64, "max_num_seqs": 8},
    {"name": "sglang", "chunked_prefill_size": 64, "max_running_requests": 8},
    {"name": "static-split", "max_prefill_tokens": 96, "max_num_seqs": 8, "layer_step": 8},
]


def load(n: int = 60) -> Any:
    rng = np.random.default_rng(5)
    gaps = rng.exponential(0.02, n)
    gaps[n // 2] = 3.0  # an idle stretch: the loop has to wait for an arrival
    prompts, outputs = rng.integers(1, 150, n), rng.integers(1, 40, n)
    return workload(np.cumsum(gaps).tolist(), prompts.tolist(), outputs.tolist())


def options(entry: dict[str, Any]) -> dict[str, Any]:
    size = make_policy(entry).block_size or 16
    return {"num_gpu_blocks": 40 * 16 // size, "jitter": False}


def cost(entry: dict[str, Any]) -> Any:
    return lane_cost(rough_tables(TICK)) if entry["name"] == "static-split" else stub_cost(rough_tables(TICK))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["name"]))
def test_a_device_true_to_the_tables_gives_the_simulation(entry: dict[str, Any]) -> None:
    policy = make_policy(entry)
    expected = simulate(load(), policy, cost(entry), **options(entry))
    cluster = open_cluster(load(), make_policy(entry), cost(entry), bursts=False, **options(entry))
    trail = serve(cluster.replicas[0], DryDevice(), policy.lanes, load().arrival_s)
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    columns = ["first_token_s", "finish_s", "max_itl_s", "preemptions", "status"]
    pd.testing.assert_frame_equal(records.requests[columns], expected.requests[columns])
    assert records.totals["iterations"] == expected.totals["iterations"] == len(trail.rows)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["name"]))
def test_a_slow_device_moves_every_decision(entry: dict[str, Any]) -> None:
    """Ends are the device's, not the tables'; no token is lost by it, and logged launches follow one another."""
    policy = make_policy(entry)
    cluster = open_cluster(load(), policy, cost(entry), bursts=False, **options(entry))
    trail = serve(
        cluster.replicas[0], DryDevice(lambda work: 3.0 * work.solo_s + 1e-4), policy.lanes, load().arrival_s
    )
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    assert (records.requests["status"] == "finished").all()
    made = {row["end_s"] for row in trail.rows}
    assert set(records.requests["finish_s"]) <= made
    for lane in range(policy.lanes):
        rows = [row for row in trail.rows if row["lane"] == lane]
        assert all(a["end_s"] <= b["start_s"] for a, b in pairwise(rows))


def test_logged_work_adds_up_to_the_requests() -> None:
    entry = ENTRIES[1]
    cluster = open_cluster(
        load(), make_policy(entry), cost(entry), bursts=False, num_gpu_blocks=400, jitter=False
    )
    trail = serve(cluster.replicas[0], DryDevice(), 1, load().arrival_s)
    prompt = sum(tokens for work in trail.works for _, tokens, _ in work.chunks)
    assert prompt == int(load().prompt_tokens.sum())
    decoded = sum(len(work.decodes) for work in trail.works)
    assert decoded == int(load().output_tokens.sum()) - len(load())
    for work in trail.works:
        assert all(context > 1 for _, context in work.decodes)


def test_an_end_seen_after_an_arrival_before_it_is_not_moved_by_what_starts_then() -> None:
    """A device that reports late: arrivals come between a launch's end and its report, and each launch runs once."""

    class Late(DryDevice):
        def wait(self, until_s: float) -> list[tuple[int, float]]:
            return super().wait(until_s if until_s == np.inf else until_s + 3e-3)

    entry = ENTRIES[-1]
    policy = make_policy(entry)
    prices = lane_cost(rough_tables(TICK), factors=(2.0, 1.5))
    cluster = open_cluster(load(), policy, prices, bursts=False, **options(entry))
    trail = serve(cluster.replicas[0], Late(lambda work: 2.0 * work.solo_s), policy.lanes, load().arrival_s)
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    assert (records.requests["status"] == "finished").all()
    assert records.totals["iterations"] == len(trail.rows)
    assert len({(work.lane, work.start_s) for work in trail.works}) == len(trail.rows)


@pytest.mark.parametrize(
    "entry",
    [{"name": "pod", "max_num_seqs": 8}, {"name": "duetserve", "tbt_ms": 20.0}],
    ids=["fused attention", "steps ahead"],
)
def test_what_the_executor_cannot_run_is_refused_in_a_sentence(entry: dict[str, Any]) -> None:
    policy = make_policy(entry)
    crowd = workload([0.0] * 20 + [1.0] * 10, [900] * 30, [60] * 30)
    cluster = open_cluster(crowd, policy, real_cost(), bursts=False, num_gpu_blocks=4000, jitter=False)
    with pytest.raises(SimctlError, match="executor runs"):
        serve(cluster.replicas[0], DryDevice(), policy.lanes, crowd.arrival_s)

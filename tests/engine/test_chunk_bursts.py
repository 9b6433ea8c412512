"""Bursts over chunks of one prompt: taken where a plan repeats, cut by arrivals, the same bytes as step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fingerprint import fingerprint
from stub_cost import TICK, real_cost, rough_tables, stub_cost
from workloads import workload

from sim.engine import simulate
from sim.policies import list_policies, make_policy

COST = stub_cost(rough_tables(TICK, wobble=True))


def run(load: Any, policy: Any, **options: Any) -> Any:
    return simulate(load, make_policy(policy), COST, num_gpu_blocks=4000, record_steps=True, **options)


def test_a_long_prompt_is_two_decisions() -> None:
    load = workload([0.0], [1000], [1])
    entry = {"name": "sarathi", "token_budget": 64, "watermark": 0.0}
    records = run(load, entry)
    # 15 whole chunks, and the rest
    assert records.totals["iterations"] == 16
    assert records.totals["decisions"] == 2
    assert records.steps["prefill_tokens"].tolist() == [64] * 15 + [40]
    assert records.steps["history_tokens"].tolist() == [64 * n for n in range(16)]
    assert records.totals["prefill_pairs"] == 1000 * 1001 // 2
    assert records.totals["prefill_kv_tokens"] == sum(min(64 * n, 1000) for n in range(1, 17))


def test_an_arrival_cuts_the_burst_at_the_next_boundary() -> None:
    entry = {"name": "sarathi", "token_budget": 64, "watermark": 0.0}
    alone = run(workload([0.0], [1000], [1]), entry)
    middle = float(alone.steps["start_s"][5] + alone.steps["end_s"][5]) / 2
    for arrival in (middle, float(alone.steps["end_s"][5])):
        load = workload([0.0, arrival], [1000, 30], [1, 5])
        records = run(load, entry)
        assert records.totals["decisions"] < records.totals["iterations"]
        assert fingerprint(records) == fingerprint(run(load, entry, bursts=False))


@pytest.mark.parametrize("warmup", [0.5, 0.25])
def test_a_window_may_open_in_the_middle_of_a_burst(warmup: float) -> None:
    load = workload([0.0, 0.0], [2000, 1000], [40, 1])
    entry = {"name": "sarathi", "token_budget": 64, "watermark": 0.0}
    whole = run(load, entry)
    options = {"warmup_s": warmup * whole.end_s}
    assert fingerprint(run(load, entry, **options)) == fingerprint(run(load, entry, bursts=False, **options))


@pytest.mark.parametrize("name", [info.name for info in list_policies()])
def test_bursts_change_nothing_under_any_policy(name: str) -> None:
    rng = np.random.default_rng(5)
    load = workload(
        np.cumsum(rng.exponential(0.05, 40)).tolist(),
        rng.integers(1, 5000, 40).tolist(),
        rng.integers(1, 200, 40).tolist(),
    )
    taken, one_by_one = (
        simulate(load, make_policy(name), real_cost(), record_steps=True, bursts=bursts)
        for bursts in (True, False)
    )
    assert fingerprint(taken) == fingerprint(one_by_one)

"""What a wrong estimator costs Bullet: its decisions follow the belief, and what recalibration and slack make good."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from lane_frame import busy_load, lane
from stub_cost import real_cost

from sim.engine import RunRecords, simulate
from sim.engine.deployment import Target
from sim.policies import make_policy

# a TPOT that decode on all SMs keeps with a fifth to spare, so that prefill must leave it SMs of the right number
TARGETS = (Target(ttft_s=0.3, tpot_s=0.010),)
SEEDS = range(4)


@lru_cache(maxsize=64)
def run(estimator: str, online: bool, seed: int = 0) -> RunRecords:
    kind, _, value = estimator.partition(" ")
    believed: Any = {
        "sigma": {"noisy": {"sigma": float(value or 0)}},
        "bias": {"noisy": {"sigma": 0.0, "bias": float(value or 0)}},
    }
    policy = make_policy({"name": "bullet", "online_alpha": online})
    return simulate(
        busy_load(120, 20.0),
        policy,
        real_cost(),
        targets=TARGETS,
        estimator=believed.get(kind, kind),
        jitter=False,
        record_steps=True,
        seed=seed,
    )


def beside(records: RunRecords) -> float:
    """Mean SMs of decode while it shares the GPU."""
    steps = lane(records, 1)
    sms = steps["sms"].to_numpy()
    return float(sms[sms < sms.max()].mean())


def late(records: RunRecords) -> float:
    """Share of the requests whose TPOT or TTFT is over its limit."""
    f = records.requests
    ttft = f["first_token_s"] - f["arrival_s"]
    tpot = (f["finish_s"] - f["first_token_s"]) / np.maximum(f["output_tokens"] - 1, 1)
    return float(((ttft > TARGETS[0].ttft_s) | (tpot > TARGETS[0].tpot_s)).mean())


def ttft(records: RunRecords) -> float:
    return float((records.requests["first_token_s"] - records.requests["arrival_s"]).mean())


def test_noise_between_the_sets_costs_time_to_first_token() -> None:
    # one draw may be harmless: the mean over some is not, and grows with sigma
    true = run("oracle", True)
    sets = {s: np.mean([beside(run(f"sigma {s}", True, seed)) for seed in SEEDS]) for s in (0.1, 0.3, 1.0)}
    waits = {s: np.mean([ttft(run(f"sigma {s}", True, seed)) for seed in SEEDS]) for s in (0.1, 0.3, 1.0)}
    assert beside(true) < sets[0.1] < sets[0.3] < sets[1.0]
    assert ttft(true) < waits[0.1] < waits[0.3] < waits[1.0]
    assert waits[0.3] > 2 * ttft(true)


def test_an_error_that_all_sets_share_is_taken_out_by_observation() -> None:
    true, fast = run("oracle", True), run("bias -0.5", True)
    assert late(fast) == pytest.approx(late(true), abs=0.02)
    assert beside(fast) == pytest.approx(beside(true), rel=0.15)
    # without it a belief that steps take 0.6 of their time makes requests late
    blind = run("bias -0.5", False)
    assert late(blind) > 1.5 * late(run("oracle", False))


def test_where_nothing_is_scarce_belief_is_of_no_account() -> None:
    easy = busy_load(60, 2.0)

    def outcome(estimator: Any) -> float:
        policy = make_policy("bullet")
        found = simulate(easy, policy, real_cost(), targets=TARGETS, estimator=estimator, jitter=False)
        return ttft(found)

    assert outcome({"noisy": {"sigma": 1.0}}) == pytest.approx(outcome("oracle"), rel=0.05)

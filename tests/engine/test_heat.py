"""The clock's heat: passes start at the top clock and settle, decodes behind prompts wait; bursts change nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.measured_grid import Axis, Grid
from sim.cost.measured_steps import Composition
from sim.cost.profiled import ProfiledCost
from sim.cost.warming import Warming
from sim.engine import simulate
from sim.engine.heat import heat_factor, pass_heat
from sim.policies import make_policy
from sim.workload.workload import Workload

SLOPE = 0.12


def warm_cost(slope: float = SLOPE, decode: float = 0.05) -> ProfiledCost:
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
    axis = (Axis("tokens", (16.0, 256.0)),)
    even = Grid((Axis("tokens", (1.0,)), Axis("sms", (132.0,))), np.zeros((1, 1)))
    warming = Warming(
        Grid(axis, np.array([slope, slope])), Grid(axis, np.array([0.0, 1.0])), decode, time_s=0.03
    )
    terms = Composition(even, even, "measured", 0.0, warming)
    return replace(
        cost, profile=replace(cost.profile, composition=terms, content_hash=f"warm {slope} {decode}")
    )


def workload(arrivals: list[float], prompt: int = 2000, output: int = 40) -> Workload:
    n = len(arrivals)
    zero = np.zeros(n, np.int16)
    sizes = np.full(n, output, np.int32)
    return Workload("heat", np.array(arrivals), np.full(n, prompt, np.int32), sizes, sizes, zero, zero)


def steps_of(name: str, cost: ProfiledCost, arrivals: list[float], **more):
    return simulate(workload(arrivals), make_policy(name), cost, record_steps=True, jitter=False, **more)


def test_a_launch_takes_the_mean_of_the_heat_that_it_passes_through():
    p = SimpleNamespace(heat_rate=1.0 / 0.03)
    assert heat_factor(p, SLOPE, 1.0, 1.0, 1.0, 0.02) == pytest.approx(1.0)  # settled: the price itself
    assert heat_factor(p, SLOPE, 0.0, 0.0, 1.0, 1e-6) == pytest.approx(1.0 - SLOPE, abs=1e-4)
    # many short launches take together what one long one does
    heat, total = [0.0, 0.0], 0.0
    for _ in range(2000):
        total += heat_factor(p, SLOPE, heat[0], heat[1], 1.0, 3e-5) * 3e-5
        pass_heat(heat, 0, 1.0, 3e-5 / 0.03)
    assert total == pytest.approx(0.06 * heat_factor(p, SLOPE, 0.0, 0.0, 1.0, 0.06), rel=8e-3)
    # two lags after two time constants: 1 - 3 exp(-2)
    assert heat[0] == pytest.approx(1.0 - 3.0 * np.exp(-2.0), abs=1e-3)


def test_the_first_pass_is_faster_than_the_last_and_decodes_behind_prompts_are_slow():
    cost = warm_cost()
    cold = replace(cost, profile=replace(cost.profile, composition=None, content_hash="cold"))
    arrivals = [0.0] * 8
    warm, plain = (steps_of("vllm", one, arrivals).steps for one in (cost, cold))
    ratio = (warm["end_s"] - warm["start_s"]) / (plain["end_s"] - plain["start_s"])
    passes, decodes = warm["prefill_tokens"] > 1000, warm["prefill_tokens"] == 0
    assert ratio[passes].iloc[0] < 0.97
    assert ratio[passes].iloc[-1] == pytest.approx(1.0, abs=0.01)
    assert ratio[decodes].iloc[0] > 1.03
    assert ratio[decodes].iloc[-1] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("name", ["vllm", "sarathi-512", "streams", "fixed-50-50"])
def test_bursts_change_nothing_to_the_bit(name):
    cost = warm_cost()
    arrivals = list(np.cumsum(np.full(30, 0.03)))
    first, second = (steps_of(name, cost, arrivals, bursts=on) for on in (True, False))
    for column in ("first_token_s", "finish_s"):
        assert first.requests[column].tolist() == second.requests[column].tolist()


@pytest.mark.parametrize("name", ["vllm", "streams", "fixed-50-50"])
def test_time_that_sms_are_active_stays_within_time_that_they_are_held(name):
    records = steps_of(name, warm_cost(slope=0.3), [0.0] * 6)
    steps = records.steps
    held = (steps["end_s"] - steps["start_s"]) * steps["sms"]
    assert (steps["active_sm_s"] <= held * (1.0 + 1e-9)).all()


def test_a_profile_without_the_sweep_knows_no_heat():
    p = load_cost("llama-3.1-8b", "h100-sxm").compile(max_tokens=64, max_seqs=8, max_context=1024)
    assert p.heat_on == 0

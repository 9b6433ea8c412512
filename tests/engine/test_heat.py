"""The clock's heat: passes start at the top clock and settle, decodes behind prompts wait; bursts change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.clock import decode_factor, pass_factor, spent_after
from sim.cost.measured_grid import Axis, Grid
from sim.cost.measured_steps import Composition
from sim.cost.profiled import ProfiledCost
from sim.cost.warming import Warming
from sim.engine import simulate
from sim.policies import make_policy
from sim.workload.workload import Workload

GAIN = 0.12


def warm_cost(gain: float = GAIN, loss: float = 0.05) -> ProfiledCost:
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
    axis = (Axis("tokens", (16.0, 256.0)),)
    even = Grid((Axis("tokens", (1.0,)), Axis("sms", (132.0,))), np.zeros((1, 1)))
    gains, draws, rest = (Grid(axis, np.array(v)) for v in ((0.0, gain), (0.0, 1.0), (0.8, 0.1)))
    terms = Composition(even, even, "measured", 0.0, Warming(gains, draws, rest, 0.06, 2.8, loss))
    return replace(cost, profile=replace(cost.profile, composition=terms, content_hash=f"warm {gain} {loss}"))


def workload(arrivals: list[float], prompt: int = 2000, output: int = 40) -> Workload:
    n = len(arrivals)
    zero = np.zeros(n, np.int16)
    sizes = np.full(n, output, np.int32)
    return Workload("heat", np.array(arrivals), np.full(n, prompt, np.int32), sizes, sizes, zero, zero)


def steps_of(name: str, cost: ProfiledCost, arrivals: list[float], **more):
    return simulate(workload(arrivals), make_policy(name), cost, record_steps=True, jitter=False, **more)


class Prices:
    heat_room_s, heat_idle, heat_decode = 0.06, 2.8, 0.05


def test_a_pass_runs_at_the_top_clock_until_nothing_is_left_and_at_its_price_from_then_on():
    p = Prices()
    assert pass_factor(p, 0.0, 1.0, GAIN, 0.06) == pytest.approx(1.0 - GAIN)
    assert pass_factor(p, 0.06, 1.0, GAIN, 0.06) == 1.0
    # a pass of twice the room at the top clock: half of its work at either clock
    assert pass_factor(p, 0.0, 1.0, GAIN, 0.12 / (1.0 - GAIN)) == pytest.approx(1.0 - GAIN / 2)
    # two passes in a row take what one of both takes
    whole = 0.1 * pass_factor(p, 0.01, 0.9, GAIN, 0.1)
    first = 0.04 * pass_factor(p, 0.01, 0.9, GAIN, 0.04)
    spent = spent_after(p, 0.01, 0.9, first, 0.0)
    assert first + 0.06 * pass_factor(p, spent, 0.9, GAIN, 0.06) == pytest.approx(whole)


def test_decodes_and_idle_time_win_back_what_was_spent():
    p = Prices()
    assert spent_after(p, 0.05, -0.4, 0.05, 0.0) == pytest.approx(0.03)
    assert spent_after(p, 0.05, -0.4, 1.0, 0.0) == 0.0
    assert spent_after(p, 0.05, 1.0, 1.0, 0.01) == pytest.approx(0.06 - 0.028)
    assert decode_factor(p, 0.0) == 1.0
    assert decode_factor(p, 0.06) == pytest.approx(1.05)


def test_the_first_pass_is_faster_than_the_last_and_decodes_behind_prompts_are_slow():
    cost = warm_cost()
    cold = replace(cost, profile=replace(cost.profile, composition=None, content_hash="cold"))
    arrivals = [0.0] * 8
    warm, plain = (steps_of("vllm", one, arrivals).steps for one in (cost, cold))
    ratio = (warm["end_s"] - warm["start_s"]) / (plain["end_s"] - plain["start_s"])
    passes, decodes = warm["prefill_tokens"] > 1000, warm["prefill_tokens"] == 0
    assert ratio[passes].iloc[0] < 0.97
    assert ratio[passes].iloc[-1] > ratio[passes].iloc[0] + 0.02
    assert ratio[decodes].iloc[0] > 1.01
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
    records = steps_of(name, warm_cost(gain=0.3), [0.0] * 6)
    steps = records.steps
    held = (steps["end_s"] - steps["start_s"]) * steps["sms"]
    assert (steps["active_sm_s"] <= held * (1.0 + 1e-9)).all()


def test_a_profile_without_the_sweep_knows_no_heat():
    p = load_cost("llama-3.1-8b", "h100-sxm").compile(max_tokens=64, max_seqs=8, max_context=1024)
    assert p.heat_on == 0

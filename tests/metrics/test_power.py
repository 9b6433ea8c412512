"""Watts over time: joules are those of the work, the limit holds their running mean, peaks are of 0.1 s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_cost import real_cost
from workloads import workload

from sim.cost.energy import EnergyTerms
from sim.engine import simulate
from sim.engine.records import METER_FIELDS
from sim.metrics import Slo, summarise
from sim.metrics import power as power_module
from sim.metrics.power import GRID_S, power_figures, power_of, running_mean, watts_of
from sim.policies import make_policy

TERMS = EnergyTerms(100.0, 0.0, 0.0, 700.0, "made up", active_w=50.0, react_s=0.05)


class Cost:
    """A cost model of which only the model and the terms are asked."""

    def __init__(self, terms: EnergyTerms) -> None:
        self.model, self.energy = real_cost().model, terms


def readings(*rows: tuple[float, float, float]) -> np.ndarray[Any, Any]:
    """Time, seconds on the GPU and tokens so far."""
    made = np.zeros((len(rows), len(METER_FIELDS)))
    for row, (time, gpu, tokens) in zip(made, rows, strict=True):
        row[0], row[1], row[METER_FIELDS.index("dense_tokens")] = time, gpu, tokens
    return made


def on_grid(cost: Cost, read: np.ndarray[Any, Any], steps: int) -> tuple[Any, Any]:
    """Watts of one GPU in the first steps of the grid, and where the limit held them."""
    pieces = list(watts_of(cost.model, cost.energy, [read], 0, steps, steps * GRID_S))
    watts, held = (np.concatenate(part, axis=1)[0] for part in zip(*pieces, strict=True))
    return watts, held


def heavy(watts: float) -> Cost:
    """Terms by which a million tokens a second draw `watts`."""
    flops = Cost(replace(TERMS, j_per_flop=1.0))
    one = power_of(flops, [readings((0.0, 0.0, 0.0), (1.0, 0.0, 1.0))], (0.0, 1.0))
    assert one is not None
    per_token = replace(TERMS, j_per_flop=1.0, cap_w=1e30)
    asked = power_of(Cost(per_token), [readings((0.0, 0.0, 0.0), (1.0, 0.0, 1.0))], (0.0, 1.0))
    assert asked is not None
    return Cost(replace(TERMS, j_per_flop=watts / 1e6 / (asked.energy_j - 100.0)))


def test_idle_active_and_work_add_up() -> None:
    cost = heavy(300.0)
    read = readings((0.0, 0.0, 0.0), (1.0, 1.0, 1e6), (3.0, 1.0, 1e6))
    power = power_of(cost, [read], (0.0, 3.0))
    assert power is not None
    assert power.energy_j == pytest.approx(3 * 100 + 50 + 300, rel=1e-6)
    watts, _ = on_grid(cost, read, 300)
    assert watts[:100] == pytest.approx(450.0)
    assert watts[100:] == pytest.approx(100.0)
    assert power_figures([power])["power_cap_pct"] == 0.0


def test_beyond_the_limit_the_board_draws_more_until_it_reacts() -> None:
    """1,150 W are asked for, for a second: the mean crosses 700 W after 50 ms x log(1050 / 450) = 42 ms."""
    cost, read = heavy(1000.0), readings((0.0, 0.0, 0.0), (1.0, 1.0, 1e6), (2.0, 1.0, 1e6))
    power = power_of(cost, [read], (0.0, 2.0))
    assert power is not None
    watts, held = on_grid(cost, read, 200)
    assert watts[:4] == pytest.approx(1150.0)
    assert not held[:4].any()
    assert held[5:100].all()
    assert watts[60:99] == pytest.approx(700.0, rel=1e-4)
    assert watts[100:] == pytest.approx(100.0)
    figures = power_figures([power])
    assert 850 < figures["peak_power_w"] < 1050  # of a tenth of a second
    assert figures["power_cap_pct"] == pytest.approx(50.0, abs=3)


def test_a_board_that_slows_itself_down_draws_less_beyond_the_limit() -> None:
    heavier = heavy(1000.0)
    half = Cost(replace(heavier.energy, beyond=0.5))
    first, _ = on_grid(half, readings((0.0, 0.0, 0.0), (1.0, 1.0, 1e6)), 100)
    assert first[:4] == pytest.approx(700 + 0.5 * 450)
    # pauses of the host leave it as fast as it is: half of the time at 925 W, half idle
    paced, _ = on_grid(half, readings((0.0, 0.0, 0.0), (1.0, 0.5, 0.5e6)), 100)
    assert paced == pytest.approx(0.5 * 925 + 0.5 * 100)


def test_two_gpus_have_one_peak_and_their_shares_are_of_both() -> None:
    cost = heavy(1000.0)
    busy, idle = readings((0.0, 0.0, 0.0), (1.0, 1.0, 1e6)), readings((0.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    alone, both = (power_of(cost, read, (0.0, 1.0)) for read in ([busy], [busy, idle]))
    assert alone is not None
    assert both is not None
    assert both.energy_j == pytest.approx(alone.energy_j + 100.0)
    assert power_figures([both])["peak_power_w"] == power_figures([alone])["peak_power_w"]
    share = power_figures([alone])["power_cap_pct"]
    assert power_figures([both])["power_cap_pct"] == pytest.approx(share / 2)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=300), st.floats(0.01, 2.0), st.floats(0, 1000))
def test_the_running_mean_is_the_recursion(values: list[float], step: float, start: float) -> None:
    keep, held, expected = float(np.exp(-step)), start, []
    for value in values:
        held = keep * held + (1 - keep) * value
        expected.append(held)
    np.testing.assert_allclose(
        running_mean(np.array([values]), start, step)[0], expected, rtol=1e-9, atol=1e-9
    )


def test_a_part_of_a_step_counts_as_a_part() -> None:
    read = [readings((0.0, 0.0, 0.0), (1.0, 0.0, 0.0))]
    power = power_of(Cost(TERMS), read, (0.0, 0.987 * GRID_S + 0.5))
    assert power is not None
    assert power.energy_j == pytest.approx(100.0 * (0.5 + 0.987 * GRID_S))
    short = power_of(Cost(TERMS), read, (0.0, 0.1 * GRID_S))
    assert short is not None
    assert short.energy_j == pytest.approx(100.0 * 0.1 * GRID_S)
    assert power_figures([short])["peak_power_w"] == pytest.approx(100.0)  # of the part, not of the step
    assert power_of(Cost(TERMS), read, (0.5, 0.5)) is None
    assert power_of(Cost(TERMS), read, (0.503, 0.503)) is None
    assert power_of(object(), read, (0.0, 1.0)) is None


def test_a_long_run_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst a second, a limit that holds some of it, and a window that neither begins nor ends with a piece."""
    cost, rows = heavy(1000.0), [(0.0, 0.0, 0.0)]
    for second in range(20):
        done = 0.3 * (second + 1)
        rows += [(second + 0.3, done, 1e6 * done), (second + 1.0, done, 1e6 * done)]
    read, window = [readings(*rows), readings((0.0, 0.0, 0.0), (20.0, 0.0, 0.0))], (1.24, 18.567)
    whole = power_of(cost, read, window)
    monkeypatch.setattr(power_module, "PIECE", 320)
    parts = power_of(cost, read, window)
    assert whole is not None
    assert parts is not None
    assert whole.held_steps == parts.held_steps > 0
    assert parts.energy_j == pytest.approx(whole.energy_j, rel=1e-12)
    np.testing.assert_allclose(parts.shown, whole.shown, rtol=1e-12)


def test_a_runs_joules_are_those_of_its_sums_where_no_limit_holds_them() -> None:
    cost = real_cost()
    free = replace(cost, profile=replace(cost.profile, energy=replace(cost.energy, cap_w=1e9)))
    load = workload([0.0, 0.1, 0.2, 2.0], [3000, 500, 900, 4000], [50, 80, 10, 40])
    for entry in ("sarathi-512", {"name": "static-split", "prefill_sms": 64}):
        records = simulate(load, make_policy(entry), free, num_gpu_blocks=4000, jitter=False)
        power = power_of(free, records.readings, records.window_s)
        assert power is not None
        span = records.window_s[1] - records.window_s[0]
        work = free.energy_j(records.window_totals, span) - cost.energy.idle_w * span
        assert power.energy_j - cost.energy.idle_w * span == pytest.approx(work, rel=1e-3)


def test_a_summary_tells_peaks_and_time_at_the_limit() -> None:
    load = workload([0.0] * 12, [4000] * 12, [60] * 12)
    cost = real_cost()
    held = replace(cost, profile=replace(cost.profile, energy=replace(cost.energy, cap_w=450.0)))
    found = {}
    for name, one in (("free", cost), ("held", held)):
        records = simulate(load, make_policy("vllm"), one, num_gpu_blocks=6000, jitter=False)
        found[name] = summarise(records, slo=Slo(), cost=one, policy_label="vllm", request_rate=None, seed=0)
    assert found["held"]["power_cap_pct"] > 50 > found["free"]["power_cap_pct"]
    assert found["held"]["mean_power_w"] <= 450 < found["free"]["mean_power_w"]
    for row in found.values():
        assert row["mean_power_w"] <= row["p99_power_w"] <= row["peak_power_w"]

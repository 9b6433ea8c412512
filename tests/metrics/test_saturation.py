"""The saturation detector on queues whose load is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from fake_records import request

from sim.metrics.saturation import detect


def queue(load: float, n: int, seed: int = 0, fixed_s: float = 0.0) -> pd.DataFrame:
    """M/D/1 at that load, service 1 s, plus `fixed_s` in which any number of requests can be at once."""
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / load, n))
    end, rows = 0.0, []
    for at in arrival:
        end = max(end, at) + 1.0
        rows.append(request(at, end, end + fixed_s))
    return pd.DataFrame(rows)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("n", [100, 1000, 10000])
def test_below_capacity_is_not_saturated_whatever_the_sample_size(load: float, n: int) -> None:
    for seed in range(10):
        assert detect(queue(load, n, seed)).saturated is False


@pytest.mark.parametrize("load", [1.3, 2.0])
@pytest.mark.parametrize("n", [1000, 10000])
def test_above_capacity_is_saturated_and_the_deficit_is_that_of_the_rates(load: float, n: int) -> None:
    verdict = detect(queue(load, n))
    assert verdict.saturated is True
    assert verdict.rate_deficit == pytest.approx(1 - 1 / load, abs=0.1)
    assert verdict.backlog_growth == pytest.approx(load - 1, abs=0.2)


def test_a_short_run_far_above_capacity_is_saturated() -> None:
    assert detect(queue(2.0, 200)).saturated is True


def at_rates(*rates: float, n: int = 1000) -> pd.DataFrame:
    """A server of one request a second under stretches of other rates, n seconds each."""
    gaps = [np.full(int(n * rate), 1 / rate) for rate in rates]
    end, rows = 0.0, []
    for at in np.cumsum(np.concatenate(gaps)):
        end = max(end, at) + 1.0
        rows.append(request(at, end, end))
    return pd.DataFrame(rows)


def test_an_overload_whose_rate_falls_towards_the_end_is_saturated() -> None:
    assert detect(at_rates(0.9, 2.0, 2.0, 0.9)).saturated is True


@pytest.mark.parametrize("rates", [(0.5, 2.0, 0.2, 0.2), (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 3.0)])
def test_a_burst_that_is_worked_off_or_comes_last_is_not(rates: tuple[float, ...]) -> None:
    assert detect(at_rates(*rates)).saturated is False


def test_a_start_up_longer_than_the_run_is_not_saturation() -> None:
    """Nothing finishes while requests arrive, since each takes long, yet none waits."""
    assert detect(queue(0.3, 200, fixed_s=2000.0)).saturated is False


def test_no_answer_for_a_closed_loop_or_a_single_instant() -> None:
    assert detect(queue(2.0, 300), closed_loop=True).saturated is None
    assert detect(pd.DataFrame([request(0, 1, 2), request(0, 2, 3)])).saturated is None


def test_rejected_requests_are_no_backlog() -> None:
    served = queue(0.5, 500)
    refused = pd.DataFrame([request(t, np.nan, np.nan, status="rejected") for t in served["arrival_s"]])
    assert detect(pd.concat([served, refused], ignore_index=True)).saturated is False

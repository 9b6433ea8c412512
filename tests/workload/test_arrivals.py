"""Arrival processes: means, variation, shape, and common random numbers across rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.workload import arrivals
from sim.workload.quantiles import quantile_table
from sim.workload.streams import NAMES, stream

N = 40_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def cv(stamps: np.ndarray) -> float:
    gaps = np.diff(stamps)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_a_cv_of_one_over_root_burstiness(burstiness):
    stamps = arrivals.gamma_arrivals(N, 5.0, burstiness, rng())
    assert np.diff(stamps).mean() == pytest.approx(0.2, rel=4 / np.sqrt(N * burstiness))
    assert cv(stamps) == pytest.approx(burstiness**-0.5, rel=0.03)


def test_a_burstiness_of_one_is_poisson():
    gaps = np.sort(np.diff(arrivals.gamma_arrivals(N, 1.0, 1.0, rng())))
    distance = np.abs(1 - np.exp(-gaps) - (np.arange(N - 1) + 0.5) / (N - 1)).max()
    assert distance < 1.95 / np.sqrt(N)  # Kolmogorov-Smirnov, 0.1 %


def test_deterministic_gaps_are_equal():
    assert arrivals.deterministic_arrivals(4, 2.0).tolist() == [0.0, 0.5, 1.0, 1.5]


@given(
    st.integers(1, 200),
    st.floats(0.01, 1e4),
    st.floats(0.01, 1e4),
    st.floats(0.05, 20),
    st.integers(0, 2**32),
)
def test_the_same_seed_at_another_rate_gives_the_same_gaps_scaled(n, slow, fast, burstiness, seed):
    a = arrivals.gamma_arrivals(n, slow, burstiness, rng(seed))
    b = arrivals.gamma_arrivals(n, fast, burstiness, rng(seed))
    np.testing.assert_allclose(a * slow, b * fast, rtol=1e-12)
    assert a[0] == b[0] == 0


def test_an_infinite_rate_is_everything_at_once():
    assert not arrivals.gamma_arrivals(9, np.inf, 1.0, rng()).any()


def test_bursts_arrive_only_while_on_at_the_mean_rate():
    stamps = arrivals.on_off_arrivals(N, 5.0, 1.0, 2.0, 8.0, rng())
    assert np.all(stamps % 10.0 <= 2.0 + 1e-6)
    assert (N - 1) / stamps[-1] == pytest.approx(5.0, rel=0.02)
    busy = np.diff(stamps)[np.diff(stamps) < 5]
    assert busy.mean() == pytest.approx(1 / 25, rel=0.05)  # five times the mean rate while on


def test_bursts_without_a_pause_are_the_plain_process():
    plain = arrivals.gamma_arrivals(500, 3.0, 0.5, rng())
    np.testing.assert_allclose(arrivals.on_off_arrivals(500, 3.0, 0.5, 7.0, 0.0, rng()), plain, rtol=1e-12)


def test_a_minute_profile_brings_back_the_minutes_and_their_dispersion():
    counts = quantile_table("azure-code-2023").per_minute_counts
    assert counts is not None
    assert len(counts) == 57  # whole minutes of a trace of 3,436 s
    n = sum(counts)
    stamps = arrivals.profile_arrivals(n, n / (60 * len(counts)), 1.0, counts, rng(3))
    got = np.bincount((stamps / 60).astype(int), minlength=len(counts))[: len(counts)]
    # gaps drawn ahead of their expected time shift whole minutes a little; empty minutes stay empty or next to it
    assert np.corrcoef(got, counts)[0, 1] > 0.95
    assert got.var() / got.mean() == pytest.approx(164, rel=0.15)  # measured on the trace: 163.96


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(2, 60), st.integers(0, 99)
)
def test_a_profile_keeps_order_and_avoids_empty_minutes(counts, n, seed):
    stamps = arrivals.profile_arrivals(n, 0.5, 1.0, tuple(counts), rng(seed))
    assert np.all(np.diff(stamps) >= 0)
    lead = next(i for i, c in enumerate(counts) if c) * 60.0
    minute = ((stamps + lead) / 60) % len(counts)
    inside = np.minimum(minute % 1, 1 - minute % 1) > 1e-9
    assert all(counts[int(m) % len(counts)] for m in minute[inside])


def test_stamps_spread_in_their_bins():
    grid = np.repeat(np.arange(100) * 3.0, 20)
    stamps = arrivals.spread_in_bins(grid, 3.0, rng())
    np.testing.assert_array_equal(np.floor(stamps / 3), grid / 3)
    assert cv(stamps) == pytest.approx(1.0, rel=0.1)  # uniform in every bin looks Poisson


def test_streams_of_one_seed_are_independent_and_repeatable():
    draws = {name: stream(7, name).random(3).tolist() for name in NAMES}
    assert len({tuple(d) for d in draws.values()}) == len(NAMES)
    assert stream(7, "gaps").random(3).tolist() == draws["gaps"]
    assert stream(8, "gaps").random(3).tolist() != draws["gaps"]

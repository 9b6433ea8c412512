"""Latencies, SLO verdicts and statistics against known answers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from fake_records import request
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.definitions import (
    Slo,
    latencies,
    stalled_pct,
    statistics,
    verdicts,
    weighted_percentiles,
)

NAN = float("nan")


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def test_latencies_are_vllms_formulas() -> None:
    values = latencies(frame(request(1.0, 1.5, 3.0), request(0.0, 2.0, 2.0, output_tokens=1)))
    assert values["ttft_s"].tolist() == [0.5, 2.0]
    assert values["e2el_s"].tolist() == [2.0, 2.0]
    assert values["tpot_s"][0] == pytest.approx(1.5 / 3)  # (E2EL - TTFT) / (tokens - 1)
    assert np.isnan(values["tpot_s"][1])  # undefined for one token
    assert values["normalized_s"].tolist() == [0.5, 2.0]


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 5)), min_size=1, max_size=30),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
)
def test_weighted_percentiles_are_numpys_on_the_expanded_sample(
    sample: list[tuple[float, int]], q: list[float]
) -> None:
    values, counts = np.array([v for v, _ in sample]), np.array([c for _, c in sample])
    expanded = np.repeat(values, counts)
    ours = weighted_percentiles(values, counts, tuple(q))
    if len(expanded):
        np.testing.assert_allclose(ours, np.percentile(expanded, q), rtol=1e-12, atol=1e-12)
    else:
        assert np.isnan(ours).all()


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 5)), min_size=1, max_size=30))
def test_statistics_of_counts_are_those_of_the_expanded_sample(sample: list[tuple[float, int]]) -> None:
    values, counts = np.array([v for v, _ in sample]), np.array([c for _, c in sample])
    expanded = np.repeat(values, counts)
    found = statistics(values, counts)
    assert found["mean"] == pytest.approx(expanded.mean())
    assert found["std"] == pytest.approx(expanded.std(), abs=1e-6)
    assert found == pytest.approx(statistics(expanded), abs=1e-6)


def test_nan_is_left_out_of_statistics() -> None:
    assert statistics(np.array([1.0, NAN, 3.0]))["mean"] == 2.0
    assert np.isnan(statistics(np.array([NAN]))["p99"])


def judge(slo: Slo, *rows: dict[str, object]) -> dict[str, list[bool]]:
    requests = frame(*rows)
    return {name: met.tolist() for name, met in verdicts(requests, latencies(requests), slo).items()}


def test_a_request_is_good_when_it_meets_every_limit() -> None:
    slo = Slo(ttft_ms=500, tpot_ms=500)
    met = judge(slo, request(0, 0.5, 2.0), request(0, 0.6, 2.0), request(0, 0.1, 2.0))
    assert met == {"ttft": [True, False, True], "tpot": [True, True, False], "all": [True, False, False]}


def test_one_token_meets_any_tpot_and_itl_limit() -> None:
    met = judge(Slo(tpot_ms=1, itl_ms=1), request(0, 1, 1, output_tokens=1, max_itl_s=NAN))
    assert met["all"] == [True]


def test_rejected_and_unfinished_requests_are_not_good() -> None:
    rejected = request(0, NAN, NAN, status="rejected")
    running = request(0, 0.1, NAN, status="unfinished", max_itl_s=0.01)
    met = judge(Slo(ttft_ms=500, itl_ms=500, e2el_ms=5000), rejected, running)
    assert met["ttft"] == [False, True]  # a first token in time was seen
    assert met["itl"] == met["e2el"] == met["all"] == [False, False]


def test_itl_limit_is_on_the_longest_gap() -> None:
    met = judge(Slo(itl_ms=100), request(0, 0.1, 1, max_itl_s=0.1), request(0, 0.1, 1, max_itl_s=0.11))
    assert met["all"] == [True, False]


def test_ttft_per_prompt_token_joins_the_ttft_limit() -> None:
    slo = Slo(ttft_ms=500, ttft_ms_per_token=2)
    met = judge(slo, request(0, 0.3, 1), request(0, 0.3, 1, prompt_tokens=200))
    assert met == {"ttft": [False, True], "all": [False, True]}


def test_a_class_has_its_own_limits_and_none_where_it_sets_none() -> None:
    slo = Slo(ttft_ms=100, classes={"batch": Slo(e2el_ms=5000)})
    met = judge(slo, request(0, 0.2, 4, slo_class="batch"), request(0, 0.2, 4), request(0, 0.05, 9))
    assert met["ttft"] == [True, False, True]
    assert met["all"] == [True, False, True]


def test_without_limits_there_is_no_verdict() -> None:
    assert judge(Slo(), request(0, 1, 2)) == {}


def test_stalls_are_shares_of_requests_that_started() -> None:
    longest = np.array([0.1, 0.3, NAN, 0.6])
    assert stalled_pct(longest, np.array([True, True, False, True]), 200) == pytest.approx(200 / 3)
    assert np.isnan(stalled_pct(longest, np.zeros(4, bool), 200))

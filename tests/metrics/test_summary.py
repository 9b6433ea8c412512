"""A run's summary: keys, windows, counts and the laws behind them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from fake_records import records, request
from stub_cost import real_cost

from sim.metrics import Slo, summarise
from sim.metrics.conservation import ConservationError, check_conservation, queueing_integrals
from sim.metrics.replicates import intervals, mean_interval
from sim.metrics.summary import without_nan
from sim.metrics.utilisation import by_kind

NAN = math.nan
SLO = Slo(ttft_ms=1000, tpot_ms=1000)


def summary(run: Any, **options: Any) -> dict[str, Any]:
    asked = {"slo": SLO, "policy_label": "p", "request_rate": 1.0, "seed": 0, **options}
    return summarise(run, cost=real_cost(), **asked)


def test_keys_are_those_of_the_field() -> None:
    found = summary(records([request(0, 1, 4), request(1, 2, 5)]))
    wanted = {
        "completed duration total_input_tokens total_output_tokens request_throughput output_throughput",
        "total_token_throughput request_goodput policy model gpu num_gpus request_rate seed slo_attainment",
        "stalled_request_pct rejected unfinished preemptions sm_active_pct tensor_active_pct hbm_util_pct",
        "kv_util_pct energy_j joules_per_output_token peak_power_w p99_power_w power_cap_pct fast_path_pct",
        "fallbacks provenance saturated",
    }
    keys = {key for line in wanted for key in line.split()}
    stats = ("mean", "median", "std", "p90", "p95", "p99")
    keys |= {f"{stat}_{name}_ms" for stat in stats for name in ("ttft", "tpot", "itl", "e2el")}
    assert keys <= set(found)
    json.dumps(found, allow_nan=False)


def test_throughput_and_goodput_by_hand() -> None:
    found = summary(records([request(0, 1, 4), request(1, 2.5, 5), request(2, 2.5, 8.5)]))
    assert found["request_throughput"] == pytest.approx(3 / 10)
    assert found["output_throughput"] == pytest.approx(12 / 10)
    assert found["total_token_throughput"] == pytest.approx((300 + 12) / 10)
    assert found["request_goodput"] == pytest.approx(1 / 10)  # TTFT of the second, TPOT of the third miss
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert found["slo_attainment_by_metric"] == pytest.approx({"ttft": 2 / 3, "tpot": 2 / 3})
    assert found["mean_tpot_ms"] == pytest.approx((1000 + 2500 / 3 + 2000) / 3)
    assert found["duration"] == 10


def test_the_denominator_is_every_request_of_the_window() -> None:
    rows = [request(0, 0.5, 2), request(0, NAN, NAN, status="rejected", replica=-1, reason="too long")]
    rows.append(request(1, NAN, NAN, status="unfinished", first_scheduled_s=NAN))
    found = summary(records(rows), rejected_overlength=1)
    assert found["slo_attainment"] == pytest.approx(1 / 4)
    assert (found["num_prompts"], found["completed"], found["rejected"], found["unfinished"]) == (4, 1, 2, 1)
    assert found["censored"] == {"ttft": 1, "tpot": 1, "itl": 1, "e2el": 1}
    assert found["rejected_reasons"]["too long"] == 1


def test_the_window_selects_by_arrival_and_counts_events_within() -> None:
    rows = [request(0, 1, 4), request(3, 3.5, 6.5), request(8, 8.5, 9)]
    found = summary(records(rows, window=(2.0, 9.0)))
    assert found["completed"] == 3  # counts use the whole run
    assert found["request_throughput"] == pytest.approx(3 / 7)  # the first finishes within the window
    assert found["total_output_tokens"] == 2 + 4 + 4  # two of the first request's tokens fall into it
    assert found["total_input_tokens"] == 200
    assert found["mean_ttft_ms"] == pytest.approx(500)  # but its latency does not count
    assert found["slo_requests"] == 2


def test_no_limit_means_no_attainment_and_undefined_is_null() -> None:
    found = summary(records([request(0, 1, 1, output_tokens=1, max_itl_s=NAN)]), slo=Slo())
    assert found["slo_attainment"] is None
    assert found["request_goodput"] is None
    assert found["mean_tpot_ms"] is None
    assert found["max_itl_ms"] is None
    assert found["single_token_requests"] == 1


def test_itl_pools_tokens_with_their_counts() -> None:
    run = records(
        [request(0, 1, 4)],
        itl_s=np.array([0.01, 1.0]),
        itl_count=np.array([99, 1]),
        itl_end_s=np.array([2.0, 3.0]),
    )
    found = summary(run)
    assert found["mean_itl_ms"] == pytest.approx((99 * 10 + 1000) / 100)
    assert found["median_itl_ms"] == pytest.approx(10)
    assert found["p99_itl_ms"] == pytest.approx(1e3 * np.percentile([0.01] * 99 + [1.0], 99))


def test_utilisation_is_of_the_window_and_energy_between_idle_and_cap() -> None:
    totals = {"busy_s": 5.0, "sm_active_s": 330.0, "kv_block_s": 250.0, "host_bound_s": 1.0}
    found = summary(records([request(0, 1, 4)], totals=totals))
    assert found["busy_pct"] == pytest.approx(50)
    assert found["sm_active_pct"] == pytest.approx(100 * 330 / (132 * 10))
    assert found["kv_util_pct"] == pytest.approx(25)
    assert real_cost().energy.idle_w <= found["mean_power_w"] <= real_cost().energy.cap_w
    assert found["joules_per_output_token"] == pytest.approx(found["energy_j"] / 4)
    assert sum(found["provenance"].values()) == pytest.approx(1)


def conserved(**other: Any) -> Any:
    rows = [request(0, 1, 4), request(1, 3, 6, first_scheduled_s=2.0)]
    totals = {"waiting_s": 1.0, "running_s": 8.0}
    return records(rows, totals=totals, **other)


def test_littles_law_holds_on_consistent_records() -> None:
    check_conservation(conserved())
    assert queueing_integrals(conserved()) == {"system": (9.0, 9.0), "waiting": (1.0, 1.0)}


@pytest.mark.parametrize("fault", ["integral", "tokens", "order", "state", "late"])
def test_a_breach_of_conservation_is_found(fault: str) -> None:
    run = conserved()
    if fault == "integral":
        run.totals["waiting_s"] = 1.1
    elif fault == "tokens":
        run.itl_count[0] += 1
    elif fault == "order":
        run.requests.loc[0, "first_scheduled_s"] = 1.5
    elif fault == "state":
        run.requests.loc[0, "status"] = "unfinished"
    else:
        run.end_s = 5.0
    with pytest.raises(ConservationError):
        check_conservation(run)


def test_replicates_give_a_student_interval_and_one_run_none() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0]) or (0, 0)
    assert (low, high) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert mean_interval([1.0]) is None
    # 97.5 % quantiles for 31, 40 and 120 degrees of freedom (any statistics table)
    for n, t in ((32, 2.03951), (41, 2.02108), (121, 1.97993)):
        low, high = mean_interval([-1.0, 1.0] + [0.0] * (n - 2)) or (0, 0)
        assert high * np.sqrt(n) / np.sqrt(2 / (n - 1)) == pytest.approx(t, abs=1e-4)
    runs = [
        {"policy": "p", "request_rate": 1.0, "slo_attainment": x, "p99_ttft_ms": None} for x in (0.9, 1.0)
    ]
    (row,) = intervals([*runs, {"policy": "q", "request_rate": 1.0, "slo_attainment": 0.5}])
    assert row["policy"] == "p"
    assert row["replicates"] == 2
    assert row["slo_attainment"]["mean"] == pytest.approx(0.95)
    assert "p99_ttft_ms" not in row


def test_plain_numbers_only() -> None:
    value = without_nan({"a": np.float64("nan"), "b": [np.int64(3), float("inf")], "c": np.bool_(True)})
    assert value == {"a": None, "b": [3, None], "c": True}
    assert type(value["b"][0]) is int


def test_provenance_collapses_to_its_kind() -> None:
    shares = {"measured": 0.5, "measured, scaled by 2": 0.25, "extrapolated from x by y": 0.25}
    assert by_kind(shares) == {"measured": 0.75, "extrapolated": 0.25}


def test_reasons_are_the_commonest_and_the_rest_is_counted() -> None:
    nan = float("nan")
    gone = {"status": "rejected", "first_scheduled_s": nan, "max_itl_s": nan, "replica": -1}
    rows = [request(0.0, nan, nan, reason=f"reason {n:02d}", **gone) for n in range(25)]
    rows.append(request(0.0, nan, nan, reason="reason 24", **gone))
    found = summary(records(rows))["rejected_reasons"]
    assert len(found) == 21
    assert next(iter(found.items())) == ("reason 24", 2)
    assert found["others, told in requests.parquet"] == 5
    assert sum(found.values()) == 26

"""Who wins at a rate, and what the others lose by: known cases, one per cause."""

from __future__ import annotations

from typing import Any

import pytest

from sim.report.points import points_of
from sim.report.sm_time import CLASSES, sm_time_bars
from sim.report.tables import verdict_table
from sim.report.terminal import summary_table
from sim.report.verdict import verdicts_of


def run(
    policy: str, share: float, *, rate: float = 8.0, ttft: float = 1.0, tpot: float = 1.0, **keys: Any
) -> Any:
    base = {
        "policy": policy,
        "request_rate": rate,
        "num_gpus": 1,
        "completed": 100,
        "slo_attainment": share,
        "slo_attainment_by_metric": {"ttft": ttft, "tpot": tpot},
        "request_goodput": rate * share,
        "request_goodput_per_gpu": rate * share,
        "mean_queue_ms": 10.0,
        "mean_ttft_ms": 100.0,
        "p99_ttft_ms": 300.0,
        "mean_tpot_ms": 20.0,
        "p99_tpot_ms": 30.0,
        "median_itl_ms": 20.0,
        "p99_itl_ms": 30.0,
        "mean_e2el_ms": 2000.0,
        "sm_time_pct": {"active": 80.0, "wave_tail": 5.0, "empty": 15.0},
    }
    return base | keys


BEST = run("best", 0.99)


def loss_of(other: Any) -> Any:
    (verdict,) = verdicts_of(points_of([other, BEST]))
    assert verdict.winner.policy == "best"
    return verdict.losses[0]


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (run("queues", 0.5, ttft=0.5, mean_queue_ms=1500.0, mean_ttft_ms=1600.0), "queueing"),
        (run("sends", 0.8, tpot=0.8, mean_transfer_ms=400.0, mean_e2el_ms=2500.0), "transfer"),
        (run("stalls", 0.6, tpot=0.6, p99_itl_ms=400.0), "prefill stalls"),
        (
            run("shares", 0.7, tpot=0.7, mean_tpot_ms=40.0, sm_time_pct={"active": 60.0, "contention": 30.0}),
            "contention",
        ),
        (run("idles", 0.7, tpot=0.7, sm_time_pct={"active": 60.0, "idle_lane": 40.0}), "idle SMs"),
        (run("slow", 0.7, tpot=0.7, mean_tpot_ms=60.0), "slower steps"),
        (run("late", 0.99, p99_ttft_ms=900.0), "longer tails"),
        (run("twin", 0.99), "nothing"),
    ],
)
def test_the_cause_of_a_loss(other: Any, cause: str) -> None:
    assert loss_of(other).cause == cause


def test_a_transfer_that_costs_next_to_nothing_is_no_cause() -> None:
    quick = run("sends", 0.8, tpot=0.8, mean_transfer_ms=1.4, mean_e2el_ms=1900.0, p99_itl_ms=160.0)
    assert loss_of(quick).cause == "prefill stalls"


def test_the_evidence_gives_both_sides() -> None:
    loss = loss_of(run("queues", 0.5, ttft=0.5, mean_queue_ms=1500.0, mean_ttft_ms=1600.0))
    assert loss.evidence.startswith("TTFT met by 50 %; queue 1,500 against 10.0 ms")


def test_equal_shares_are_settled_by_goodput_per_gpu_then_by_tails() -> None:
    two = run("two", 1.0, num_gpus=2, request_goodput=9.0, request_goodput_per_gpu=4.5)
    late = run("late", 1.0, p99_ttft_ms=900.0)
    soon = run("soon", 1.0)
    (verdict,) = verdicts_of(points_of([two, late, soon]))
    assert [verdict.winner.policy, *(loss.policy for loss in verdict.losses)] == ["soon", "late", "two"]


def test_without_slo_or_rival_there_is_no_verdict() -> None:
    assert verdicts_of(points_of([BEST])) == []
    bare = [run(name, 0.0, slo_attainment=None, request_goodput_per_gpu=None) for name in ("a", "b")]
    assert verdicts_of(points_of(bare)) == []
    assert verdict_table(points_of(bare)) == ""


def test_every_surface_names_the_winner_once_a_rate() -> None:
    runs = [
        run(name, share, rate=rate) for name, share in (("best", 0.99), ("slow", 0.5)) for rate in (4.0, 8.0)
    ]
    assert verdict_table(points_of(runs)).count("<b>best</b>") == 2
    table = summary_table(runs)
    assert "WINNER" in table
    assert max(map(len, table.splitlines())) <= 110


def test_bars_hold_every_class_of_every_policy() -> None:
    figure = sm_time_bars(points_of([BEST, run("other", 0.5, sm_time_pct=dict.fromkeys(CLASSES, 100 / 9))]))
    assert len(figure["data"]) == len(CLASSES)
    total = sum(trace["x"][1] for trace in figure["data"])
    assert total == pytest.approx(100)


def test_rates_per_gpu_lie_on_one_axis() -> None:
    alone = run("alone", 0.9, request_rate_per_gpu=8.0)
    pair = run("pair", 0.95, rate=16.0, num_gpus=2, request_rate_per_gpu=8.0, request_goodput_per_gpu=7.6)
    (verdict,) = verdicts_of(points_of([alone, pair]))
    assert (verdict.rate, verdict.winner.policy) == (8.0, "pair")
    assert "rate, req/s per GPU" in verdict_table(points_of([alone, pair]))

"""Published figures of POD-Attention and of chunked prefill, reproduced from serial inputs; what is not says why."""

from __future__ import annotations

import pytest

from sim.cost.pod_checks import Check, all_checks

# names of all checks, so that none is lost unnoticed
HOLD = [
    *("P1-mean", "P1-min", "P2", "hfuse-median"),
    *(f"P3-{what}-{chunk}" for chunk in (28, 29, 30, 31) for what in ("serial", "ratio")),
    *("P5-decode", "P5-total", "P6-signs", "P6-16K", "P7-max", "S4-512", "S4-2048", "S5"),
]
# name -> why a model of serial parts misses it
MISSED = {
    "P1-max": "1.70 against 1.59: prompts of 16K, where serial decode ends in a tail that fusion takes away altogether",
    "P4": "21 % against 14 %: vanilla splits make decode wait for two whole waves of equal CTAs; real ones end ragged",
    "P6-1K": "3 % against 14 %: what 4 CTAs an SM gain by finer waves is lost to the lower rate of their smaller tile",
    "P7-grows": "5 of 8 steps: with more prefill CTAs than an SM draws tickets, decode is left to the end",
    "hfuse-min": "1.00 against 0.87: registers that spill where two kernels share one are not in the model",
    "streams-max": "1.59 against 1.20: two kernels start together whenever slots are free; real ones seldom do",
    "batched-min": "0.81 against 0.60: a decode padded to a prefill tile loads its keys as fast as any other",
}


@pytest.fixture(scope="module")
def checks() -> dict[str, Check]:
    return {check.name: check for check in all_checks()}


def test_every_check_is_told_of(checks):
    assert sorted(checks) == sorted([*HOLD, *MISSED])


@pytest.mark.parametrize("name", HOLD)
def test_published_figure(checks, name):
    check = checks[name]
    assert check.low <= check.ours <= check.high, f"{check.published} ({check.source}): ours {check.ours:.3f}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=why)) for name, why in MISSED.items()],
)
def test_published_figure_that_is_missed(checks, name):
    assert checks[name].holds


@pytest.mark.parametrize(
    ("name", "ours"),
    [("P1-max", 1.703), ("P4", 0.205), ("P6-1K", 0.027), ("P7-grows", 5), ("hfuse-min", 0.999),
     ("streams-max", 1.593), ("batched-min", 0.808)],
)  # fmt: skip
def test_what_is_missed_is_missed_by_as_much_as_is_said(checks, name, ours):
    assert checks[name].ours == pytest.approx(ours, rel=0.02)

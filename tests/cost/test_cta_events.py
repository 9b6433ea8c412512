"""The schedule of CTAs with lengths of their own: known makespans, limits, and the schedule of CTAs alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.cta_events import CtaRates, Launch, spans
from sim.cost.cta_schedule import HALF, PREFILL_FIRST, Tickets, proportional

RATES = CtaRates(alone=0.8, beside=0.5, decode_beside=0.7, stream=10.0, bandwidth=1e9, bandwidth_p=2.0)
NONE = np.zeros(0)


def span(prefill, decode, tickets=PREFILL_FIRST, slots=2, sms=4, rates=RATES, by_block=False):
    launch = Launch(np.array(prefill, float), np.array(decode, float), tickets, slots, by_block)
    return spans([launch], rates, sms)[0]


def test_ctas_of_one_kind() -> None:
    assert span([8.0], [])[0] == pytest.approx(10.0)  # alone: 0.8 of an SM
    assert span([1.0] * 8, [])[0] == pytest.approx(2.0)  # two share an SM
    assert span([1.0] * 9, [])[0] == pytest.approx(2.0 + 1.25)  # and the ninth has one to itself
    assert span([], [100.0] * 8)[1] == pytest.approx(10.0, rel=1e-6)


def test_bandwidth_saturates() -> None:
    tight = CtaRates(0.8, 0.5, 0.7, 10.0, 40.0, 4.0)
    alone, all_of_them = span([], [100.0], rates=tight)[1], span([], [100.0] * 8, rates=tight)[1]
    assert alone == pytest.approx(10.0, rel=0.01)
    assert 800 / 40 < all_of_them < 1.05 * 800 / 40


def test_beside_each_other_both_slow_down() -> None:
    prefill, decode = span([5.0] * 4, [70.0] * 4, HALF)
    assert prefill == pytest.approx(10.0)  # half of an SM
    assert decode == pytest.approx(10.0)  # 0.7 of its rate
    # four more slots' worth: prefill first, decode has no neighbour then
    assert span([1.0] * 8, [100.0] * 8)[1] == pytest.approx(2.0 + 10.0, rel=1e-3)


def test_tickets_say_who_comes_first() -> None:
    rare = span([1.0], [10.0] * 12, proportional(1, 12))
    late = span([1.0], [10.0] * 12, Tickets(13, 0))
    assert rare[0] < late[0]
    # kinds by block index: of two prefill and six decode CTAs every fourth is prefill's
    both = span([4.0] * 2, [40.0] * 6, by_block=True)
    assert both[0] == pytest.approx(8.0)


def test_a_longer_cta_ends_later() -> None:
    even, uneven = span([1.0] * 16, [])[0], span([0.5] * 15 + [8.5], [])[0]
    assert uneven > even


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 5.0), max_size=30),
    st.lists(st.floats(1.0, 80.0), max_size=30),
    st.integers(1, 4),
    st.booleans(),
)
def test_work_bounds_the_makespan(prefill, decode, slots, by_block) -> None:
    if not prefill and not decode:
        return
    tickets = proportional(len(prefill), len(decode))
    made = span(prefill, decode, tickets, slots, by_block=by_block)
    last = made.max()
    least = max(sum(prefill) / 4, max(prefill, default=0.0), max(decode, default=0.0) / 10.0)
    assert last >= least * 0.99
    # no SM is idle while there is work: twice the mean and the longest at the slowest rates
    slowest = sum(prefill) / 4 / 0.5 + sum(decode) / 4 / 7.0
    assert last <= 1.05 * (slowest + slots * max([*prefill, 0.0]) / 0.5 + max([*decode, 0.0]) / 7.0) + 1e-6


def test_launches_do_not_know_each_other() -> None:
    rng = np.random.default_rng(4)
    launches = [
        Launch(rng.uniform(0.1, 2, p), rng.uniform(5, 50, d), proportional(p, d), slots)
        for p, d, slots in ((3, 20, 2), (40, 2, 4), (17, 17, 2), (1, 1, 1), (9, 0, 2))
    ]
    together = spans(launches, RATES, 5)
    for launch, both in zip(launches, together, strict=True):
        np.testing.assert_allclose(spans([launch], RATES, 5)[0], both, rtol=1e-12)

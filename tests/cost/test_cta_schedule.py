"""The list schedule of CTAs: known answers, bounds, conservation and the ticket rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.cta_schedule import (
    HALF,
    NO_CTAS,
    PAIRS,
    PREFILL_FIRST,
    Ctas,
    Machine,
    Tickets,
    proportional,
    run_schedule,
)

SMS = 10
# memory that no one exhausts, and arithmetic that memory does not disturb
WIDE = Machine(SMS, 1e13, 1e12, 50.0, 50.0)


def prefill(count: int, alone_s: float = 1.0, bytes_: float = 0.0) -> Ctas:
    """CTAs that need one SM-second of arithmetic each."""
    return Ctas(count, 1.0, bytes_, 1.0, alone_s)


def decode(count: int, bytes_: float = 1.0, alone_s: float = 1.0) -> Ctas:
    return Ctas(count, 1e-6, bytes_, 1.0, alone_s)


def test_whole_waves_of_one_kind():
    assert run_schedule(WIDE, prefill(20), NO_CTAS, 2, PREFILL_FIRST).seconds == pytest.approx(2.0)
    assert run_schedule(WIDE, prefill(40), NO_CTAS, 2, PREFILL_FIRST).seconds == pytest.approx(4.0)
    assert run_schedule(WIDE, prefill(10), NO_CTAS, 1, PREFILL_FIRST).seconds == pytest.approx(1.0)


def test_one_cta_past_a_wave_costs_a_wave():
    whole = run_schedule(WIDE, prefill(20), NO_CTAS, 2, PREFILL_FIRST)
    past = run_schedule(WIDE, prefill(21), NO_CTAS, 2, PREFILL_FIRST)
    assert past.seconds == pytest.approx(whole.seconds + 1.0)
    assert past.busy < 0.75 < whole.busy == pytest.approx(1.0)


def test_a_lone_cta_cannot_use_a_whole_sm():
    assert run_schedule(WIDE, prefill(10, alone_s=1.5), NO_CTAS, 2, PREFILL_FIRST).seconds == pytest.approx(
        1.5
    )
    assert run_schedule(WIDE, prefill(20, alone_s=1.5), NO_CTAS, 2, PREFILL_FIRST).seconds == pytest.approx(
        2.0
    )


def test_bandwidth_is_shared_by_all_that_read_at_the_same_rate():
    narrow = Machine(SMS, 4.0, 1e9, 200.0, 200.0)
    assert run_schedule(narrow, NO_CTAS, decode(20), 2, PREFILL_FIRST).seconds == pytest.approx(5.0, rel=1e-6)
    # the last CTA has it all, up to what one can draw
    assert run_schedule(narrow, NO_CTAS, decode(21), 2, PREFILL_FIRST).seconds == pytest.approx(6.0, rel=1e-6)


def test_an_sm_has_a_bandwidth_of_its_own():
    ports = Machine(SMS, 1e9, 0.5, 50.0, 50.0)
    assert run_schedule(ports, NO_CTAS, decode(20), 2, PREFILL_FIRST).seconds == pytest.approx(4.0)
    assert run_schedule(ports, NO_CTAS, decode(10), 2, PREFILL_FIRST).seconds == pytest.approx(2.0)


def test_both_kinds_overlap_but_for_the_strain_of_using_both_resources_fully():
    loose = Machine(SMS, 10.0, 1e9, 200.0, 50.0)
    both = run_schedule(loose, prefill(10), decode(10), 2, HALF)
    assert both.seconds == pytest.approx(2 ** (1 / 50.0), rel=4e-3)
    strained = run_schedule(replace(loose, overlap_p=4.0), prefill(10), decode(10), 2, HALF)
    assert strained.seconds == pytest.approx(2 ** (1 / 4.0), rel=4e-3)


def test_tickets_in_proportion_divide_like_integers():
    assert proportional(50, 100) == Tickets(3, 1)
    assert proportional(90, 100) == Tickets(2, 1)
    assert proportional(100, 30) == Tickets(4, 3)
    assert proportional(5, 0) == proportional(0, 5) == PREFILL_FIRST


def test_prefill_first_makes_decode_wait_and_tickets_do_not():
    waits = run_schedule(WIDE, prefill(40), decode(10), 2, PREFILL_FIRST)
    shares = run_schedule(WIDE, prefill(40), decode(10), 2, HALF)
    assert waits.decode_s == pytest.approx(waits.seconds)
    assert shares.decode_s < waits.decode_s


def test_what_a_kind_has_run_out_of_goes_to_the_other():
    # every ticket says prefill, of which there is none after the first
    rest = run_schedule(WIDE, prefill(1), decode(19), 2, Tickets(9, 9))
    assert rest.seconds == pytest.approx(1.0, rel=1e-4)


def test_fused_pairs_wait_for_the_slower_half():
    pairs = run_schedule(WIDE, prefill(20), decode(20, alone_s=3.0), 1, PAIRS)
    assert pairs.seconds == pytest.approx(6.0, rel=1e-4)
    uneven = run_schedule(WIDE, prefill(20), decode(5, alone_s=3.0), 1, PAIRS)
    assert 3.0 <= uneven.seconds < 6.0


counts = st.integers(0, 120)


@settings(max_examples=150, deadline=None)
@given(
    p=counts,
    d=counts,
    slots=st.integers(1, 4),
    rule=st.sampled_from(["half", "proportional", "first", "pairs"]),
    weight=st.floats(0.05, 20.0),
    alone=st.floats(1.0, 4.0),
    overlap_p=st.floats(1.5, 20.0),
    sharpness=st.floats(1.0, 20.0),
)
def test_no_schedule_beats_the_resources_or_leaves_work_undone(
    p, d, slots, rule, weight, alone, overlap_p, sharpness
):
    if p + d == 0:
        return
    tickets = {"half": HALF, "proportional": proportional(p, d), "first": PREFILL_FIRST, "pairs": PAIRS}[rule]
    machine = Machine(SMS, 12.0, 2.0, sharpness, overlap_p)
    made = run_schedule(machine, prefill(p, alone, 0.01), decode(d, weight, alone * weight), slots, tickets)
    arithmetic = (p + 1e-6 * d) / SMS
    memory = (0.01 * p + weight * d) / machine.bandwidth
    longest = max(alone if p else 0.0, alone * weight if d else 0.0)
    assert made.seconds >= max(arithmetic, memory, longest) * (1 - 1e-6)
    # at worst all run one after the other on one SM's resources, strained
    assert made.seconds <= 2.0 * (p * alone + d * weight * max(alone, 1.0) + 1.0)
    assert max(made.prefill_s, made.decode_s) == pytest.approx(made.seconds)
    assert (made.prefill_s > 0) == (p > 0)
    assert (made.decode_s > 0) == (d > 0)
    assert 0 < made.busy <= 1 + 1e-9
    assert made.busy <= made.resident <= slots * 2 + 1e-9


@settings(max_examples=30, deadline=None)
@given(p=st.integers(1, 60), d=st.integers(1, 60), times=st.floats(0.1, 50.0))
def test_twice_the_work_takes_twice_the_time(p, d, times):
    machine = Machine(SMS, 3.0, 2.0, 2.0, 4.0)
    tickets = proportional(p, d)
    one = run_schedule(machine, prefill(p, 1.3), decode(d), 2, tickets)
    scaled = [replace(c, flops=c.flops * times, hbm_bytes=c.hbm_bytes * times, alone_s=c.alone_s * times)
              for c in (prefill(p, 1.3), decode(d))]  # fmt: skip
    assert run_schedule(machine, *scaled, 2, tickets).seconds == pytest.approx(one.seconds * times, rel=1e-5)

"""Curves with limits: flagged, refused when strict; and what a neighbour on the same GPU costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost import load_cost
from sim.cost.contention import slowdown_arrays
from sim.cost.shapes import Gemm, Launch
from sim.cost.spec import RooflineCurve
from sim.errors import SimctlError

H200 = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
SMALL, LARGE = Launch(((64, 0),)), Launch(((512, 0),))


@dataclass(frozen=True)
class UpTo100Rows(RooflineCurve):
    """A curve that was measured for GEMMs of at most 100 rows."""

    def covered(self, shape, sms):
        return isinstance(shape, Gemm) and bool((shape.m <= 100).all())


def limited(extrapolation):
    base = H200.profile.curve("gemm")
    curve = UpTo100Rows(base.gpu, base.terms, "measured", "gemm of 1 to 100 rows", extrapolation)
    return replace(H200, profile=replace(H200.profile, curves={**H200.profile.curves, "gemm/o": curve}))


@pytest.mark.parametrize("extrapolation", ["flag", "clip"])
def test_a_launch_off_the_coverage_is_flagged_once_an_operator(extrapolation):
    cost = limited(extrapolation)
    assert cost.solo(SMALL).flags == ()
    assert cost.solo(LARGE).flags == ("gemm/o: outside gemm of 1 to 100 rows",)
    assert cost.solo(LARGE).gpu_s == H200.solo(LARGE).gpu_s


def test_a_curve_that_must_not_be_left_raises():
    cost = limited("raise")
    assert cost.solo(SMALL).gpu_s > 0
    with pytest.raises(
        SimctlError, match=r"gemm/o on 132 SMs is outside what profile 'spec:h200-sxm' covers"
    ):
        cost.solo(LARGE)


demands = st.floats(0, 1)


def factors(a, b, split, overlap=0):
    """Factors on two launches by their shares of the bandwidth, the second idle if it draws none."""
    sides = ((np.array([one]), np.array([one > 0])) for one in (a, b))
    return tuple(float(found[0, 0]) for found in slowdown_arrays(*sides, split, overlap))


@given(demands, demands, st.integers(8, 124))
def test_a_neighbour_never_helps_and_an_idle_one_costs_nothing(a, b, sms):
    split = (sms, 132 - sms)
    fa, fb = factors(a, b, split)
    assert fa >= 1
    assert fb >= 1
    assert factors(b, a, split[::-1]) == (fb, fa)
    assert factors(a, 0.0, split, overlap=8)[0] == 1


def test_two_streams_slow_each_other_and_a_gemm_hardly_notices():
    decode, prefill = Launch((), 64, 64 * 4096), Launch(((8192, 0),))
    both = H200.slowdown(decode, decode, (64, 68))
    mixed = H200.slowdown(prefill, decode, (96, 36))
    assert min(both) > 1.2
    assert mixed[0] < 1.05 <= mixed[1] + 0.05


def test_shared_sms_are_split_while_both_run():
    a, b = Launch(((512, 0),)), Launch((), 8, 8 * 512)
    apart, shared = H200.slowdown(a, b, (100, 100)), H200.slowdown(a, b, (100, 100), overlap=68)
    assert shared[0] / apart[0] == pytest.approx(100 / 66)
    assert shared[1] > apart[1]

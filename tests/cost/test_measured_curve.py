"""Measured curves: residual over form, labels of foreign shapes, coverage, clipping, stairs, ragged batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.cost.gpu import load_gpu
from sim.cost.measured import MeasuredCurve, curve_data, curve_from_data, form_of
from sim.cost.measured_grid import Axis, Grid
from sim.cost.shapes import DecodeAttention, Elementwise, Gemm, PrefillAttention, Shape
from sim.errors import SimctlError

H200 = load_gpu("h200-sxm")
FLAT = {"fixed_s": 3e-6, "compute": 0.8, "memory": 0.85, "knee": 0.4}
AXES = (Axis("m", (1.0, 64.0, 1024.0)), Axis("sms", (64.0, 132.0)))
SHAPE = Gemm(np.array([64, 1024]), 4096, 4096, 2)


def curve(**changes) -> MeasuredCurve:
    values = np.log(np.array([[1.0, 1.0], [2.0, 1.1], [1.0, 1.2]]))
    made = MeasuredCurve(
        form=form_of(H200, "flat", FLAT, "measured"),
        tables={(4096, 4096, 2): Grid(AXES, values)},
        label="measured",
        coverage="m 1-1024, 4096x4096, 64-132 SMs",
        sigma=0.02,
        sigma_off=0.15,
        other_label="extrapolated from here by roofline",
    )
    return replace(made, **changes)


def test_a_residual_multiplies_the_form_at_its_knots():
    form = form_of(H200, "flat", FLAT, "")
    for sms, factors in ((64, [2.0, 1.0]), (132, [1.1, 1.2])):
        expected = form.timing(SHAPE, sms).seconds * factors
        assert curve().timing(SHAPE, sms).seconds == pytest.approx(expected)


def test_a_table_of_times_stands_for_the_time_itself_and_keeps_the_forms_reaction_to_the_clock():
    times = np.log(np.full((3, 2), 5e-5))
    made = curve(method="table", tables={(4096, 4096, 2): Grid(AXES, times)})
    assert made.timing(SHAPE, 132).seconds == pytest.approx([5e-5, 5e-5])
    slow = made.timing(Gemm(np.array([1024]), 4096, 4096, 2), 132, clock=0.5).seconds[0]
    assert 5e-5 < slow < 1e-4 + 1e-9


def test_other_constants_get_the_form_its_label_and_a_larger_error():
    other = Gemm(np.array([64]), 5000, 5000, 2)
    form = form_of(H200, "flat", FLAT, "")
    assert curve().timing(other, 132).seconds == pytest.approx(form.timing(other, 132).seconds)
    assert curve().label_for(other) == "extrapolated from here by roofline"
    assert curve().label_for(SHAPE) == "measured"
    assert not curve().covered(other, 132)
    assert (curve().spread(SHAPE, 132), curve().spread(other, 132)) == (0.02, 0.15)
    shared = curve(pooled=Grid(AXES, np.full((3, 2), np.log(1.5))))
    assert shared.timing(other, 132).seconds == pytest.approx(1.5 * form.timing(other, 132).seconds)


@pytest.mark.parametrize(
    ("m", "sms", "covered"), [(64, 132, True), (1024, 64, True), (1025, 132, False), (64, 32, False)]
)
def test_coverage_is_the_measured_range_of_each_axis(m, sms, covered):
    assert curve().covered(Gemm(np.array([m]), 4096, 4096, 2), sms) is covered


def test_clipping_answers_as_at_the_edge():
    far, edge = Gemm(np.array([9000]), 4096, 4096, 2), Gemm(np.array([1024]), 4096, 4096, 2)
    clipped = curve(extrapolation="clip")
    assert clipped.timing(far, 132).seconds == pytest.approx(clipped.timing(edge, 132).seconds)
    assert curve().timing(far, 132).seconds > 5 * curve().timing(edge, 132).seconds


def test_on_stairs_a_size_takes_the_time_of_the_next_measured_one():
    made = curve(stairs=(1, 64, 1024))
    at = made.timing(Gemm(np.array([65, 1024, 2000]), 4096, 4096, 2), 132).seconds
    assert at[0] == at[1] < at[2]


def test_a_ragged_batch_waits_for_its_longest_context():
    axes = (Axis("batch", (16.0, 64.0)), Axis("sms", (64.0, 132.0)))
    terms = {"launch_s": 9e-6, "bandwidth_efficiency": 0.9, "sm_bytes_per_clock": 58, "bandwidth_p": 2.0}
    made = MeasuredCurve(
        form_of(H200, "waves", terms, ""),
        {},
        "measured",
        "",
        skew=Grid(axes, np.array([[0.0, 0.0], [12.0, 12.0]])),
    )

    def seconds(batch: int, longest: float | None) -> float:
        most = None if longest is None else np.array([longest])
        shape = DecodeAttention(np.array([batch]), np.array([batch * 2048.0]), 32, 8, 128, 2, None, most)
        return float(made.timing(shape, 132).seconds[0])

    assert seconds(64, 10048.0) - seconds(64, 2048.0) == pytest.approx(12e-9 * 8000)
    assert seconds(64, None) == seconds(64, 2048.0)
    assert seconds(16, 10048.0) == seconds(16, None)


def test_sm_seconds_never_exceed_what_there_are():
    timing = curve().timing(SHAPE, 64)
    assert (timing.sm_s <= timing.seconds * 64 + 1e-12).all()


def test_a_curve_survives_its_json():
    again = curve_from_data(
        {**curve_data(curve(), FLAT), "other_label": "elsewhere"}, H200, "measured", "here", "flag", "file"
    )
    assert again.timing(SHAPE, 64).seconds == pytest.approx(curve().timing(SHAPE, 64).seconds, rel=1e-4)
    assert again.label_for(Gemm(np.array([1]), 1, 1, 2)) == "elsewhere"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "spline"}, "unknown form 'spline'"),
        ({"method": "magic"}, "method 'magic'"),
        ({"terms": {"fixed_s": 1.0}}, "file, terms must hold positive values"),
        ({"tables": [{"grid": {}}]}, "key 'constants' is missing"),
    ],
)
def test_a_broken_curve_is_refused_with_its_place(change, message):
    with pytest.raises(SimctlError, match=message):
        curve_from_data({**curve_data(curve(), FLAT), **change}, H200, "measured", "", "flag", "file")


def test_an_element_wise_curve_is_read_by_rows():
    axes = (Axis("rows", (1.0, 64.0)), Axis("sms", (64.0, 132.0)))
    made = curve(tables={(8192,): Grid(axes, np.full((2, 2), np.log(3.0)))})
    shape = Elementwise(np.array([8]), 8192)
    assert made.timing(shape, 132).seconds == pytest.approx(3.0 * made.form.timing(shape, 132).seconds)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_other_heads_take_the_residual_of_as_many_blocks(kind):
    """A shard of a quarter of the heads at four times the tokens or sequences has as many blocks."""
    axes = (Axis("first", (16.0, 64.0, 256.0)), Axis("second", (0.0, 4096.0), "log2p256"), AXES[1])
    values = np.log(np.broadcast_to(np.array([1.0, 1.4, 2.0])[:, None, None], (3, 2, 2)))
    made = curve(tables={}, pooled=Grid(axes, values))

    def shape(first: int, share: int) -> Shape:
        heads = (32 // share, 8 // share, 128, 2, None)
        if kind == "prefill":
            return PrefillAttention(np.array([first]), np.array([1024]), *heads)
        return DecodeAttention(np.array([first]), np.array([first * 1024.0]), *heads)

    for first, factor in ((64, 1.4), (256, 2.0)):
        for share in (1, 4):
            asked = shape(first * share, share)
            alone = made.form.timing(asked, 132).seconds
            assert made.timing(asked, 132).seconds == pytest.approx(factor * alone)

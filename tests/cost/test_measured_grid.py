"""Tables of measured curves: multilinear between the knots, and what happens off them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.measured_grid import FADE, Axis, Grid, stencil
from sim.errors import SimctlError

AXES = (
    Axis("m", (1.0, 4.0, 64.0)),
    Axis("h", (0.0, 256.0, 768.0), "log2p256"),
    Axis("sms", (8.0, 132.0), "linear"),
)


def plane(beyond: str = "hold") -> Grid:
    """3 log2(m) - 2 log2(h + 256) + sms / 10, which a multilinear table holds exactly."""
    m, h, sms = np.meshgrid(*(axis.positions for axis in AXES), indexing="ij")
    return Grid(AXES, 3 * m - 2 * h + sms / 10, beyond)


def truth(m, h, sms):
    return 3 * np.log2(m) - 2 * np.log2(np.asarray(h) + 256.0) + np.asarray(sms) / 10


@given(st.floats(1, 64), st.floats(0, 768), st.floats(8, 132))
def test_a_plane_is_read_back_exactly_between_the_knots(m, h, sms):
    assert plane().at((m, h, sms)) == pytest.approx(truth(m, h, sms), abs=1e-9)
    assert plane().holds((m, h, sms))


def test_shapes_broadcast_like_numpy():
    found = plane().at((np.array([[1.0], [8.0]]), np.array([0.0, 100.0, 768.0]), 132))
    assert found.shape == (2, 3)
    assert found[1, 2] == pytest.approx(truth(8.0, 768.0, 132))


def test_off_the_grid_an_edge_holds_fades_or_goes_on():
    beyond = 64.0 * 2 ** (FADE / 2)
    edge = truth(64.0, 0.0, 8)
    assert plane("hold").at((beyond, 0, 8)) == pytest.approx(edge)
    assert plane("fade").at((beyond, 0, 8)) == pytest.approx(edge / 2)
    assert plane("fade").at((64.0 * 2**FADE * 2, 0, 8)) == 0.0
    assert plane("line").at((beyond, 0, 8)) == pytest.approx(truth(beyond, 0.0, 8))
    assert not plane().holds((beyond, 0, 8))


def test_the_weights_of_a_point_add_up_to_one():
    corners, weights, outside = stencil(
        AXES, (np.array([2.0, 900.0]), np.array([5.0, 5.0]), np.array([50.0, 50.0]))
    )
    assert weights.sum(axis=0) == pytest.approx([1.0, 1.0])
    assert corners.max() < 18
    assert outside[0] == 0.0 < outside[1]


def test_a_table_survives_its_json():
    again = Grid.from_data(plane("fade").as_data(), "here")
    assert again.beyond == "fade"
    assert again.at((8.0, 100.0, 64)) == pytest.approx(plane().at((8.0, 100.0, 64)), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": [1.0]}, "here: table is not readable"),
        ({"beyond": "vanish"}, "'vanish'"),
        ({"axes": [{"name": "m", "knots": [2, 1], "scale": "log2"}]}, "ascending"),
        ({"axes": [{"name": "m", "knots": [1, 2], "scale": "cubic"}]}, "'cubic'"),
    ],
)
def test_a_broken_table_is_refused_with_its_place(change, message):
    with pytest.raises(SimctlError, match=message):
        Grid.from_data({**plane().as_data(), **change}, "here")

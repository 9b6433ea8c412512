"""Hand-written charts: well-formed, readable ticks, everything inside the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.report.svg import HEIGHT, LEFT, RIGHT, WIDTH, Axis, Level, Series, chart

NS = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{NS}text")]


def test_a_chart_names_its_axes_series_and_levels() -> None:
    svg = chart("a < b", Axis("SMs"), Axis("µs"), [Series("x & y", [(0, 1), (10, 2)])], [Level(1.5, "so")])
    assert {"a < b", "SMs", "µs", "x & y", "so (1.5)"} <= set(texts(svg))
    assert 'fill="#fff"' in svg  # a white ground of its own: dark text stays readable on a dark page
    assert "stroke-dasharray" in svg


def test_points_land_where_the_axes_say() -> None:
    svg = chart("t", Axis("x", low=0, high=100), Axis("y", low=0, high=1), [Series("s", [(50, 0.5)], False)])
    dot = re.search(r'd="M([\d.]+) ([\d.]+)h0"', svg)
    assert dot is not None
    assert float(dot[1]) == pytest.approx((LEFT + WIDTH - RIGHT) / 2, abs=1)
    top, bottom = 50, HEIGHT - 44
    assert float(dot[2]) == pytest.approx((top + bottom) / 2, abs=1)


def test_logarithmic_ticks_are_powers() -> None:
    svg = chart("t", Axis("x", 2, low=4, high=128), Axis("y", 10), [Series("s", [(4, 1), (128, 1e6)])])
    assert {"4", "8", "16", "32", "64", "128"} <= set(texts(svg))
    assert {"1", "10", "100", "1e+06"} <= set(texts(svg))


def test_legends_wrap_and_do_not_run_into_each_other() -> None:
    names = [f"a rather long name of series {i}" for i in range(8)]
    svg = chart("t", Axis("x"), Axis("y"), [Series(n, [(0, i), (1, i + 1)]) for i, n in enumerate(names)])
    places = {}
    for node in ET.fromstring(svg).iter(f"{NS}text"):
        if node.text in names:
            places.setdefault(node.get("y"), []).append((float(node.get("x", 0)), len(node.text)))
    assert len(places) > 1
    for row in places.values():
        row.sort()
        assert all(b[0] - a[0] >= 6.5 * a[1] for a, b in pairwise(row))
        assert row[-1][0] + 6.5 * row[-1][1] <= WIDTH


positive = st.floats(1e-6, 1e9)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=40), st.sampled_from([0, 2, 10]))
def test_every_dot_is_inside_the_picture(points: list[tuple[float, float]], log: int) -> None:
    svg = chart("t", Axis("x", log), Axis("y", log), [Series("s", points)])
    for x, y in re.findall(r"M([-\d.e+]+) ([-\d.e+]+)h0", svg):
        assert LEFT - 1 <= float(x) <= WIDTH - RIGHT + 1
        assert 0 <= float(y) <= HEIGHT
    assert len(texts(svg)) >= 2


@pytest.mark.parametrize("log", [0, 2, 10])
def test_a_chart_without_points_has_bare_axes(log: int) -> None:
    assert {"x", "y"} <= set(texts(chart("t", Axis("x", log), Axis("y", log), [Series("none", [])])))

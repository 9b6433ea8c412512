"""Bounded robust least squares: known coefficients come back, outliers do not pull, blind parameters are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from calib.fit.robust import Bound, fit

X = np.geomspace(1.0, 1000.0, 200)
BOUNDS = {
    "fixed": Bound(1e-3, 10.0, 1.0),
    "slope": Bound(1e-4, 1.0, 0.05),
    "spare": Bound(0.1, 10.0, 2.0, 3.0),
}


def measured(noise: float, seed: int = 1) -> np.ndarray:
    return (0.7 + 0.02 * X) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(X)))


def errors_of(values: np.ndarray):
    return lambda p: np.log((p["fixed"] + p["slope"] * X) / values)


def test_known_coefficients_come_back_with_an_honest_error():
    found = fit(errors_of(measured(0.05)), {name: BOUNDS[name] for name in ("fixed", "slope")})
    assert found.values["fixed"] == pytest.approx(0.7, rel=0.04)
    assert found.values["slope"] == pytest.approx(0.02, rel=0.02)
    sd = np.sqrt(np.diag(found.covariance))
    for name, truth, one in (("fixed", 0.7, sd[0]), ("slope", 0.02, sd[1])):
        assert abs(np.log(found.values[name] / truth)) < 4 * one
        assert one < 0.02


def test_one_point_in_ten_that_is_twice_as_slow_moves_nothing_much():
    values = measured(0.01)
    values[::10] *= 2.0
    found = fit(errors_of(values), {name: BOUNDS[name] for name in ("fixed", "slope")})
    assert found.values["slope"] == pytest.approx(0.02, rel=0.03)


def test_a_parameter_that_changes_nothing_is_rejected_and_stands_at_its_fallback():
    found = fit(errors_of(measured(0.01)), BOUNDS)
    assert found.rejected == ("spare",)
    assert found.values["spare"] == 3.0
    assert set(found.names) == {"fixed", "slope"}


def test_a_part_that_vanishes_is_rejected():
    values = 0.02 * X
    found = fit(errors_of(values), {"fixed": Bound(1e-4, 1.0, 0.1, 0.0), "slope": BOUNDS["slope"]})
    assert found.values["fixed"] == 0.0
    assert found.values["slope"] == pytest.approx(0.02, rel=1e-3)


def test_values_stay_within_their_bounds():
    tight = {"fixed": Bound(1.0, 2.0, 1.5), "slope": BOUNDS["slope"]}
    assert 1.0 <= fit(errors_of(measured(0.01)), tight, reject=False).values["fixed"] <= 2.0

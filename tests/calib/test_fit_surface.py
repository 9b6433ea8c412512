"""Smooth tables from scattered points: what is measured is kept, what is missing is bridged, what is far fades."""

from __future__ import annotations

import numpy as np
import pytest

from calib.fit.surface import Smoothness, fit_grid
from sim.cost.measured_grid import Axis

M = Axis("m", tuple(float(2**i) for i in range(9)))
SMS = Axis("sms", (8.0, 16.0, 32.0, 64.0, 128.0))
SMOOTH = Smoothness(walk=0.2, pull=3.0, noise=0.003)


def smooth(m, sms):
    return 0.1 * np.sin(np.log2(m)) + 0.05 * np.log2(sms)


def points(keep):
    m, sms = np.meshgrid(M.knots, SMS.knots, indexing="ij")
    kept = keep(m, sms)
    return m[kept], sms[kept]


def test_a_complete_grid_is_reproduced():
    m, sms = points(lambda m, s: m > 0)
    grid = fit_grid((M, SMS), (m, sms), smooth(m, sms), SMOOTH)
    assert grid.at((m, sms)) == pytest.approx(smooth(m, sms), abs=2e-3)


def test_noise_is_averaged_and_a_single_outlier_is_not_believed():
    rng = np.random.default_rng(0)
    m, sms = (np.tile(v, 20) for v in points(lambda m, s: m > 0))
    values = smooth(m, sms) + 0.02 * rng.standard_normal(len(m))
    values[0] += 2.0
    grid = fit_grid((M, SMS), (m, sms), values, Smoothness(walk=0.2, pull=3.0, noise=0.02))
    assert np.abs(grid.at((m, sms)) - smooth(m, sms)).max() < 0.02


def test_missing_cells_are_bridged_from_their_neighbours():
    rng = np.random.default_rng(2)
    held = rng.random((len(M.knots), len(SMS.knots))) < 0.3
    held[0, 0] = held[-1, -1] = False
    m, sms = np.meshgrid(M.knots, SMS.knots, indexing="ij")
    grid = fit_grid((M, SMS), (m[~held], sms[~held]), smooth(m, sms)[~held], SMOOTH)
    assert np.abs(grid.at((m[held], sms[held])) - smooth(m, sms)[held]).max() < 0.12


def test_without_data_near_a_residual_fades_to_nothing():
    axis = Axis("m", tuple(float(2**i) for i in range(20)))
    grid = fit_grid(
        (axis,), (np.array([1.0, 2.0]),), np.array([0.5, 0.5]), Smoothness(walk=0.1, pull=0.1, noise=0.01)
    )
    assert grid.at((1.0,)) == pytest.approx(0.5, abs=0.05)
    assert abs(float(grid.at((2.0**19,)))) < 0.02


def test_second_differences_carry_a_slope_across_a_gap():
    axis = Axis("m", tuple(float(2**i) for i in range(12)))
    at = np.array([1.0, 2.0, 4.0, 8.0, 1024.0, 2048.0])
    grid = fit_grid(
        (axis,), (at,), 0.1 * np.log2(at), Smoothness(walk=5.0, bend=0.02, pull=50.0, noise=0.001)
    )
    assert grid.at((64.0,)) == pytest.approx(0.6, abs=0.02)


def test_points_between_knots_count_for_both_and_weights_decide():
    axis = Axis("m", (1.0, 4.0))
    at = np.array([2.0, 2.0])
    found = fit_grid((axis,), (at,), np.array([0.0, 0.4]), SMOOTH, weights=np.array([1.0, 100.0]))
    assert found.at((2.0,)) == pytest.approx(0.4, abs=0.02)

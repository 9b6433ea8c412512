"""Fits of the clock's heat and of a model's own sizes: known terms come back; the replay's clock is the engine's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calib.fit.own_steps import fit_own, joined, predicted
from calib.fit.steps import Steps, both
from calib.fit.warming import Runs, Series, _times, fit_warming, warming_errors
from calib.validate.clock import Busy, heat_factors
from sim.cost.launching import grid_tokens
from sim.cost.measured_grid import Axis, Grid
from sim.cost.measured_steps import Composition, composition_data, composition_from_data
from sim.cost.shapes import Launch
from sim.cost.warming import warming_from_data
from sim.errors import SimctlError


def runs() -> Runs:
    """Passes of 256 and 2048 tokens and decode steps in turn, by known terms: slopes 0.12, 0.14, 0.05; 30 ms."""
    cool = np.array([0.0064, 0.007, 0.042])
    slopes, targets, series = [0.05, 0.12, 0.14], [0.0, 0.6, 1.0], []
    for order in (((2, 8), (0, 40)) * 3, ((1, 40), (2, 6)) * 3, ((1, 30), (0, 30)) * 3):
        which = [kernel for kernel, count in order for _ in range(count)]
        one = Series(tuple(which), cool[which], np.ones(len(which)))
        for _ in range(4):  # times depend on how long launches before them took
            one = replace(one, seconds=_times(one, cool, slopes, targets, 0.03))
        series.append(one)
    return Runs((32, 256, 2048), (True, False, False), cool, tuple(series))


def test_known_slopes_targets_and_time_come_back():
    found = fit_warming(runs())
    assert found.time_s == pytest.approx(0.03, rel=0.05)
    assert found.decode_slope == pytest.approx(0.05, rel=0.05)
    assert float(found.target.at((256,))) == pytest.approx(0.6, rel=0.1)
    # against the settled price: 0.14 / (1 + 0.14)
    assert float(found.slope.at((2048,))) == pytest.approx(0.14 / 1.14, rel=0.05)
    errors = warming_errors(runs(), found)["errors"]
    assert errors["composed"]["median"] < 0.002 < errors["at the settled clock"]["median"]


def test_terms_survive_the_file_and_wrong_ones_are_told():
    found = fit_warming(runs())
    again = warming_from_data(found.as_data(), "curves.json")
    assert again.as_data() == found.as_data()
    with pytest.raises(SimctlError, match="time_s must be positive"):
        warming_from_data({**found.as_data(), "time_s": 0.0}, "curves.json")
    with pytest.raises(SimctlError, match="'slope' is missing"):
        warming_from_data({}, "curves.json")


def flat() -> Composition:
    even = Grid((Axis("tokens", (1.0,)), Axis("sms", (132.0,))), np.zeros((1, 1)))
    return Composition(even, even, "measured", 0.0)


def own_steps() -> tuple[Steps, np.ndarray]:
    """Passes and decode steps of every size on two sets, with a staircase that operators do not show."""
    sizes = sorted({int(g) for g in grid_tokens(range(8, 513))})
    made = [(m, sms, chunk) for m in sizes for sms in (20, 132) for chunk in (True, False)]
    launches = tuple(Launch(((m, 0),)) if chunk else Launch((), m, 100 * m, 100) for m, _, chunk in made)
    tokens = np.array([m for m, _, _ in made], float)
    summed = 1e-3 + 1e-5 * tokens
    stair = np.where((tokens // 64) % 2 == 1, 1.12, 0.97)
    kinds = tuple("prefill_step" if chunk else "decode_step" for _, _, chunk in made)
    n = len(made)
    sms = np.array([s for _, s, _ in made], float)
    steps = Steps(
        kinds, launches, ("fa3",) * n, ("graph",) * n, sms, summed * stair, np.zeros(n), summed, summed
    )
    return steps, np.ones(n)


def test_a_staircase_of_the_models_own_sizes_is_held_and_no_other_model_takes_it():
    steps, shares = own_steps()
    terms = fit_own(steps, shares, flat(), "llama-3.1-8b", 32)
    off = predicted(steps, shares, terms, 32) / steps.seconds - 1.0
    assert np.median(np.abs(off)) < 0.005
    again = composition_from_data(composition_data(terms), "measured", "curves.json")
    assert float(again.linear_factor(80, 132, "llama-3.1-8b")) == pytest.approx(1.12, abs=0.02)
    assert float(again.linear_factor(80, 132, "llama-2-7b")) == 1.0
    assert float(again.gap_s(80, 20, "llama-2-7b")) == 0.0
    assert float(again.gap_s(80, 20, "llama-3.1-8b")) > 1e-6


def test_layers_of_own_sizes_on_the_whole_gpu_count_at_the_settled_clock():
    steps, shares = own_steps()
    prompts = ~steps.decoding & (steps.sms == 132)
    layers = replace(steps.take(prompts), kind=("prefill_layer",) * int(prompts.sum()))
    found = fit_warming(runs())
    nothing = steps.take(np.zeros(len(steps), bool))
    every, _ = joined([(nothing, shares[:0]), (layers, shares[prompts])], found, 132)
    ratio = every.seconds / layers.seconds
    assert ratio[-1] == pytest.approx(1.0 / (1.0 - float(found.slope.at((512,)) * found.target.at((512,)))))
    without, _ = joined([(nothing, shares[:0]), (layers, shares[prompts])], None, 132)
    assert len(without) == 0
    assert len(both(steps, layers)) == len(steps) + len(layers)


class Heat:
    """Prices of a GPU whose passes of 1024 tokens settle at 1."""

    heat_on, heat_rate, heat_decode = 1, 1.0 / 0.03, 0.05
    heat_slope = [0.12] * 2000
    heat_target = [1.0] * 2000


def test_the_replays_clock_warms_up_along_a_log_and_part_of_the_gpu_alone_stays_cool():
    passes = [Busy(0, 132, 1024, 0.03 * i, 0.03 * (i + 1), 0.028) for i in range(8)]
    found = heat_factors(Heat(), 132, passes)
    assert found[0] < 0.91 < found[3] < found[-1] <= 1.0
    behind = [*passes, Busy(0, 132, 0, 0.24, 0.25, 0.009)]
    assert heat_factors(Heat(), 132, behind)[-1] > 1.03
    part = [Busy(0, 64, 1024, 0.1 * i, 0.1 * (i + 1), 0.1) for i in range(3)]
    assert heat_factors(Heat(), 132, part) == pytest.approx([1.0] * 3)

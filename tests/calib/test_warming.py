"""Fits of the clock's heat and of a model's own sizes: known terms come back; the replay's clock is the engine's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import calib
from calib.fit.own_steps import fit_own, joined, predicted
from calib.fit.steps import Steps, both
from calib.fit.warming import Runs, Series, _times, fit_warming, warming_errors
from calib.report.data import load
from calib.report.warm import warm
from calib.validate.clock import Busy, heat_factors
from sim.cost.launching import grid_tokens
from sim.cost.measured_grid import Axis, Grid
from sim.cost.measured_steps import Composition, composition_data, composition_from_data
from sim.cost.shapes import Launch
from sim.cost.warming import warming_from_data
from sim.errors import SimctlError

KNOWN = {"room": 0.06, "loss": 0.05, "rest32": 0.4, "draw256": 0.7, "draw2048": 1.0}


def runs() -> Runs:
    """Passes of 256 and 2048 tokens and decode steps in turn, by known terms."""
    cool = np.array([0.0064, 0.007, 0.042])
    empty = Runs((32, 256, 2048), (True, False, False), cool, cool / [1.0, 0.91, 0.87], ())
    series = []
    for order in (((2, 8), (0, 40)) * 3, ((1, 40), (2, 6)) * 3, ((1, 30), (0, 30)) * 3):
        which = [kernel for kernel, count in order for _ in range(count)]
        one = Series(tuple(which), cool[which], np.ones(len(which)))
        for _ in range(6):  # times depend on how long launches before them took
            one = replace(one, seconds=_times(empty, one, KNOWN))
        series.append(one)
    return replace(empty, series=tuple(series))


def test_known_terms_come_back():
    found = fit_warming(runs())
    assert found.room_s == pytest.approx(0.06, rel=0.1)
    assert found.decode_loss == pytest.approx(0.05, rel=0.1)
    assert float(found.rest.at((32,))) == pytest.approx(0.4, rel=0.15)
    assert float(found.draw.at((256,))) == pytest.approx(0.7, rel=0.15)
    assert float(found.gain.at((2048,))) == pytest.approx(0.13)
    errors = warming_errors(runs(), found)["errors"]
    assert errors["composed"]["p95"] < 0.02 < errors["at the settled clock"]["p95"]


def test_pauses_and_watts_tell_what_idle_time_and_light_decodes_win_back(tmp_path):
    (tmp_path / "measurements").mkdir()
    layer = {"sweep": "power_duty", "kind": "prefill_layer", "layers": 1}
    rows = [
        {**layer, "gap_s": 1e-5, "time_s": 1.5e-3, "power_w": 700.0},
        {**layer, "gap_s": 3e-4, "time_s": 1.3e-3, "power_w": 690.0},
        {**layer, "gap_s": 1e-3, "time_s": 1.2e-3, "power_w": 500.0},
        {**layer, "gap_s": 0.3, "time_s": 1.2e-3, "power_w": 100.0},
        {**layer, "kind": "decode_step", "layers": 32, "decode_batch": 8, "gap_s": 2e-5, "time_s": 5e-3}
        | {"power_w": 400.0},
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "measurements" / "power_duty.csv.gz", index=False)
    found = fit_warming(runs(), tmp_path)
    # a third of the time throttled with pauses of 3/16 of it
    assert found.idle == pytest.approx(2 / 3 * 13 / 3)
    assert float(found.rest.at((8,))) == pytest.approx(found.idle / 2)


def test_terms_survive_the_file_and_wrong_ones_are_told():
    found = fit_warming(runs())
    again = warming_from_data(found.as_data(), "curves.json")
    assert again.as_data() == found.as_data()
    with pytest.raises(SimctlError, match="room_s must be positive"):
        warming_from_data({**found.as_data(), "room_s": 0.0}, "curves.json")
    with pytest.raises(SimctlError, match="'gain' is missing"):
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
    assert ratio[-1] == pytest.approx(1.0 / (1.0 - float(found.gain.at((512,)))))
    without, _ = joined([(nothing, shares[:0]), (layers, shares[prompts])], None, 132)
    assert len(without) == 0
    assert len(both(steps, layers)) == len(steps) + len(layers)


class Heat:
    """Prices of a GPU whose passes gain 12 % for 60 ms."""

    heat_on, heat_room_s, heat_idle, heat_gap, heat_decode = 1, 0.06, 2.8, 1.0, 0.05
    heat_gain = [0.12] * 2000
    heat_draw = [1.0] * 2000
    heat_rest = [0.4] * 100


def test_the_replays_clock_warms_up_along_a_log_and_part_of_the_gpu_alone_stays_cool():
    passes = [Busy(0, 132, 1024, 0, 0.03 * i, 0.03 * (i + 1), 0.0295) for i in range(8)]
    found = heat_factors(Heat(), 132, passes)
    assert found[0] == found[1] == pytest.approx(0.88)
    assert found[-1] > 0.98
    behind = [*passes, Busy(0, 132, 0, 32, 0.24, 0.25, 0.009)]
    assert heat_factors(Heat(), 132, behind)[-1] > 1.02
    part = [Busy(0, 64, 1024, 0, 0.1 * i, 0.1 * (i + 1), 0.1) for i in range(3)]
    assert heat_factors(Heat(), 132, [*part, Busy(1, 68, 0, 8, 9.0, 9.1, 0.1)])[:3] == [1.0] * 3
    beside = [Busy(1, 68, 0, 32, 0.0, 0.4, 0.4), Busy(0, 64, 1024, 0, 0.01, 0.11, 0.1)]
    assert heat_factors(Heat(), 132, beside)[1] == pytest.approx(1.0 - 0.12 * 64 / 132, abs=1e-6)


def test_the_page_tells_how_long_the_top_clock_lasts() -> None:
    section = warm(load(Path(calib.__file__).parent / "profiles" / "h200-sxm"))
    assert section is not None
    assert "run at the top clock for 5" in section.lead or "run at the top clock for 6" in section.lead
    text = "\n".join(section.body)
    assert "512 rows, 32 of them decodes" in text
    assert text.count("wins back") >= 4
    assert "1024 tokens" in section.pictures["warm"]

"""Fit of the contention surface: known terms come back, folds hold out what they say, partial overlaps add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calib.fit.contention import (
    contention_errors,
    contention_of,
    held_out,
    kept_residuals,
    masks,
    predict,
    staggered_s,
)
from calib.fit.contention_terms import LENGTHS, fit_contention
from calib.fit.coruns import Corun
from sim.cost import load_cost
from sim.cost.gpu import load_gpu
from sim.cost.loads import launch_loads
from sim.cost.measured_contention import Beside, MeasuredContention, Waiting
from sim.cost.shapes import Launch
from sim.errors import SimctlError

GPU = load_gpu("h200-sxm")
COST = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
MEASURED = Path(__file__).parents[2] / "calib" / "profiles" / "h200-sxm"
TRUTH = MeasuredContention(
    gpu=GPU,
    model="llama-3.1-8b",
    label="measured",
    coverage="",
    beside={
        "prefill": Beside(0.3, 0.2, 0.8, 2.0, 1.2, 1.1),
        "decode": Beside(0.5, 0.9, 0.7, 1.5, 0.9, 0.5),
    },
    waiting={
        (regime, priority): {
            "prefill": Waiting(
                k, 0.8, 0.6, 0.0 if regime == "overlapped" else 0.1, 1.4 * (regime != "streams")
            ),
            "decode": Waiting(k, 0.6, 0.5, 0.15, 2.0 * (regime != "streams")),
        }
        for regime in ("overlapped", "streams")
        for priority, k in (("normal", 0.9), ("high", 0.5))
    },
    residuals={},
)


def corun(count: int, noise: float = 0.0, seed: int = 0) -> Corun:
    """Co-runs of every mode that obey TRUTH, with log-normal noise."""
    rng = np.random.default_rng(seed)
    parts, factors = [], []
    for i in range(count):
        mode, high = ("disjoint", "disjoint", "half", "whole", "streams")[i % 5], bool((i // 5) % 2)
        sms = 132 if mode == "streams" else int(rng.choice([16, 32, 48, 64, 80, 96, 112]))
        beside = {"disjoint": 132 - sms, "half": 132 - sms // 2}.get(mode, 132)
        a = Launch(chunks=((int(2 ** rng.uniform(8, 13)), int(rng.choice([0, 2048, 8192]))),), layers=(1, 2))
        batch, context = int(2 ** rng.uniform(3, 8)), int(2 ** rng.uniform(9, 13))
        b = Launch((), batch, batch * context, context, graph=True)
        loads = launch_loads(COST, [a], sms), launch_loads(COST, [b], beside)
        priority = "high" if high and mode != "disjoint" else "normal"
        of_both = TRUTH.factors(*loads, (sms, beside), max(0, sms + beside - 132), priority=priority)
        factors.append([float(one[0, 0]) for one in of_both])
        parts.append((*loads, sms, beside, mode, priority))
    sides = [
        replace(
            parts[0][j],
            **{
                name: np.concatenate([getattr(part[j], name) for part in parts])
                for name in vars(parts[0][j])
                if name != "gpu"
            },
        )
        for j in (0, 1)
    ]
    columns = list(zip(*parts, strict=True))
    return Corun(
        *sides,
        *(np.array(column, dtype=np.float64) for column in columns[2:4]),
        *(np.array(column) for column in columns[4:]),
        np.array(factors) * np.exp(noise * rng.standard_normal((count, 2))),
    )


@pytest.fixture(scope="module")
def clean():
    return corun(400)


@pytest.fixture(scope="module")
def fitted(clean):
    return fit_contention(clean, "llama-3.1-8b", {})


def test_the_slowdowns_of_known_terms_come_back(clean, fitted):
    size = np.abs(predict(fitted, clean) / clean.slow - 1.0)
    assert np.median(size) < 0.003
    assert np.percentile(size, 99) < 0.03


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_powers_that_matter_come_back(fitted, side):
    found, truth = fitted.beside[side], TRUTH.beside[side]
    assert found.other_power == pytest.approx(truth.other_power, abs=0.1)
    assert found.share_power == pytest.approx(truth.share_power, abs=0.15)
    waiting = fitted.waiting["streams", "normal"][side]
    assert waiting.other_power == pytest.approx(TRUTH.waiting["streams", "normal"][side].other_power, abs=0.1)


def test_priorities_differ_by_their_factor(fitted):
    for regime in ("overlapped", "streams"):
        ratio = fitted.waiting[regime, "high"]["decode"].k / fitted.waiting[regime, "normal"]["decode"].k
        assert ratio == pytest.approx(0.5 / 0.9, rel=0.1)


def test_outliers_do_not_move_the_surface(clean):
    dirty = replace(clean, slow=clean.slow.copy())
    dirty.slow[::25] *= 3.0
    surface = fit_contention(dirty, "llama-3.1-8b", {})
    size = np.abs(predict(surface, clean) / clean.slow - 1.0)
    assert np.median(size) < 0.02


def test_a_residual_learns_what_the_base_cannot_say():
    found = corun(300)
    bump = np.exp(0.15 * np.sin(np.log2(found.decode.batch)))
    found = replace(found, slow=found.slow * bump[:, None])
    predicted, seen = held_out(found, "llama-3.1-8b", "random")
    apart = found.mode == "disjoint"
    errors = {
        name: np.median(np.abs(predicted[name] / found.slow - 1.0)[apart]) for name in ("surface", "base")
    }
    assert seen.all()
    assert errors["surface"] < 0.6 * errors["base"]
    assert kept_residuals(found, "llama-3.1-8b")["disjoint", "normal"]
    surface = fit_contention(found, "llama-3.1-8b")
    assert np.array_equal(surface.residuals["disjoint", "normal"].lengths, LENGTHS)


def test_folds_hold_out_what_they_say(clean):
    random = list(masks(clean, "random"))
    assert np.array_equal(np.sum(random, axis=0), np.ones(len(clean)))
    for mask in masks(clean, "split"):
        assert len(np.unique(clean.prefill_sms[mask])) == 1
        left = clean.take(~mask)
        assert not np.isin(left.prefill_sms[left.regime != "streams"], clean.prefill_sms[mask]).any()
    modes = [set(clean.mode[mask]) for mask in masks(clean, "mode")]
    assert modes == [{"half"}, {"whole"}]


def test_too_few_co_runs_are_refused(clean):
    with pytest.raises(SimctlError, match="needs 20 co-runs on disjoint SMs; 4 were measured"):
        fit_contention(clean.take(np.arange(len(clean)) < 10), "llama-3.1-8b")
    with pytest.raises(SimctlError, match="needs 6 co-runs of 'streams'"):
        fit_contention(clean.take(clean.mode != "streams"), "llama-3.1-8b")


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.0, 0.0, 10.0),  # never beside it
        (0.0, 100.0, 15.0),  # all along
        (10.0, 20.0, 10.0),  # only afterwards
        (4.0, 7.0, 11.0),  # 3 s in which 2 s of work get done
        (8.0, 100.0, 11.0),  # the last 2 s of work take 3 s
    ],
)
def test_partial_overlap_slows_only_what_runs_beside(start, end, expected):
    alone, factor = np.array([10.0]), np.array([1.5])
    assert staggered_s(alone, factor, np.array([start]), np.array([end]))[0] == pytest.approx(expected)


@pytest.mark.skipif(
    not (MEASURED / "measurements/corun.csv.gz").is_file(), reason="no H200 measurements here"
)
def test_the_h200_surface_meets_its_aim_on_disjoint_sms_and_beats_the_baselines():
    table = contention_errors(MEASURED, GPU)
    for fold in ("random", "split"):
        for side in ("prefill", "decode"):
            found = table["folds"][fold]["disjoint"][side]
            assert found["surface"]["median"] <= 0.05
            assert found["surface"]["p95"] <= 0.12
            for mode in ("disjoint", "whole", "half"):
                ours, others = (
                    table["folds"][fold][mode][side][name]["median"] for name in ("base", "constant")
                )
                assert ours < others
    assert set(table["stagger"]) == {"prefill on 16 SMs", "prefill on 112 SMs"}
    surface = contention_of(MEASURED, GPU)
    assert surface.label == "measured"
    assert "co-runs: prefill SMs 16-132, new tokens 256-8192" in surface.coverage

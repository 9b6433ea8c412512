"""Fits of one operator: known forms come back from noisy times, folds do not leak, the better method is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calib.fit.folds import MEANING, errors, folds, score
from calib.fit.forms import fit_form, form_seconds
from calib.fit.methods import Recipe, fit_curve, fit_srm_alpha
from calib.fit.operators import choose, recheck
from calib.fit.points import Points
from calib.fit.skew import fit_skew, ragged, with_skew
from calib.fit.surface import Smoothness
from sim.cost.gpu import load_gpu
from sim.cost.measured import form_of
from sim.cost.operators import effective_longest

H200 = load_gpu("h200-sxm")
SMS = (16, 32, 64, 96, 132)
GEMM = {
    **{"launch_s": 3e-6, "bandwidth_efficiency": 0.8, "sm_bytes_per_clock": 50.0, "bandwidth_p": 2.0},
    **{"efficiency": 0.75, "wave_s": 1e-6, "overlap_p": 4.0},
}
FLAT = {"fixed_s": 4e-6, "compute": 0.6, "memory": 0.7, "knee": 0.5}
PERSISTENT = {
    **{
        "fixed_s": 4e-6,
        "efficiency": 0.6,
        "wave_s": 2e-6,
        "memory": 0.7,
        "knee": 0.4,
        "packed": 0.0,
    },
    **{"workers": 132.0, "split": 0.0, "split_s": 0.0, "merge_s": 0.0},
}


def points(kind: str, keys, *features, noise: float = 0.005, form=("flat", FLAT), seed: int = 0) -> Points:
    """A full grid of one operator, timed by a known form with noise."""
    names = {"gemm": ("m",), "prefill": ("q", "h"), "decode": ("batch", "context"), "elementwise": ("rows",)}[
        kind
    ]
    grids = np.meshgrid(range(len(keys)), *features, SMS, indexing="ij")
    flat = [g.ravel() for g in grids]
    count = len(flat[0])
    made = Points(
        operator=kind,
        kind=kind,
        keys=tuple(keys[i] for i in flat[0]),
        features={name: values.astype(float) for name, values in zip(names, flat[1:-1], strict=True)},
        sms=flat[-1].astype(float),
        clock=np.ones(count),
        seconds=np.ones(count),
        spread=np.zeros(count),
        extra={},
    )
    truth = form_seconds(form_of(H200, form[0], form[1], ""), made)
    return replace(made, seconds=truth * np.exp(noise * np.random.default_rng(seed).standard_normal(count)))


SIZES = np.array([1, 16, 64, 128, 200, 256, 400, 512, 1024, 2048, 4096])
KEYS = ((4096, 4096, 2), (28672, 4096, 2), (4096, 14336, 2))
HEADS = ((32, 8, 128, 2),)


def test_the_terms_of_a_roofline_come_back():
    found = fit_form(points("gemm", KEYS, SIZES), H200, "flat")
    assert found.terms == pytest.approx(FLAT, rel=0.03)
    assert found.fitted.rejected == ()


def test_the_terms_of_the_wave_form_come_back():
    found = fit_form(points("gemm", KEYS, SIZES, form=("waves", GEMM)), H200, "waves")
    for name in ("launch_s", "efficiency", "bandwidth_efficiency", "wave_s"):
        assert found.terms[name] == pytest.approx(GEMM[name], rel=0.12), name


def test_the_terms_of_persistent_attention_come_back():
    made = points(
        "prefill",
        HEADS,
        np.array([16, 128, 512, 768, 2048]),
        np.array([0, 2048, 16384]),
        form=("blocks", PERSISTENT),
    )
    found = fit_form(made, H200, "persistent")
    for name in ("efficiency", "wave_s"):
        assert found.terms[name] == pytest.approx(PERSISTENT[name], rel=0.15), name


@pytest.mark.parametrize("kind", [*MEANING])
def test_what_a_fold_leaves_out_does_not_reach_its_prediction(kind):
    made = points("gemm", KEYS, SIZES[::2])
    recipe = Recipe("x", "flat", pooled=True)
    for mask in list(folds(made, kind))[:2]:
        poisoned = replace(made, seconds=np.where(mask, 1e3 * made.seconds, made.seconds))
        clean, dirty = (
            fit_curve(all_.take(~mask), H200, recipe).seconds(made.take(mask)) for all_ in (made, poisoned)
        )
        assert np.array_equal(clean, dirty)


def test_random_folds_hold_out_every_point_once_and_rows_never_the_ends():
    made = points("gemm", KEYS, SIZES)
    assert np.array_equal(sum(mask.astype(int) for mask in folds(made, "random")), np.ones(len(made)))
    for mask in folds(made, "rows"):
        left = set(made.features["m"][mask])
        assert not left & set(made.features["m"][~mask])
        assert not left & {1.0, 4096.0}
    for mask in folds(made, "frontier"):
        assert made.features["m"][mask].min() > made.features["m"][~mask].max()
    assert [mask.sum() for mask in folds(made, "shapes")] == [len(made) // 3] * 3


def test_errors_are_of_the_ratio_and_by_regime():
    found = errors(np.array([1.1e-5, 1e-3, 0.9e-3]), np.array([1e-5, 1e-3, 1e-3]))
    assert (found["points"], found["max"], found["bias"]) == (3, 0.1, 0.0)
    assert found["under_20us"]["points"] == 1
    assert found["over_20us"]["bias"] == -0.05
    assert score({"rows": found}) < score({"rows": {**found, "median": 0.5}}) < score({}) == np.inf


def test_the_form_that_made_the_times_is_kept_and_its_errors_recompute():
    made = points("gemm", KEYS, SIZES)
    chosen = choose(made, H200)
    assert chosen.recipe.form == "flat"
    kept = chosen.errors[chosen.recipe.name]
    assert kept["rows"]["median"] < 0.006
    assert kept["rows"]["median"] < chosen.errors["interpolation"]["rows"]["median"]
    assert kept["shapes"]["median"] < 0.01 < chosen.errors["waves"]["rows"]["median"]
    assert "interpolation" in chosen.errors
    assert "shapes" not in chosen.errors["interpolation"]
    again = recheck(made, H200, chosen.recipe)
    assert again["rows"]["median"] == pytest.approx(kept["rows"]["median"], abs=5e-4)


def test_a_residual_learns_what_the_form_cannot_say():
    made = points("gemm", KEYS[:1], SIZES, noise=0.0)
    jump = np.where(made.features["m"] == 512, 2.0, 1.0)
    made = replace(made, seconds=made.seconds * jump)
    smooth = Smoothness(walk=0.5, walks={"sms": 0.2})
    curve = fit_curve(made, H200, Recipe("x", "flat", smoothness=smooth))
    assert curve.seconds(made) == pytest.approx(made.seconds, rel=0.05)


def test_srm_alpha_is_exact_where_alpha_is_constant():
    made = points("gemm", KEYS[:1], SIZES, noise=0.0, form=("flat", {**FLAT, "fixed_s": 1e-12, "knee": 0.4}))
    alpha = fit_srm_alpha(made, H200).seconds(made)
    assert np.median(np.abs(alpha / made.seconds - 1)) < 0.12


def test_the_longest_context_of_unsplit_batches_is_found():
    batch, context = np.array([64.0, 128.0]), np.array([1024.0, 4096.0])
    made = points("decode", HEADS, batch, context, noise=0.0, form=("flat", FLAT))
    equal = replace(made, extra={"context_max": made.features["context"].copy()})
    longest = 8 * made.features["context"]
    slow = replace(
        made,
        extra={"context_max": longest},
        seconds=made.seconds + 12e-9 * (longest - made.features["context"]),
    )
    assert not ragged(equal).any()
    assert ragged(slow).all()
    fitted = fit_curve(equal, H200, Recipe("x", "flat", residual=False))
    term = with_skew(fitted, fit_skew(slow, fitted))
    assert term.seconds(slow) == pytest.approx(slow.seconds, rel=0.03)
    assert term.seconds(equal) == pytest.approx(equal.seconds, rel=0.01)


def test_the_effective_longest_context_counts_the_few_that_outlast_the_rest():
    assert effective_longest([100] * 40) == 100
    one = [1000] * 39 + [9000]
    mean = sum(one) / 40
    assert effective_longest(one) == pytest.approx(mean + (9000 - mean) * (1 - 1 / 12))
    assert effective_longest([1000] * 20 + [9000] * 20) < effective_longest([1000] * 39 + [9000]) + 4000
    assert effective_longest([500]) == 500

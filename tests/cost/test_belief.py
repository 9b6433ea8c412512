"""What a policy believes: the SM-scaling roofline, alpha at a few points, and the other estimators."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.belief import believe
from sim.cost.pairs import B_KNOTS, BS, C_KNOTS, CS, HS, Q_KNOTS, QS, Pairs, compile_pairs
from sim.cost.prices import Prices
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import DecodeAttention, Gemm
from sim.cost.srm import bandwidth, compute, find_inflection, make_srm
from sim.cost.step import decode_pass_s, dense_s, prefill_attention_s
from sim.errors import SimctlError

A100 = "a100-80gb-sxm"


@lru_cache(maxsize=4)
def world(gpu: str) -> tuple[ProfiledCost, list[int], list[tuple[int, int]], Prices, Pairs]:
    cost = load_cost("llama-3.1-8b", gpu, "auto")
    total = cost.gpu.sms
    decode = [8, 24, 40, 56, 72, 88]
    parts = sorted({*decode, *(total - d for d in decode)})
    pairs = [*((total - d, d) for d in decode), (total, 24), (total - 24, total), (total, total)]
    p = cost.compile(max_tokens=4096, max_seqs=128, max_context=16384, partitions=parts)
    return cost, parts, pairs, p, compile_pairs(cost, parts, pairs)


def belief(gpu: str, estimator: Any, seed: int = 0) -> tuple[Prices, Pairs]:
    cost, parts, pairs, p, x = world(gpu)
    return believe(estimator, cost, p, x, parts, pairs, seed)


def prefill_s(p: Prices, part: int, q: int, h: int) -> float:
    return dense_s(p, part, q, False) + prefill_attention_s(p, part, q, h)


# off every sampled point
STEPS = [(b, c) for b in (6, 20, 100) for c in (400, 2000, 6000)]
PASSES = [(q, h) for q in (300, 900, 3000) for h in (0, 1500)]


def errors(gpu: str, estimator: Any) -> dict[str, float]:
    """Mean absolute error of steps and passes on every SM set."""
    _, parts, _, p, _ = world(gpu)
    b, _ = belief(gpu, estimator)
    every = range(1 + len(parts))
    steps = [decode_pass_s(b, i, n, n * c) / decode_pass_s(p, i, n, n * c) for i in every for n, c in STEPS]
    passes = [prefill_s(b, i, q, h) / prefill_s(p, i, q, h) for i in every for q, h in PASSES]
    return {
        "step": float(np.mean(np.abs(np.array(steps) - 1))),
        "pass": float(np.mean(np.abs(np.array(passes) - 1))),
    }


def test_bandwidth_is_linear_to_the_inflection_and_flat_beyond() -> None:
    """Of 108 SMs with N_d = 30 (arXiv:2504.19516 fig. 8b): 54 have all of it, 20 two thirds."""
    assert bandwidth(2.0e12, 54, 30) == 2.0e12
    assert bandwidth(2.0e12, 20, 30) == pytest.approx(2.0e12 * 2 / 3, rel=1e-15)
    assert compute(312e12, 54, 108) == 156e12


def test_a_kernel_takes_the_longer_of_compute_and_bytes() -> None:
    srm = replace(make_srm(world(A100)[0]), inflection=30.0)
    wide = Gemm(np.array([4096]), 4096, 4096, 2)
    assert srm.kernel_s(wide, 54)[0] == pytest.approx(2 * 4096**3 / (srm.peak_flops / 2))
    keys = DecodeAttention(np.array([32]), np.array([65536.0]), 32, 8, 128, 2, None)
    assert srm.kernel_s(keys, 20)[0] == pytest.approx(1.5 * srm.kernel_s(keys, 54)[0])
    assert srm.kernel_s(keys, 54)[0] == srm.kernel_s(keys, 108)[0]


def test_the_inflection_of_a_sharp_curve_is_found() -> None:
    cost = world(A100)[0]

    class Sharp:
        gpu, model = cost.gpu, cost.model

        def solo(self, launch: Any, sms: int) -> Any:
            return replace(cost.solo(launch), gpu_s=0.01 / min(1.0, sms / 30))

    assert find_inflection(Sharp()) == 30  # type: ignore[arg-type]


def test_waves_lengthen_the_form_by_what_the_last_one_leaves_idle() -> None:
    """The O projection of 1024 tokens on an A100 leaves 40.7 % idle (arXiv:2504.19516 table 2)."""
    plain, waves = (make_srm(world(A100)[0], term) for term in (False, True))
    o = Gemm(np.array([1024]), 4096, 4096, 2)
    assert plain.kernel_s(o, 108)[0] / waves.kernel_s(o, 108)[0] == pytest.approx(1 - 0.407, abs=5e-4)


@pytest.mark.parametrize("gpu", [A100, "h200-sxm"])
def test_form_times_alpha_meets_held_out_points(gpu: str) -> None:
    """The aim of 10 % is ours: the paper's figure has no numbers; repeats of one state scatter by 6.8 %."""
    found = errors(gpu, "analytic")
    assert found["step"] < 0.08
    assert found["pass"] < 0.10


def test_alpha_is_exact_where_it_is_sampled() -> None:
    _, parts, _, p, _ = world("h200-sxm")
    b, _ = belief("h200-sxm", "analytic")
    smallest = 1 + parts.index(24)
    for part in (0, smallest):
        assert prefill_s(b, part, 512, 0) == pytest.approx(prefill_s(p, part, 512, 0), rel=1e-9)
        # a segment of contexts has one alpha
        assert decode_pass_s(b, part, 32, 32 * 1024) == pytest.approx(
            decode_pass_s(p, part, 32, 32 * 1024), rel=0.03
        )


def test_switches_change_what_is_believed_and_nothing_else() -> None:
    base, waves, attention = (
        belief(A100, estimator)
        for estimator in (
            "analytic",
            {"analytic": {"wave_term": True}},
            {"analytic": {"attention_term": True}},
        )
    )
    assert not np.array_equal(waves[0].dense_eager_s, base[0].dense_eager_s)
    assert not np.array_equal(attention[0].pre_s, base[0].pre_s)
    for one in (base, waves, attention):
        assert one[0].host_eager_s is base[0].host_eager_s
        assert one[0].dense_eager_sm is base[0].dense_eager_sm
    # the form follows the steps of the truth better with the term that it lacks
    own = [prefill_attention_s(b, 0, 2048, 0) for b, _ in (base, attention)]
    truth = prefill_attention_s(world(A100)[3], 0, 2048, 0)
    assert abs(own[1] / truth - 1) < 0.01 < abs(own[0] / truth - 1)


@pytest.mark.parametrize("terms", [{}, {"wave_term": True, "attention_term": True}])
def test_believed_prices_are_positive_and_fall_with_sms(terms: dict[str, bool]) -> None:
    _, parts, _, _, _ = world(A100)
    b, y = belief(A100, {"analytic": terms})
    for name in ("dense_graph_s", "dense_eager_s", "dec_b", "pre_s"):
        assert np.min(np.asarray(getattr(b, name))) >= 0.0, name
    assert np.min(np.asarray(y.factor_decode)) >= 1.0
    if not terms:
        for b_, c in STEPS:
            by_size = [decode_pass_s(b, i + 1, b_, b_ * c) for i in np.argsort(parts)]
            # alpha is linear where the form has its knee: a little of either way
            assert all(1.02 * one > more for one, more in pairwise(by_size))


def test_slowdowns_come_from_a_few_points_and_are_far_better_than_none() -> None:
    _, _, pairs, _, x = world("h200-sxm")
    _, y = belief("h200-sxm", "analytic")
    middle = np.ix_(range(6), range(3, 9), range(2), range(1, 9), range(1, 6))
    for name, most in (("factor_decode", 0.06), ("factor_prefill", 0.06)):
        truth, believed = (
            np.asarray(getattr(t, name)).reshape(len(pairs), QS, HS, BS, CS)[middle] for t in (x, y)
        )
        assert np.mean(np.abs(believed / truth - 1)) < most
        assert np.mean(np.abs(1 / truth - 1)) > 2 * most
    assert (Q_KNOTS[4], Q_KNOTS[8], B_KNOTS[3], B_KNOTS[7], C_KNOTS[1], C_KNOTS[4]) == (
        512,
        8192,
        8,
        128,
        512,
        4096,
    )


def test_the_oracle_is_the_truth_without_jitter_and_noise_is_seeded() -> None:
    _, _, _, p, x = world(A100)
    b, y = belief(A100, "oracle")
    assert b.dense_eager_s is p.dense_eager_s
    assert y is x
    assert list(b.noise) == [1.0]
    first, again, other = (belief(A100, {"noisy": {"sigma": 0.2}}, seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first.pre_s, again.pre_s)
    assert not np.array_equal(first.pre_s, other.pre_s)
    biased, _ = belief(A100, {"noisy": {"sigma": 0.0, "bias": 0.5}})
    assert np.allclose(biased.dec_b, np.exp(0.5) * np.asarray(p.dec_b))


@pytest.mark.parametrize(
    ("estimator", "sentence"),
    [
        ("perfect", "unknown estimator 'perfect'"),
        ({"noisy": {"sigma": -1}}, "estimator.noisy takes sigma"),
        ({"analytic": {"waves": True}}, "estimator.analytic takes wave_term and attention_term"),
        ({"analytic": {"wave_term": 1}}, "each true or false"),
        ({"oracle": {}}, "unknown estimator"),
    ],
)
def test_bad_estimators_are_named(estimator: Any, sentence: str) -> None:
    with pytest.raises(SimctlError, match=sentence):
        belief(A100, estimator)

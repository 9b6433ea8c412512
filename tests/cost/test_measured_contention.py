"""The contention surface of a measured profile: bounds, naming, monotony, regimes, files and the engine's tables."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sim.cost import load_cost
from sim.cost.contention import LABEL
from sim.cost.gpu import load_gpu
from sim.cost.loads import launch_loads
from sim.cost.measured_contention import (
    FADE,
    Beside,
    MeasuredContention,
    Residual,
    Waiting,
    load_contention,
    regime_of,
)
from sim.cost.pairs import compile_pairs, pair_factor
from sim.cost.profile import load_folder
from sim.cost.shapes import Launch
from sim.errors import SimctlError

GPU = load_gpu("h200-sxm")
SPEC = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
WAIT = {"prefill": Waiting(1.2, 0.7, 0.6, 0.1, 1.0), "decode": Waiting(1.0, 0.8, 0.8, 0.2, 2.0)}
SITES = np.array([[6.0, 6.1, 11.0, 9.0, 5.0, 11.0], [6.8, 4.3, 8.0, 13.0, 8.0, 9.0]])
SURFACE = MeasuredContention(
    gpu=GPU,
    model="llama-3.1-8b",
    label="measured",
    coverage="made up",
    beside={
        "prefill": Beside(0.25, 0.0, 0.8, 2.0, 1.3, 1.3),
        "decode": Beside(0.45, 0.9, 0.8, 1.7, 0.9, 0.5),
    },
    waiting={(r, p): WAIT for r in ("overlapped", "streams") for p in ("normal", "high")},
    residuals={
        ("disjoint", "normal"): Residual(
            SITES, np.array([2.0, 2, 4, 6, 4, 6]), np.array([[0.02, 0.01], [-0.01, 0.0]])
        )
    },
)
BARE = replace(SURFACE, residuals={})
COST = replace(SPEC, profile=replace(SPEC.profile, contention=SURFACE))


def prefill(q=2048, h=0):
    return Launch(chunks=((q, h),))


def decode(batch=32, context=2048):
    return Launch(
        decode_batch=batch, decode_context_sum=batch * context, decode_context_max=context, graph=True
    )


launches = st.one_of(
    st.builds(prefill, st.integers(1, 16384), st.integers(0, 65536)),
    st.builds(decode, st.integers(1, 512), st.integers(1, 65536)),
)


@given(launches, launches, st.integers(8, 132), st.integers(8, 132))
def test_factors_are_at_least_one_and_do_not_depend_on_who_is_named_first(a, b, width, other):
    overlap = max(0, width + other - 132)
    one, two = COST.slowdown(a, b, (width, other), overlap)
    assert min(one, two) >= 1
    assert np.isfinite([one, two]).all()
    assert COST.slowdown(b, a, (other, width), overlap) == pytest.approx((two, one))


def test_nothing_beside_costs_nothing():
    idle = replace(launch_loads(SPEC, [decode()], 68), flops=np.zeros(1), hbm_bytes=np.zeros(1))
    for overlap in (0, 32, 132):
        split = (132, 132) if overlap == 132 else (64, 68 + overlap)
        of_prefill, of_idle = SURFACE.factors(launch_loads(SPEC, [prefill()], 64), idle, split, overlap)
        assert of_prefill[0, 0] == of_idle[0, 0] == 1.0


@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.sampled_from([16, 64, 112]))
def test_more_demand_beside_never_speeds_up(first, second, width):
    low, high = sorted((first, second))
    own, step = launch_loads(SPEC, [prefill()], width), launch_loads(SPEC, [decode()], 132 - width)
    drawn = step.hbm_bytes / step.hbm

    def factor(share):
        return BARE.factors(own, replace(step, hbm_bytes=drawn * share), (width, 132 - width))[0][0, 0]

    assert 1.0 < factor(low) <= factor(high)


def test_the_memory_term_is_the_formula():
    a, b = launch_loads(SPEC, [prefill()], 64), launch_loads(SPEC, [decode()], 68)
    t = SURFACE.beside["decode"]
    draw = (a.hbm[0] + t.other_tensor * a.tensor[0]) ** t.other_power
    pull = (b.hbm[0] + t.own_tensor * b.tensor[0]) ** t.own_power / (68 / 132) ** t.share_power
    assert BARE.factors(a, b, (64, 68))[1][0, 0] == pytest.approx(1 + t.k * draw * pull)


def test_streams_wait_for_a_share_of_the_others_layer():
    a, b = launch_loads(SPEC, [prefill(8192)], 132), launch_loads(SPEC, [decode(8)], 132)
    t = WAIT["decode"]
    waits = t.k * a.layer_ms**t.other_power / b.layer_ms**t.own_power * b.tensor**t.tensor_power
    starved = BARE.factors(a, b, (132, 132), 132)[1][0, 0]
    assert starved == pytest.approx(1 + waits[0])
    # a longer chunk starves more, a partition protects
    short = launch_loads(SPEC, [prefill(512)], 132)
    assert BARE.factors(short, b, (132, 132), 132)[1][0, 0] < starved
    beside = launch_loads(SPEC, [prefill(8192)], 96), launch_loads(SPEC, [decode(8)], 36)
    assert BARE.factors(*beside, (96, 36))[1][0, 0] < 0.5 * starved


def test_more_common_sms_cost_more():
    a = launch_loads(SPEC, [prefill()], 96)
    factors = []
    for beside in (36, 68, 100, 132):
        b = launch_loads(SPEC, [decode()], beside)
        factors.append([x[0, 0] for x in BARE.factors(a, b, (96, beside), 96 + beside - 132)])
    waiting = np.array(factors)
    assert (np.diff(waiting[:, 0]) > 0).all()
    assert waiting[-1, 1] > waiting[0, 1]


@pytest.mark.parametrize(
    ("split", "overlap", "regime"),
    [
        ((64, 68), 0, "disjoint"),
        ((64, 100), 32, "overlapped"),
        ((112, 132), 112, "overlapped"),
        ((132, 132), 132, "streams"),
    ],
)
def test_regimes(split, overlap, regime):
    assert regime_of(split, overlap, 132) == regime


def test_the_residual_is_met_at_a_site_and_gone_far_from_it():
    residual = SURFACE.residuals["disjoint", "normal"]

    def at(site):
        a = launch_loads(SPEC, [prefill(int(2 ** site[2]), int(2 ** site[3]) - 512)], 64)
        b = launch_loads(SPEC, [decode(int(2 ** site[4]), int(2 ** site[5]))], 64)
        return [one[0, 0] for one in residual.at(a, b, (2 ** site[0], 2 ** site[1]))]

    away = (SITES[0] - SITES[1]) / residual.lengths
    near = np.exp(-0.5 * np.sum(away**2))
    assert at(SITES[0]) == pytest.approx([0.02 - 0.01 * near, 0.01], rel=1e-6)
    far = SITES[0].copy()
    far[2] += FADE + 0.01
    assert at(far) == [0.0, 0.0]


def test_residuals_belong_to_the_measured_model_and_the_label_says_so():
    a, b = launch_loads(SPEC, [prefill()], 64), launch_loads(SPEC, [decode()], 68)
    ours, others, bare = (
        surface.factors(a, b, (64, 68), model=model)[0][0, 0]
        for surface, model in ((SURFACE, "llama-3.1-8b"), (SURFACE, "other"), (BARE, None))
    )
    assert ours != others == bare
    assert COST.provenance()["contention"] == "measured"
    assert SPEC.provenance()["contention"] == LABEL
    assert SURFACE.label_for("other") == "extrapolated from h200-sxm by demanded bandwidth"


def test_two_of_a_kind_get_the_analytic_guess():
    split = (64, 68)
    assert COST.slowdown(prefill(), prefill(512), split) == SPEC.slowdown(prefill(), prefill(512), split)
    assert COST.slowdown(decode(), decode(8), split) == SPEC.slowdown(decode(), decode(8), split)
    kinds = [prefill(), decode(), prefill(512)]
    table = COST.slowdowns(kinds, kinds, split)
    for i, a in enumerate(kinds):
        for j, b in enumerate(kinds):
            assert COST.slowdown(a, b, split) == pytest.approx((table[0][i, j], table[1][i, j]))


@pytest.mark.parametrize("sms", [24, 132])
def test_loads_are_the_solo_prices_added_up(sms):
    cases = [
        prefill(),
        Launch(chunks=((300, 0), (77, 1000)), layers=(0, 4)),
        decode(24),
        Launch(chunks=((512, 64),), decode_batch=9, decode_context_sum=9000),
    ]
    loads = launch_loads(SPEC, cases, sms)
    for i, launch in enumerate(cases):
        parts = SPEC.solo(launch, sms).by_operator
        assert loads.seconds[i] == pytest.approx(sum(part.seconds for part in parts))
        assert loads.hbm_bytes[i] == pytest.approx(sum(part.hbm_bytes for part in parts))
        assert loads.flops[i] == pytest.approx(sum(part.flops for part in parts))
    assert loads.prefill.tolist() == [True, True, False, True]
    assert loads.h[1] == 500
    assert loads.context[2] == 2048


def test_a_file_brings_the_same_surface_back(tmp_path):
    path = tmp_path / "contention.json"
    path.write_text(json.dumps(SURFACE.as_data()))
    again = load_contention(path, GPU, "measured")
    a, b = launch_loads(SPEC, [prefill()], 64), launch_loads(SPEC, [decode()], 68)
    for overlap, split in ((0, (64, 68)), (132, (132, 132))):
        assert again.factors(a, b, split, overlap)[0] == pytest.approx(
            SURFACE.factors(a, b, split, overlap)[0]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "a100-80gb-sxm"}, "was measured on a100-80gb-sxm, not on h200-sxm"),
        ({"beside": {}}, "key 'prefill' is missing"),
        ({"waiting": [3]}, "contention is not readable"),
        ({"waiting": []}, "no terms for 'overlapped', 'normal'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, change, message):
    path = tmp_path / "contention.json"
    path.write_text(json.dumps({**SURFACE.as_data(), **change}))
    with pytest.raises(SimctlError, match=message):
        load_contention(path, GPU, "measured")


def test_a_profile_folder_brings_its_surface_into_the_engines_tables(tmp_path):
    schema = {
        "schema_version": 1,
        "name": "mine",
        "gpu": "h200-sxm",
        "curves": [{"operator": "gemm", "form": "roofline", "file": "gemm.yaml", "label": "fitted from own"}],
        "contention": {"file": "contention.json", "label": "measured"},
    }
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(schema))
    (tmp_path / "gemm.yaml").write_text("efficiency: 0.8\n")
    (tmp_path / "contention.json").write_text(json.dumps(SURFACE.as_data()))
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile=str(tmp_path))
    assert cost.profile.contention is not None
    tables = compile_pairs(cost, [64, 72], [(64, 72)])
    one, two = cost.slowdown(prefill(2048, 4096), decode(32, 2048), (64, 72), overlap=4)
    for table, expected in ((tables.factor_prefill, one), (tables.factor_decode, two)):
        assert pair_factor(tables, table, 0, 2048, 4096, 32, 2048) == pytest.approx(expected)
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump({**schema, "contention": {"file": "x.json"}}))
    with pytest.raises(SimctlError, match="contention: key 'label' is missing"):
        load_folder(tmp_path, GPU)

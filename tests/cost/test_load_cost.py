"""The public entry: names, launch modes, what-if factors, energy, and what is refused."""

from __future__ import annotations

import pytest

from sim.cost import load_cost
from sim.cost.shapes import Launch
from sim.errors import SimctlError

H200 = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
DECODE = Launch((), 32, 32 * 2048, graph=True)
PREFILL = Launch(((100, 0),))
TOTALS = (
    *("dense_tokens", "head_rows", "prefill_pairs", "prefill_kv_tokens", "decode_kv_tokens"),
    *("launches_graph", "launches_eager"),
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": {"pp": 2}}, "parallel.pp = 2 is not modelled"),
        ({"parallel": {"tq": 1}}, "unknown key 'tq'. Did you mean 'tp'"),
        ({"kernels": {"attention": "pot"}}, "'pot' is none of serial, .* Did you mean 'pod'"),
        ({"kernels": {"lunch": "graph"}}, "Did you mean 'launch'"),
        ({"kernels": {"launch": "graphs"}}, "Did you mean 'graph'"),
        ({"kernels": {"scale": {"gem": 0.5}}}, "Did you mean 'gemm"),
        ({"kernels": {"scale": {"gemm": -1}}}, "must be a factor of 0 or more"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_sentence(options, message):
    with pytest.raises(SimctlError, match=message):
        load_cost("llama-3.1-8b", "h200-sxm", **options)


def test_parallel_of_one_is_no_parallelism():
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec", parallel={"tp": 1, "pp": 1, "ep": 1, "dp": 1})
    assert cost.solo(DECODE) == H200.solo(DECODE)


def test_eager_launches_are_bound_by_the_host():
    """First measurements, 8B model: 4.5-11 ms of host time; the host is the longer side below 300-400 tokens."""
    eager = load_cost("llama-3.1-8b", "h200-sxm", "spec", kernels={"launch": "eager"})
    gap = eager.launching.gap_s(1, False)
    short, long = (eager.solo(Launch(((tokens, 0),))) for tokens in (300, 400))
    assert 4.5e-3 < short.step_s - gap < 11e-3
    assert short.step_s - gap > short.gpu_s
    assert long.step_s - gap == long.gpu_s
    assert H200.solo(PREFILL).step_s < eager.solo(PREFILL).step_s
    assert eager.solo(DECODE).step_s > H200.solo(DECODE).step_s
    assert eager.profile_hash != H200.profile_hash


def test_eager_batches_are_not_padded():
    eager = load_cost("llama-3.1-8b", "h200-sxm", "spec", kernels={"launch": "eager"})
    P = eager.compile(max_tokens=600, max_seqs=8, max_context=64)
    assert P.dense_graph_s.tolist() == P.dense_eager_s.tolist()


@pytest.mark.parametrize(
    "name",
    ["gemm", "gemm/down", "prefill_attention", "decode_attention", "norm", "rope", "lm_head", "sampling"],
)
def test_every_scale_changes_its_operator_and_no_other(name):
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec", kernels={"scale": {name: 0.5}})
    launch = Launch(((1000, 3000),), 16, 16 * 1000)
    for ours, theirs in zip(cost.solo(launch).by_operator, H200.solo(launch).by_operator, strict=True):
        hit = ours.name == name or ours.name.startswith(name + "/")
        assert ours.seconds == pytest.approx(theirs.seconds * (0.5 if hit else 1.0), rel=1e-12)
        assert ours.flops == theirs.flops


def test_a_variant_beats_its_family_and_zero_is_an_infinite_speedup():
    cost = load_cost(
        "llama-3.1-8b", "h200-sxm", "spec", kernels={"scale": {"gemm": 0.5, "gemm/o": 1.0, "rope": 0}}
    )
    assert (cost.factor("gemm/qkv"), cost.factor("gemm/o"), cost.factor("rope")) == (0.5, 1.0, 0.0)
    rope = next(part for part in cost.solo(PREFILL).by_operator if part.name == "rope")
    assert rope.seconds == 0.0
    assert "scaled by 0.5" in cost.provenance()["gemm/qkv"]


def test_energy_of_totals_never_exceeds_the_cap_and_starts_at_idle():
    nothing = dict.fromkeys(TOTALS, 0.0)
    assert H200.energy_j(nothing, 10.0) == pytest.approx(10 * 97)
    much = {**nothing, "dense_tokens": 1e9, "launches_eager": 1e5}
    assert H200.energy_j(much, 10.0) == 10 * 700


def test_a_long_gemm_draws_what_was_measured():
    """682 W in a long bf16 matrix product on an H200, 97 W idle (first measurements)."""
    step = H200.solo(Launch(((8192, 0),)))
    assert step.watts == pytest.approx(682, rel=0.08)
    assert H200.solo(DECODE).watts < 500

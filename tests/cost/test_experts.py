"""Mixtures of experts: who gets the tokens, what that costs, and what fits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost import load_cost
from sim.cost.experts import chances, row_tiles, touched
from sim.cost.model import ModelSpec, load_model, read_config
from sim.cost.operators import expert_bytes, flops, hbm_bytes, linear_operators
from sim.cost.shapes import Experts, Launch
from sim.cost.traits import TraitModel
from sim.cost.work import total_work
from sim.errors import SimctlError

MIXTURES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b-v0.1")
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}


def shape(m, experts=128, chosen=8, skew=0.0, counts=None) -> Experts:
    return Experts(np.atleast_1d(np.asarray(m)), 1536, 2048, 2, experts, chosen, skew, counts)


def decode(batch: int, context: int = 1024) -> Launch:
    return Launch(decode_batch=batch, decode_context_sum=batch * context, graph=True)


def test_even_routing_touches_the_expected_number_of_experts():
    """E (1 - (1 - k/E)^m); with one expert a token that is n (1 - (1 - 1/n)^m)."""
    m = np.array([1, 2, 16, 500])
    assert touched(shape(m)) == pytest.approx(128 * (1 - (1 - 8 / 128) ** m.astype(float)))
    assert touched(shape([1]))[0] == pytest.approx(8)
    assert touched(shape(m, 10, 1)) == pytest.approx(10 * (1 - 0.9 ** m.astype(float)))
    # m k independent draws would hit a token's expert twice: fewer distinct ones
    independent = 128 * (1 - (1 - 1 / 128) ** (8 * m.astype(float)))
    assert (touched(shape(m)) > independent)[:3].all()


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0, 1.5])
def test_expectations_agree_with_draws(skew):
    rng = np.random.default_rng(5)
    odds = -skew * np.log(np.arange(1, 65))
    for m in (3, 40, 700):
        noise = -np.log(-np.log(rng.random((40, m, 64))))
        picked = np.argsort(-(odds + noise), axis=2)[:, :, :4]
        counts = np.array([np.bincount(one.ravel(), minlength=64) for one in picked])
        many = shape(np.full(40, m), 64, 4, skew, counts)
        mean = shape([m], 64, 4, skew)
        assert touched(mean)[0] == pytest.approx(touched(many).mean(), rel=0.05)
        assert row_tiles(mean, 32)[0] == pytest.approx(row_tiles(many, 32).mean(), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 160), st.floats(0.0, 3.0), st.data())
def test_chances_add_up_and_skew_touches_fewer(experts, skew, data):
    chosen = data.draw(st.integers(1, experts))
    found = chances(experts, chosen, skew)
    assert sum(chance * alike for chance, alike in found) == pytest.approx(chosen)
    assert sum(alike for _, alike in found) == experts
    assert all(0 < chance <= 1 + 1e-12 for chance, _ in found)
    m = np.array([1, 7, 64, 900])
    even, uneven = (touched(shape(m, experts, chosen, s)) for s in (0.0, skew))
    assert (uneven <= even + 1e-9).all()
    assert (np.diff(uneven) >= -1e-9).all()
    assert (uneven <= experts + 1e-9).all()
    assert (row_tiles(shape(m, experts, chosen, skew), 128) >= uneven - 1e-9).all()


def test_the_hottest_expert_gets_more_with_skew_but_never_more_than_every_token():
    shares = [max(chances(128, 8, skew))[0] * 128 / 8 for skew in (0.0, 0.5, 1.0, 2.0)]
    assert shares[0] == 1.0
    assert shares == sorted(shares)
    assert shares[-1] <= 128 / 8 + 1e-9


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),  # arXiv:2505.09388 and the model cards
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("mixtral-8x7b", 46.7, 12.9),  # arXiv:2401.04088
    ],
)
def test_published_sizes(name, total, active):
    model = load_model(name)
    assert model.params() / 1e9 == pytest.approx(total, rel=0.005)
    assert model.active_params() / 1e9 == pytest.approx(active, rel=0.02)


def test_rows_of_all_experts_are_the_tokens_times_those_they_take():
    counts = np.array([[3, 0, 5, 0]])
    one = Experts(np.array([4]), 6, 10, 2, 4, 2, 0.0, counts)
    assert flops(one)[0] == 2 * 8 * 6 * 10
    assert expert_bytes(one)[0] == 2 * 2 * 60
    assert hbm_bytes(one)[0] == 2 * (8 * 10 + 8 * 6 + 2 * 60)
    assert row_tiles(one, 2)[0] == 2 + 3


@pytest.mark.parametrize(("config", "name"), [(QWEN3_MOE, "qwen3-30b-a3b"), (MIXTRAL, "mixtral-8x7b-v0.1")])
def test_configurations_of_mixtures_give_the_builtin_shapes(tmp_path, config, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found, expected = read_config(path), load_model(name)
    for key in ("params", "active_params", "kv_bytes_per_token"):
        assert getattr(found, key)() == getattr(expected, key)()
    assert (found.experts, found.experts_per_token, found.ffn) == (
        expected.experts,
        expected.experts_per_token,
        expected.ffn,
    )


def test_a_shared_expert_is_read_by_every_pass(tmp_path):
    path = tmp_path / "config.json"
    shared = {
        **QWEN3_MOE,
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": 5632,
    }
    path.write_text(json.dumps(shared))
    with_one = read_config(path)
    path.write_text(json.dumps({**shared, "shared_expert_intermediate_size": 0}))
    without = read_config(path)
    assert with_one.params() - without.params() == 48 * 3 * 2048 * 5632
    names = [operator.name for operator in linear_operators(with_one)]
    assert {"gemm/shared_gate_up", "activation/shared", "gemm/shared_down"} <= set(names)
    assert with_one.qkv_bias


@pytest.mark.parametrize("name", MIXTURES)
def test_more_tokens_never_take_less_and_a_skew_reads_fewer_experts(name):
    cost = load_cost(load_model(name), "h200-sxm", parallel={"tp": 8})
    steps = [cost.solo(decode(batch)) for batch in (1, 4, 16, 64, 256)]
    moved = [step.hbm_bytes for step in steps]
    assert moved == sorted(moved)
    assert [s.gpu_s for s in steps] == sorted(s.gpu_s for s in steps)
    if cost.model.experts > 16:
        skewed = load_cost(load_model(name, routing_skew=1.2), "h200-sxm", parallel={"tp": 8})
        few, all_alike = skewed.solo(decode(8)), cost.solo(decode(8))
        assert few.hbm_bytes < all_alike.hbm_bytes
        assert few.gpu_s < all_alike.gpu_s
        # a few experts get most tokens: more tiles than the even split of a full chunk
        chunk = Launch(chunks=((2048, 0),))
        of = {
            one: sum(p.seconds for p in c.solo(chunk).by_operator if p.name.startswith("moe"))
            for one, c in (("skewed", skewed), ("even", cost))
        }
        assert of["skewed"] > of["even"]


def test_one_token_reads_its_experts_and_a_large_batch_all_of_them():
    cost = load_cost("qwen3-30b-a3b", "h200-sxm")
    model = cost.model
    expert = 3 * 2048 * 768 * 2
    for batch, count in ((1, 8.0), (256, 128.0)):
        parts = cost.solo(decode(batch)).by_operator
        moved = sum(part.hbm_bytes for part in parts if part.name.startswith("moe/"))
        rows = batch * 8 * model.layers * 2 * (2048 + 1536 + 768 + 2048)
        assert moved - rows == pytest.approx(model.layers * count * expert, rel=1e-6)


def test_work_of_a_run_counts_experts_by_the_mean_pass():
    cost = load_cost("qwen3-30b-a3b", "h200-sxm")
    step = cost.solo(decode(24))
    totals = {
        "dense_tokens": 24.0 * 5,
        "head_rows": 24.0 * 5,
        "prefill_pairs": 0.0,
        "prefill_kv_tokens": 0.0,
        "decode_kv_tokens": 24.0 * 1024 * 5,
        "launches_graph": 5.0,
        "launches_eager": 0.0,
    }
    work = total_work(cost.model, totals)
    assert work.flops == pytest.approx(5 * step.flops)
    assert work.hbm_bytes == pytest.approx(5 * step.hbm_bytes)


def test_traits_of_a_launch_know_the_experts():
    cost = load_cost("qwen3-30b-a3b", "h200-sxm")
    traits = TraitModel(cost)(Launch(chunks=((2048, 0),)))
    step = cost.solo(Launch(chunks=((2048, 0),)))
    assert traits.hbm_bytes == pytest.approx(step.hbm_bytes, rel=0.02)
    # 189 tiles of rows in expectation, 16 of columns of the down projection
    assert 16 * 180 < traits.gemm_ctas < 16 * 200


def test_memory_holds_all_experts_and_the_large_model_needs_a_group():
    weights = load_model("qwen3-30b-a3b").weight_bytes()
    assert weights == pytest.approx(61.1e9, rel=0.01)
    assert load_cost("qwen3-30b-a3b", "h200-sxm").memory().weight_bytes == weights
    with pytest.raises(SimctlError, match=r"does not fit.*437\.9.*GiB of weights"):
        load_cost("qwen3-235b-a22b", "h200-sxm").memory()
    four, eight = (load_cost("qwen3-235b-a22b", "h200-sxm", parallel={"tp": tp}).memory() for tp in (4, 8))
    assert four.weight_bytes == pytest.approx(470.2e9 / 4, rel=0.02)
    assert eight.num_blocks > 4 * four.num_blocks > 0


def test_expert_parallelism_is_refused():
    with pytest.raises(SimctlError, match=r"parallel\.ep = 2 is not modelled"):
        load_cost("qwen3-30b-a3b", "h200-sxm", parallel={"ep": 2})


def test_a_group_reduces_behind_the_experts():
    names = [op.name for op in load_cost("qwen3-235b-a22b", "h200-sxm", parallel={"tp": 4}).operators]
    assert names[names.index("routing/unpermute") + 1] == "allreduce/ffn"
    assert names.count("allreduce/ffn") == 1


@pytest.mark.parametrize(
    ("name", "skew", "message"),
    [
        ("llama-3.1-8b", 1.0, "no effect: llama-3.1-8b has no experts"),
        ("qwen3-30b-a3b", -0.1, r"within 0\.\.3"),
        ("qwen3-30b-a3b", 9.0, r"within 0\.\.3"),
    ],
)
def test_skews_out_of_place_are_refused(name, skew, message):
    with pytest.raises(SimctlError, match=message):
        load_model(name, routing_skew=skew)


def test_dense_models_have_no_operators_of_experts():
    dense: ModelSpec = load_model("llama-3.1-8b")
    assert not [op for op in linear_operators(dense) if op.experts or op.name.startswith("routing")]
    assert dense.active_params() == dense.params()


def test_eager_layers_with_more_kernels_take_the_host_longer():
    eager = {
        name: load_cost(name, "h200-sxm", kernels={"launch": "eager"}).launching.terms.eager_layer_s
        for name in ("llama-3.1-8b", "llama-3.1-8b-fp8", "qwen3-30b-a3b")
    }
    assert eager["llama-3.1-8b"] == load_cost("llama-2-7b", "h200-sxm").profile.host.eager_layer_s
    # four casts a layer; norm of heads, router, choice, rows to experts and back beside eleven
    assert eager["llama-3.1-8b-fp8"] == pytest.approx(15 / 11 * eager["llama-3.1-8b"])
    assert eager["qwen3-30b-a3b"] == pytest.approx(16 / 11 * eager["llama-3.1-8b"])

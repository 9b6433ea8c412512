"""e4m3 weights: what shrinks, what stays in 16 bits, and who is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.model import from_config, load_model
from sim.cost.operators import flops, hbm_bytes, linear_operators
from sim.cost.shapes import Gemm, Launch
from sim.errors import SimctlError

QWEN3_FP8 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def decode(batch: int) -> Launch:
    return Launch(decode_batch=batch, decode_context_sum=batch * 1024, graph=True)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "llama-2-7b"])
def test_projections_are_halved_and_the_rest_is_not(name):
    half, full = load_model(name, "fp8"), load_model(name)
    saved = full.weight_bytes() - half.weight_bytes()
    assert saved == full.layers * full.linear_params()
    assert half.kv_bytes_per_token() == full.kv_bytes_per_token()
    assert half.params() == full.params()
    assert load_model(f"{name}-fp8") == half


def test_a_configuration_asks_for_it_by_its_quantization():
    found = from_config(QWEN3_FP8)
    assert found.quantization == "fp8"
    assert found.weight_bytes() == load_model("qwen3-8b-fp8").weight_bytes()


def test_operators_in_e4m3_and_in_16_bits():
    sizes = {op.name: op.dtype_bytes for op in linear_operators(load_model("qwen3-30b-a3b-fp8")) if op.n}
    assert {name for name, size in sizes.items() if size == 1} == {
        "gemm/qkv",
        "gemm/o",
        "moe/gate_up",
        "moe/down",
    }
    assert sizes["gemm/router"] == sizes["lm_head"] == 2
    names = [op.name for op in linear_operators(load_model("llama-3.1-8b-fp8"))]
    assert [name for name in names if name.startswith("quantise")] == [
        "quantise/qkv",
        "quantise/o",
        "quantise/gate_up",
        "quantise/down",
    ]
    assert names.index("quantise/qkv") + 1 == names.index("gemm/qkv")


def test_work_of_an_e4m3_product():
    m = np.array([3])
    small, large = Gemm(m, 40, 50, 1), Gemm(m, 40, 50, 2)
    assert hbm_bytes(small)[0] == 40 * 50 + 3 * 50 + 2 * 3 * 40
    assert flops(small)[0] == flops(large)[0] / 2


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_it_is_faster_and_leaves_room_for_more_blocks(name):
    half, full = load_cost(f"{name}-fp8", "h200-sxm"), load_cost(name, "h200-sxm")
    for launch in (decode(32), Launch(chunks=((2048, 0),))):
        assert 0.4 * full.solo(launch).gpu_s < half.solo(launch).gpu_s < full.solo(launch).gpu_s
    more = half.memory().num_blocks - full.memory().num_blocks
    saved = full.memory().weight_bytes - half.memory().weight_bytes
    assert more == pytest.approx(saved / (16 * full.model.kv_bytes_per_token()), abs=1)


def test_only_products_change_their_curve():
    half, full = (load_cost(name, "h200-sxm").provenance() for name in ("llama-3.1-8b-fp8", "llama-3.1-8b"))
    for name in ("norm/input", "lm_head", "decode_attention", "prefill_attention"):
        assert half[name] == full[name]
    mixture = load_cost("qwen3-30b-a3b-fp8", "h200-sxm").profile
    plain = load_cost("qwen3-30b-a3b", "h200-sxm").profile
    assert mixture.curve("gemm/router") is not mixture.curve("gemm/qkv")
    assert mixture.content_hash != plain.content_hash


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("llama-3.1-8b", "int4", "quantization 'int4' is not modelled; use fp8"),
        ("opt-13b", "fp8", "gated decoders of 16 bits, which opt-13b is not"),
    ],
)
def test_other_kinds_and_models_are_refused(name, kind, message):
    with pytest.raises(SimctlError, match=message):
        load_model(name, kind)


def test_gpus_without_it_and_widths_that_do_not_fit_are_refused():
    with pytest.raises(SimctlError, match="a100-80gb-sxm has no e4m3 tensor cores"):
        load_cost("llama-3.1-8b-fp8", "a100-80gb-sxm")
    odd = replace(load_model("llama-3.1-8b-fp8"), ffn=14340)
    with pytest.raises(SimctlError, match="e4m3 products take multiples of 16"):
        load_cost(odd, "h200-sxm")

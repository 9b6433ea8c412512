"""Model shapes: the built-in table against published figures, and Hugging Face configurations."""

from __future__ import annotations

import json

import pytest

from sim.cost.model import from_config, list_models, load_model
from sim.errors import SimctlError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
QWEN3 = {
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
    "sliding_window": None,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 5120,
    "ffn_dim": 20480,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}


# KV bytes per token as published for serving studies; parameters in billions as the models' cards say
@pytest.mark.parametrize(
    ("name", "kv_bytes", "billions"),
    [
        ("yi-6b", 65_536, 6.06),
        ("llama-2-7b", 524_288, 6.74),
        ("llama-2-70b", 327_680, 68.98),
        ("llama-3.1-8b", 131_072, 8.03),
        ("llama-3.1-70b", 327_680, 70.55),
        ("llama-3.1-405b", 516_096, 405.85),
        ("mistral-7b", 131_072, 7.24),
        ("qwen3-8b", 147_456, 8.19),
        ("qwen3-32b", 262_144, 32.76),
        ("opt-13b", 819_200, 12.85),
        ("opt-66b", 2_359_296, 65.72),
        ("opt-175b", 4_718_592, 174.6),
    ],
)
def test_kv_bytes_and_parameters_match_published_figures(name, kv_bytes, billions):
    model = load_model(name)
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.params() / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.weight_bytes() == 2 * model.params()


def test_kv_of_512_tokens_of_opt_66b_is_1_125_gib():
    assert 512 * load_model("opt-66b").kv_bytes_per_token() == 1.125 * 2**30


@pytest.mark.parametrize(
    ("config", "builtin"),
    [(LLAMA, "llama-3.1-8b"), (MISTRAL, "mistral-7b"), (QWEN3, "qwen3-8b"), (OPT, "opt-13b")],
)
def test_a_configuration_gives_the_builtin_shape(tmp_path, config, builtin):
    folder = tmp_path / "Some-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    expected = load_model(builtin)
    for given in (folder, folder / "config.json"):
        model = load_model(str(given))
        assert model.name == "some-model"
        assert model.params() == expected.params()
        assert model.kv_bytes_per_token() == expected.kv_bytes_per_token()
        assert (model.window, model.max_context) == (expected.window, expected.max_context)


def test_every_builtin_has_a_source_and_whole_groups():
    for model in list_models():
        assert model.source
        assert model.q_heads == model.group * model.kv_heads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "'num_experts_per_tok' must be a whole number"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "exceeds the 8 experts"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "in some layers only"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, "in some layers only"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not modelled"),
        ({"hidden_size": None}, "'hidden_size' must be a whole number"),
        ({"quantization_config": {"bits": 4}}, "quantised by an unnamed method are not modelled"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by awq are not modelled"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"num_key_value_heads": 5}, "no multiple"),
        ({"num_key_value_heads": "4"}, "'num_key_value_heads' must be a whole number of 0 or more, not '4'"),
        ({"head_dim": 128.5}, "'head_dim' must be a whole number"),
        ({"sliding_window": "4096"}, "'sliding_window' must be a whole number"),
        ({"num_experts": "128"}, "'num_experts' must be a whole number"),
        ({"num_local_experts": [8]}, "'num_local_experts' must be a whole number"),
        ({**MOE, "shared_expert_intermediate_size": -1}, "'shared_expert_intermediate_size' must be a whole"),
        ({"quantization_config": "fp8"}, "'quantization_config' must be a mapping, not 'fp8'"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "'architectures' must be a list of names"),
        ({**MOE, "num_experts": None}, "Qwen3MoeForCausalLM needs its number of experts"),
        ({**MOE, "moe_intermediate_size": None}, "'moe_intermediate_size' must be a whole number above 0"),
    ],
)
def test_other_configurations_are_refused_with_the_key(change, message):
    with pytest.raises(SimctlError, match=message):
        from_config({**LLAMA, **change}, where="x/config.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3.1-8", "Did you mean 'llama-3.1-8b'"),
        ("gpt-oss-120b", "MXFP4"),
        ("llama-3.1-8b-fp4", "Unknown model 'llama-3.1-8b-fp4'"),
        ("deepseek-v3", "latent attention"),
        ("no/such/config.json", "does not exist"),
    ],
)
def test_unknown_and_unsupported_names_get_one_sentence(name, message):
    with pytest.raises(SimctlError, match=message):
        load_model(name)


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(SimctlError, match=r"config\.json' is not readable JSON"):
        load_model(str(path))
    path.write_text("[]")
    with pytest.raises(SimctlError, match="one JSON object"):
        load_model(str(path))

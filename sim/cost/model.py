"""Shapes of decoder models, dense or with experts: the built-in table and Hugging Face `config.json` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from sim.errors import SimctlError
from sim.suggest import nearest

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# architectures whose layer is: norm, attention with an optional grouped KV, norm, plain or gated FFN
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "YiForCausalLM",
    "OPTForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
QUANTIZATIONS = ("fp8",)
MAYBE_NONE = ("learned_positions", "experts", "experts_per_token", "shared_ffn")  # counts that may be 0
MOST_SKEW = 3.0  # beyond it nearly all tokens go to the same experts


@dataclass(frozen=True)
class ModelSpec:
    """Shape of one decoder. `ffn` is the FFN's inner width; a gated FFN has two such projections.

    A mixture has `experts` FFNs of width `ffn` in each layer, of which a token takes `experts_per_token` with odds of
    rank ** -`routing_skew`, and perhaps one of width `shared_ffn` that all tokens take. `quantization` `fp8`: weights
    and inputs of the layers' projections are e4m3; embedding, router, head, norms and the KV cache keep `dtype`.
    `window` is the sliding attention window in tokens (None: full attention); `learned_positions` the rows of
    a learned position table (0: none); `linear_bias` says whether the output and FFN projections carry biases.
    """

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_context: int
    gated: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    rope: bool = True
    learned_positions: int = 0
    window: int | None = None
    dtype: str = "bfloat16"
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    routing_skew: float = 0.0
    quantization: str = ""
    source: str = ""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one activation or cached key element, and of a weight that is not quantised."""
        return DTYPE_BYTES[self.dtype]

    @property
    def linear_bytes(self) -> int:
        """Bytes of one weight of a layer's projections."""
        return 1 if self.quantization else self.dtype_bytes

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def q_width(self) -> int:
        """Columns of the query projection."""
        return self.q_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ffn_in_width(self) -> int:
        """Columns of the FFN's first projection: twice `ffn` when gated."""
        return self.ffn * (2 if self.gated else 1)

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in the cache, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def linear_params(self, experts: int | None = None) -> int:
        """Weights of one layer's projections, with so many of its experts (None: all)."""
        ffn = self.hidden * (self.ffn_in_width + self.ffn)
        if self.experts:
            ffn *= self.experts if experts is None else experts
            ffn += 3 * self.hidden * self.shared_ffn
        return self.hidden * (self.qkv_width + self.q_width) + ffn

    def layer_params(self, experts: int | None = None) -> int:
        """Parameters of one layer, norms, biases and router included, with so many of its experts (None: all)."""
        linear = self.linear_params(experts) + self.hidden * self.experts
        bias = self.qkv_width * self.qkv_bias + (2 * self.hidden + self.ffn_in_width) * self.linear_bias
        # layer norms with a bias (OPT) hold two vectors, RMS norms one
        norms = 2 * self.hidden * (2 if self.linear_bias else 1) + 2 * self.head_dim * self.qk_norm
        return linear + bias + norms

    def embedding_params(self) -> int:
        """Parameters of the token and position tables."""
        return (self.vocab + self.learned_positions) * self.hidden

    def head_params(self) -> int:
        """Parameters that the LM head reads (shared with the embedding when tied)."""
        return self.vocab * self.hidden

    def params(self) -> int:
        """Parameters of the model; a tied head counts once."""
        head = 0 if self.tied_embeddings else self.head_params()
        final_norm = self.hidden * (2 if self.linear_bias else 1)
        return self.layers * self.layer_params() + self.embedding_params() + head + final_norm

    def active_params(self) -> int:
        """Parameters that one token passes through: all but the experts that it does not take."""
        idle = self.layer_params() - self.layer_params(self.experts_per_token)
        return self.params() - self.layers * idle

    def weight_bytes(self) -> int:
        """Bytes that the weights occupy in GPU memory, all experts included; scales of e4m3 weights are not counted."""
        quantised = self.layers * self.linear_params()
        return (self.params() - quantised) * self.dtype_bytes + quantised * self.linear_bytes


@cache
def _data() -> dict[str, Any]:
    text = files("sim").joinpath("data/models/models.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


@cache
def _builtin() -> dict[str, ModelSpec]:
    return {name: _checked(ModelSpec(name=name, **row)) for name, row in _data()["models"].items()}


def list_models() -> list[ModelSpec]:
    """The built-in models, in the order of the data file."""
    return list(_builtin().values())


def load_model(
    name_or_path: str | Path, quantization: str | None = None, routing_skew: float | None = None
) -> ModelSpec:
    """The built-in model of that name, or the model that a Hugging Face `config.json` describes.

    `quantization` `fp8` quantises its projections, and so does the name's ending `-fp8`; `routing_skew` is the exponent
    of its experts' odds. Raises SimctlError for unknown names, unreadable files and what is not modelled.
    """
    name = str(name_or_path)
    spec = _load(name)
    if quantization is not None:
        spec = quantised(spec, quantization)
    return spec if routing_skew is None else skewed(spec, routing_skew)


def quantised(spec: ModelSpec, quantization: str) -> ModelSpec:
    """The model with quantised projections; SimctlError for kinds and models that nobody runs so."""
    if quantization not in QUANTIZATIONS:
        raise SimctlError(
            f"model.quantization '{quantization}' is not modelled; use {', '.join(QUANTIZATIONS)} or leave it out."
        )
    if spec.dtype_bytes != 2 or not spec.gated:
        raise SimctlError(
            f"model.quantization {quantization} is modelled for gated decoders of 16 bits, which {spec.name} is not."
        )
    ending = "" if spec.name.endswith(f"-{quantization}") else f"-{quantization}"
    return replace(spec, name=spec.name + ending, quantization=quantization)


def skewed(spec: ModelSpec, routing_skew: float) -> ModelSpec:
    """The model with other odds of its experts; SimctlError for a dense one."""
    if not spec.experts:
        raise SimctlError(f"model.routing_skew has no effect: {spec.name} has no experts.")
    if not 0.0 <= routing_skew <= MOST_SKEW:
        raise SimctlError(f"model.routing_skew must lie within 0..{MOST_SKEW:g}, not {routing_skew:g}.")
    return replace(spec, routing_skew=float(routing_skew))


def _load(name: str) -> ModelSpec:
    models, aliases, refused = _builtin(), _data()["aliases"], _data()["unsupported"]
    if name in models or name in aliases:
        return models[aliases.get(name, name)]
    if name in refused:
        raise SimctlError(f"Model '{name}' is {refused[name]}, which is not modelled.")
    base, _, ending = name.rpartition("-")
    if ending in QUANTIZATIONS and (base in models or base in aliases):
        return quantised(models[aliases.get(base, base)], ending)
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file():
        return read_config(path)
    if path.suffix == ".json" or "/" in name:
        raise SimctlError(f"Model file '{name}' does not exist; give a built-in name or a config.json.")
    raise SimctlError(
        f"Unknown model '{name}'.{nearest(name, [*models, *aliases])} "
        "`simctl models` lists the built-in ones; the path of a Hugging Face config.json works too."
    )


def read_config(path: Path) -> ModelSpec:
    """The model of a Hugging Face `config.json`; its name is that of the containing folder or file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SimctlError(f"Model file '{path}' is not readable JSON: {error}.") from error
    if not isinstance(config, dict):
        raise SimctlError(
            f"Model file '{path}' must hold one JSON object, as a Hugging Face config.json does."
        )
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return replace(from_config(config, where=str(path)), name=name.lower(), source=str(path))


def from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The model that a Hugging Face configuration describes; `where` is named in errors."""
    _refuse_other_architectures(config, where)
    kind = config.get("model_type")
    opt = kind == "opt" or "OPTForCausalLM" in (config.get("architectures") or ())
    hidden = _whole(config, "hidden_size", where)
    q_heads = _whole(config, "num_attention_heads", where)
    head_dim = _perhaps(config, "head_dim", where) or hidden // q_heads
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise SimctlError(f"{where}: dtype '{dtype}' is not modelled; use one of {', '.join(DTYPE_BYTES)}.")
    windowed = config.get("use_sliding_window", True) and not opt
    max_context = _whole(config, "max_position_embeddings", where)
    spec = ModelSpec(
        name=str(config.get("_name_or_path") or "model"),
        layers=_whole(config, "num_hidden_layers", where),
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=_perhaps(config, "num_key_value_heads", where) or q_heads,
        head_dim=head_dim,
        **_ffn(config, where, opt),
        vocab=_whole(config, "vocab_size", where),
        max_context=max_context,
        gated=not opt,
        tied_embeddings=bool(config.get("tie_word_embeddings", opt)),
        qkv_bias=bool(config.get("attention_bias", opt or kind in ("qwen2", "qwen2_moe"))),
        linear_bias=opt,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        rope=not opt,
        learned_positions=max_context + 2 if opt else 0,
        window=(_perhaps(config, "sliding_window", where) or None) if windowed else None,
        dtype=dtype,
        source=where,
    )
    spec = _checked(spec, where)
    found = config.get("quantization_config") or {}
    if not isinstance(found, Mapping):
        raise SimctlError(f"{where}: 'quantization_config' must be a mapping, not {found!r}.")
    return _with_quantization(spec, found, where)


def _with_quantization(spec: ModelSpec, found: Mapping[str, Any], where: str) -> ModelSpec:
    """The model quantised as its configuration says; scales of blocks of weights are priced as those of columns."""
    if not found:
        return spec
    method = found.get("quant_method")
    if method not in QUANTIZATIONS:
        raise SimctlError(
            f"{where}: weights quantised by {method or 'an unnamed method'} are not modelled; "
            f"{', '.join(QUANTIZATIONS)} and 16 bits are."
        )
    return quantised(spec, method)


def _ffn(config: Mapping[str, Any], where: str, opt: bool) -> dict[str, Any]:
    """The FFN's keys of a ModelSpec; of a mixture those of one expert."""
    found = [key for key in EXPERT_KEYS if _perhaps(config, key, where) > 1]
    named = next((name for name in config["architectures"] if name in MIXTURES), None)
    if named and all(config.get(key) is None for key in EXPERT_KEYS):
        raise SimctlError(f"{where}: {named} needs its number of experts (one of {', '.join(EXPERT_KEYS)}).")
    if not found:
        return {"ffn": _whole(config, "ffn_dim" if opt else "intermediate_size", where)}
    if (config.get("decoder_sparse_step") or 1) != 1 or config.get("mlp_only_layers"):
        raise SimctlError(
            f"{where}: mixtures that have experts in some layers only are not modelled "
            "(decoder_sparse_step, mlp_only_layers)."
        )
    experts = _whole(config, found[0], where)
    chosen = _whole(config, "num_experts_per_tok", where)
    if chosen > experts:
        raise SimctlError(f"{where}: num_experts_per_tok = {chosen} exceeds the {experts} experts.")
    # Mixtral's experts are as wide as the FFN that they stand for; others name their width
    own = config.get("moe_intermediate_size") or named not in (None, "MixtralForCausalLM")
    wide = "moe_intermediate_size" if own else "intermediate_size"
    return {
        "ffn": _whole(config, wide, where),
        "experts": experts,
        "experts_per_token": chosen,
        "shared_ffn": _perhaps(config, "shared_expert_intermediate_size", where),
    }


def _refuse_other_architectures(config: Mapping[str, Any], where: str) -> None:
    if config.get("kv_lora_rank"):
        raise SimctlError(f"{where}: multi-head latent attention (kv_lora_rank) is not modelled.")
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise SimctlError(f"{where}: 'architectures' must be a list of names, not {named!r}.")
    if not any(name in ARCHITECTURES for name in named):
        raise SimctlError(
            f"{where}: architecture {', '.join(named) or '(none named)'} is not modelled; "
            f"these are: {', '.join(ARCHITECTURES)}."
        )


def _whole(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SimctlError(f"{where}: '{key}' must be a whole number above 0, not {value!r}.")
    return value


def _perhaps(config: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number, 0 where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SimctlError(f"{where}: '{key}' must be a whole number of 0 or more, not {value!r}.")
    return value


def _checked(spec: ModelSpec, where: str = "models.yaml") -> ModelSpec:
    for field in fields(spec):
        value = getattr(spec, field.name)
        whole = isinstance(value, int) and not isinstance(value, bool) and field.name not in MAYBE_NONE
        if whole and value < 1:
            raise SimctlError(f"{where}: '{field.name}' of {spec.name} must be above 0, not {value}.")
    if spec.q_heads % spec.kv_heads:
        raise SimctlError(
            f"{where}: {spec.name} has {spec.q_heads} query heads, no multiple of its {spec.kv_heads} KV heads."
        )
    return spec

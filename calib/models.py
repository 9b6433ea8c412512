"""Shapes of the models whose kernels are measured: dimensions only, weights are random."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import SimctlError
from sim.suggest import nearest

ROLES = ("qkv", "o", "gate_up", "down", "lm_head")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP; bf16 weights and KV cache."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def linear(self, role: str) -> tuple[int, int]:
        """(n, k) of the linear layer `role`: out = x[m, k] @ weight[n, k].T."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
        }[role]

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's four linear layers."""
        return sum(n * k for n, k in map(self.linear, ROLES[:4]))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


# dimensions from the models' published config.json files
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("yi-6b", 32, 4096, 32, 4, 128, 11008, 64000),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256),
        # what one GPU of a tensor-parallel group computes
        ModelShape("llama-3.1-8b-tp2", 32, 4096, 16, 4, 128, 7168, 64128),
        ModelShape("llama-3.1-70b-tp2", 80, 8192, 32, 4, 128, 14336, 64128),
        ModelShape("llama-3.1-70b-tp4", 80, 8192, 16, 2, 128, 7168, 32064),
        ModelShape("llama-3.1-70b-tp8", 80, 8192, 8, 1, 128, 3584, 16032),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        # mixtures: the FFN is that of one expert
        ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936),
        ModelShape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151936),
        ModelShape("qwen3-235b-a22b-tp4", 94, 4096, 16, 1, 128, 384, 37984),
        ModelShape("qwen3-235b-a22b-tp8", 94, 4096, 8, 1, 128, 192, 18992),
    )
}


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer of a mixture: each token goes to `chosen` of `experts` gated MLPs."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    chosen: int


EXPERTS = {
    shape.name: shape
    for shape in (
        ExpertShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        ExpertShape("qwen3-235b-a22b", 4096, 1536, 128, 8),
        ExpertShape("mixtral-8x7b", 4096, 14336, 8, 2),
        # what one GPU of a tensor-parallel group computes: a slice of every expert
        ExpertShape("qwen3-30b-a3b-tp2", 2048, 384, 128, 8),
        ExpertShape("qwen3-235b-a22b-tp4", 4096, 384, 128, 8),
        ExpertShape("qwen3-235b-a22b-tp8", 4096, 192, 128, 8),
        ExpertShape("mixtral-8x7b-tp2", 4096, 7168, 8, 2),
    )
}


def model_shape(name: str) -> ModelShape:
    """The shape called `name`; raises SimctlError naming the nearest one."""
    if name not in MODELS:
        raise SimctlError(f"Model '{name}' has no calibration shapes.{nearest(name, MODELS)}")
    return MODELS[name]

"""What a compiled policy may know of the attention kernels it schedules; `sim.cost.traits` tells more of one launch."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.cta_terms import LARGE, ONE_WARP
from sim.cost.gpu import GpuSpec
from sim.cost.model import ModelSpec


@dataclass(frozen=True)
class AttentionFacts:
    """Heads that one GPU holds, bytes of a number, shared memory of an SM, and `balance`, the FLOP per byte at which
    the GPU's arithmetic and its memory take the same time."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype_bytes: int = 2
    smem_per_sm_bytes: int = 233472
    balance: float = 206.0

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's keys and values, one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query-key pair, one layer."""
        return 4 * self.q_heads * self.head_dim

    @property
    def both_fit(self) -> bool:
        """Do a prefill CTA and one of four decode CTAs share an SM?"""
        beside = 4 * ONE_WARP.smem_bytes(self.head_dim)
        return LARGE.smem_bytes(self.head_dim) + beside <= self.smem_per_sm_bytes


TYPICAL = AttentionFacts()  # Llama-3-8B on an H200


def attention_facts(model: ModelSpec, gpu: GpuSpec) -> AttentionFacts:
    """The facts of a model (the shard that one GPU holds) on a GPU."""
    heads = (model.q_heads, model.kv_heads, model.head_dim, model.dtype_bytes)
    return AttentionFacts(*heads, gpu.smem_per_sm_bytes, gpu.peak_flops / gpu.hbm_bytes_per_s)

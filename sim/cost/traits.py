"""What a launch asks of the GPU, in the terms in which kernels are chosen: CTAs, shared memory, FLOPs, bytes.

Made for schedulers that look at resources rather than token counts. Counts are of the usual kernels: 128 x 128 tiles of
matrix products, FlashAttention's 128 x 64 prefill tile, a decode CTA for each sequence and KV head, without KV splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.cost.base import CostModel
from sim.cost.cta_terms import FLASHINFER_DECODE, LARGE, RESERVED_BYTES
from sim.cost.experts import row_tiles
from sim.cost.operators import causal_pairs, linear_operators, prefill_keys
from sim.cost.shapes import Experts, Launch
from sim.cost.waves import attention_blocks, gemm_blocks, waves
from sim.cost.work import expert_weights, per_row

TILE = 128  # rows of a tile of a matrix product


@dataclass(frozen=True)
class Traits:
    """One launch on one GPU.

    `gemm_ctas`: of the widest matrix product of a layer; `prefill_ctas`, `decode_ctas`: of a layer's attention;
    `smem_bytes`: shared memory of one attention CTA, the larger of both kinds; `flops`, `hbm_bytes`: of all its layers.
    """

    gemm_ctas: int
    prefill_ctas: int
    decode_ctas: int
    smem_bytes: int
    flops: float
    hbm_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte of HBM traffic; 0 for an empty launch."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    def attention_waves(self, sms: int, ctas_per_sm: int = 1) -> int:
        """Waves of a layer's attention on so many SMs."""
        return int(waves(self.prefill_ctas + self.decode_ctas, sms, ctas_per_sm))


class TraitModel:
    """Traits of any launch of one model on one GPU, from constants that are worked out once."""

    def __init__(self, cost: CostModel) -> None:
        self.model, self.gpu = cost.model, cost.gpu
        self._token, self._weights = per_row(self.model, "tokens")
        self._row, self._head_weights = per_row(self.model, "sequences")
        self._products = [op for op in linear_operators(self.model) if op.scope == "layer" and op.n]
        self._query_and_output = 2.0 * self.model.q_width * self.model.dtype_bytes
        self._kv_layer = self.model.kv_bytes_per_token() / self.model.layers

    def ctas_per_sm(self, traits: Traits) -> int:
        """Attention CTAs of a launch that fit the shared memory of one SM."""
        return (
            int(self.gpu.smem_per_sm_bytes // (traits.smem_bytes + RESERVED_BYTES))
            if traits.smem_bytes
            else 0
        )

    def __call__(self, launch: Launch) -> Traits:
        """Traits of a launch; embedding and LM head count in proportion to its layers and at its last layer."""
        m = self.model
        first, last = launch.layers or (0, m.layers)
        share = (last - first) / m.layers
        rows = launch.sequences if last == m.layers else 0
        pairs, keys = float(launch.decode_context_sum), float(launch.decode_context_sum)
        prefill_ctas = 0
        if launch.chunks:
            q, h = (np.array(column, np.int64) for column in zip(*launch.chunks, strict=True))
            pairs += float(causal_pairs(q, h, m.window).sum())
            keys += float(prefill_keys(q, h, m.window).sum())
            prefill_ctas = int(attention_blocks(q, m.q_heads).sum())
        tiles = ([LARGE] if launch.chunks else []) + ([FLASHINFER_DECODE] if launch.decode_batch else [])
        per_layer = pairs * 4.0 * m.q_width
        moved = keys * self._kv_layer + launch.tokens * self._query_and_output
        return Traits(
            gemm_ctas=self._gemm_ctas(launch.tokens),
            prefill_ctas=prefill_ctas,
            decode_ctas=launch.decode_batch * m.kv_heads,
            smem_bytes=max((tile.smem_bytes(m.head_dim) for tile in tiles), default=0),
            flops=share * launch.tokens * self._token.flops
            + rows * self._row.flops
            + (last - first) * per_layer,
            hbm_bytes=(
                share
                * (
                    launch.tokens * self._token.hbm_bytes
                    + self._weights
                    + expert_weights(m, float(launch.tokens))
                )
                + rows * self._row.hbm_bytes
                + (self._head_weights if rows else 0.0)
                + (last - first) * moved
            )
            if launch.tokens
            else 0.0,
        )

    def _gemm_ctas(self, tokens: int) -> int:
        """Tiles of the largest product of a layer; of experts the tiles of each one's rows."""
        found = 0
        for operator in self._products:
            shape = operator.shape(np.array([tokens]))
            if isinstance(shape, Experts):
                found = max(
                    found, int(np.ceil(row_tiles(shape, TILE)[0])) * int(gemm_blocks(TILE, operator.n))
                )
            else:
                found = max(found, int(gemm_blocks(tokens, operator.n)))
        return found

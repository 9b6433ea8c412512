"""Wave quantisation: thread blocks that do not fill the last wave leave SMs idle (arXiv:2504.19516, section 2.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64] | int


def ceil_div(a: Any, b: Any) -> Any:
    """Whole-number ceiling of a / b, for scalars and arrays."""
    return -(-a // b)


def waves(blocks: Ints, sms: Ints, blocks_per_sm: int = 1) -> Any:
    """Waves that `blocks` thread blocks need: ceil(q / (b N))."""
    return ceil_div(blocks, blocks_per_sm * sms)


def tail_sms(blocks: Ints, sms: Ints, blocks_per_sm: int = 1) -> Any:
    """SMs that have work in the last wave: ceil(q / b - N (w - 1))."""
    return ceil_div(blocks, blocks_per_sm) - sms * (waves(blocks, sms, blocks_per_sm) - 1)


def idle_share(blocks: Ints, sms: Ints, blocks_per_sm: int = 1) -> Any:
    """Share of SM time that the last wave leaves idle: (N - tail) / (N w)."""
    count = waves(blocks, sms, blocks_per_sm)
    return (sms - tail_sms(blocks, sms, blocks_per_sm)) / (sms * count)


def gemm_blocks(m: Ints, n: int, tile_m: int = 128, tile_n: int = 128) -> Any:
    """Output tiles of an m x n product."""
    return ceil_div(m, tile_m) * ceil_div(n, tile_n)


def attention_blocks(q_tokens: Ints, q_heads: int, tile_m: int = 128) -> Any:
    """Thread blocks of prefill attention without KV splits: one a row tile and query head."""
    return ceil_div(q_tokens, tile_m) * q_heads

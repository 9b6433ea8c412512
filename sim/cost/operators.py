"""The operators of one forward pass of a dense decoder, and the work that each one's shape implies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.cost.model import ModelSpec
from sim.cost.shapes import (
    DecodeAttention,
    Elementwise,
    Floats,
    Gemm,
    Ints,
    PrefillAttention,
    Shape,
)

# passes over the logits by argmax or softmax-and-draw samplers: read 16 bit, write and read 32 bit, write
SAMPLING_BYTES_PER_LOGIT = 16


@dataclass(frozen=True)
class Operator:
    """A linear or element-wise operator. `scope`: every `layer`, once with the `first` or with the `last` one.

    `rows`: does its size follow the `tokens` of the pass or its `sequences` (LM head, sampling)?
    A GEMM has output width `n` and inner width `k`; an element-wise operator has `bytes_per_row`.
    """

    name: str
    scope: str = "layer"
    rows: str = "tokens"
    n: int = 0
    k: int = 0
    bytes_per_row: int = 0
    dtype_bytes: int = 2

    def shape(self, rows: Ints) -> Gemm | Elementwise:
        """This operator's shape for an array of row counts."""
        if self.n:
            return Gemm(rows, self.n, self.k, self.dtype_bytes)
        return Elementwise(rows, self.bytes_per_row)


def linear_operators(model: ModelSpec) -> tuple[Operator, ...]:
    """Everything but attention, in launch order within each scope; kernels fused as current engines fuse them."""
    m, s = model, model.dtype_bytes
    kv_width = 2 * m.kv_heads * m.head_dim
    norm = 4 * m.hidden * s  # reads the sub-layer's output and the residual, writes the sum and its norm
    gemm = [
        Operator("gemm/qkv", n=m.qkv_width, k=m.hidden, dtype_bytes=s),
        Operator("gemm/o", n=m.hidden, k=m.q_width, dtype_bytes=s),
        Operator("gemm/gate_up", n=m.ffn_in_width, k=m.hidden, dtype_bytes=s),
        Operator("gemm/down", n=m.hidden, k=m.ffn, dtype_bytes=s),
    ]
    per_layer = [
        Operator("norm/input", bytes_per_row=norm),
        gemm[0],
        *([Operator("norm/qk", bytes_per_row=2 * (m.q_width + kv_width // 2) * s)] if m.qk_norm else []),
        *([Operator("rope", bytes_per_row=2 * (m.q_width + kv_width // 2) * s)] if m.rope else []),
        Operator("kv_write", bytes_per_row=2 * kv_width * s),
        gemm[1],
        Operator("norm/post_attention", bytes_per_row=norm),
        gemm[2],
        Operator("activation", bytes_per_row=(m.ffn_in_width + m.ffn) * s),
        gemm[3],
    ]
    tables = 2 if m.learned_positions else 1
    return (
        Operator("embedding", scope="first", bytes_per_row=(tables + 1) * m.hidden * s),
        *per_layer,
        Operator("norm/final", scope="last", bytes_per_row=norm),
        Operator("lm_head", scope="last", rows="sequences", n=m.vocab, k=m.hidden, dtype_bytes=s),
        Operator(
            "sampling", scope="last", rows="sequences", bytes_per_row=SAMPLING_BYTES_PER_LOGIT * m.vocab
        ),
    )


def prefill_shape(model: ModelSpec, q: Ints, h: Ints) -> PrefillAttention:
    """One layer's prefill attention of chunks of q new tokens on h earlier ones."""
    m = model
    return PrefillAttention(q, h, m.q_heads, m.kv_heads, m.head_dim, m.dtype_bytes, m.window)


def decode_shape(
    model: ModelSpec, batch: Ints, context_sum: Floats, context_max: Floats | None = None
) -> DecodeAttention:
    """One layer's decode attention of batches whose contexts add up to `context_sum` (None: all alike)."""
    m = model
    return DecodeAttention(
        batch, context_sum, m.q_heads, m.kv_heads, m.head_dim, m.dtype_bytes, m.window, context_max
    )


# sequences whose CTAs together draw the whole bandwidth: 8 KV heads x 12 x 44 GB/s a CTA on an H200 (measured)
TOGETHER = 12


def effective_longest(contexts: Sequence[int], together: int = TOGETHER) -> float:
    """The longest context that a batch behaves as if it had, all others being at their mean.

    While many sequences are left the bandwidth limits all of them; once fewer than `together` are, each goes on at a
    CTA's own pace. So the j-th longest counts by 1 - j / together of what it has over the next.
    """
    ordered = np.sort(np.asarray(contexts, dtype=np.float64))[::-1]
    mean = float(ordered.mean())
    ordered = np.append(np.maximum(ordered, mean), mean)
    share = np.maximum(0.0, 1.0 - np.arange(1, len(ordered)) / together)
    return mean + float((ordered[:-1] - ordered[1:]) @ share)


def causal_pairs(q: Ints, h: Ints, window: int | None = None) -> Floats:
    """Query-key pairs of q new tokens after h earlier ones: sum of min(h + i, window) for i = 1..q.

    Exact, so that the pairs of a prompt's chunks add up to those of the whole prompt.
    """
    q, h = np.asarray(q, dtype=np.int64), np.asarray(h, dtype=np.int64)
    if window is None:
        return (q * h + q * (q + 1) // 2).astype(np.float64)
    full = np.clip(window - h, 0, q)  # queries that still see everything before them
    pairs = full * h + full * (full + 1) // 2 + (q - full) * window
    return np.asarray(pairs, dtype=np.float64)


def prefill_keys(q: Ints, h: Ints, window: int | None = None) -> Ints:
    """Distinct keys that a chunk reads: history and itself, less what lies before the window of its first query."""
    q, h = np.asarray(q, dtype=np.int64), np.asarray(h, dtype=np.int64)
    return q + h if window is None else q + np.minimum(h, window - 1)


def decode_keys(shape: DecodeAttention) -> Floats:
    """Keys that a decode batch reads; a window cuts at the mean context, since only the sum is known."""
    context = np.asarray(shape.context_sum, dtype=np.float64)
    if shape.window is None:
        return context
    seen: Floats = np.minimum(context, np.asarray(shape.batch, dtype=np.float64) * shape.window)
    return seen


def flops(shape: Shape) -> Floats:
    """Floating-point operations of one call (a multiply-add is two); element-wise operators count as none."""
    if isinstance(shape, Gemm):
        return 2.0 * np.asarray(shape.m, dtype=np.float64) * shape.n * shape.k
    if isinstance(shape, PrefillAttention):
        return 4.0 * shape.q_heads * shape.head_dim * causal_pairs(shape.q, shape.h, shape.window)
    if isinstance(shape, DecodeAttention):
        return 4.0 * shape.q_heads * shape.head_dim * decode_keys(shape)
    return 0.0 * np.asarray(shape.rows, dtype=np.float64)


def kv_bytes(shape: PrefillAttention | DecodeAttention, keys: Floats | Ints) -> Floats:
    """Bytes of keys and values read for one layer: once per KV head, however many query heads share it."""
    return 2.0 * shape.kv_heads * shape.head_dim * shape.dtype_bytes * np.asarray(keys, dtype=np.float64)


def hbm_bytes(shape: Shape) -> Floats:
    """Bytes that one call moves at least: weights, activations in and out, keys and values once."""
    if isinstance(shape, Gemm):
        m = np.asarray(shape.m, dtype=np.float64)
        return shape.dtype_bytes * (m * shape.k + m * shape.n + float(shape.n) * shape.k)
    if isinstance(shape, Elementwise):
        return np.asarray(shape.rows, dtype=np.float64) * shape.bytes_per_row
    rows = shape.q if isinstance(shape, PrefillAttention) else shape.batch
    query_and_output = 2.0 * shape.q_heads * shape.head_dim * shape.dtype_bytes * np.asarray(rows)
    if isinstance(shape, PrefillAttention):
        return query_and_output + kv_bytes(shape, prefill_keys(shape.q, shape.h, shape.window))
    return query_and_output + kv_bytes(shape, decode_keys(shape))


def layer_span(model: ModelSpec, layers: tuple[int, int] | None) -> tuple[int, bool, bool]:
    """(number of layers, is the first among them, is the last) of a launch's layer range."""
    first, last = layers if layers is not None else (0, model.layers)
    if not 0 <= first < last <= model.layers:
        raise ValueError(f"layers {first}..{last} are not within 0..{model.layers}")
    return last - first, first == 0, last == model.layers


def calls(operator: Operator, model: ModelSpec, layers: tuple[int, int] | None) -> int:
    """How often a launch over that layer range calls the operator."""
    count, has_first, has_last = layer_span(model, layers)
    if operator.scope == "layer":
        return count
    return int(has_first if operator.scope == "first" else has_last)

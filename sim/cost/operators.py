"""The operators of one forward pass of a decoder, and the work that each one's shape implies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.cost.experts import touched
from sim.cost.model import ModelSpec
from sim.cost.shapes import (
    DecodeAttention,
    Elementwise,
    Experts,
    Floats,
    Gemm,
    Ints,
    PrefillAttention,
    Shape,
)

# passes over the logits by argmax or softmax-and-draw samplers: read 16 bit, write and read 32 bit, write
SAMPLING_BYTES_PER_LOGIT = 16
PICK_BYTES = 12  # of one expert that a token picks: its number, its weight and the row's place


@dataclass(frozen=True)
class Operator:
    """A linear or element-wise operator. `scope`: every `layer`, once with the `first` or with the `last` one.

    `rows`: does its size follow the `tokens` of the pass or its `sequences` (LM head, sampling)?
    A GEMM has output width `n` and inner width `k`, that of `experts` a row of its own for each of `chosen` ones (odds
    of rank ** -`skew`); an element-wise operator has `bytes_per_row`, and `times` rows for each.
    """

    name: str
    scope: str = "layer"
    rows: str = "tokens"
    n: int = 0
    k: int = 0
    bytes_per_row: int = 0
    dtype_bytes: int = 2
    times: int = 1
    experts: int = 0
    chosen: int = 0
    skew: float = 0.0

    def shape(self, rows: Ints) -> Gemm | Experts | Elementwise:
        """This operator's shape for an array of row counts."""
        if self.experts:
            return Experts(rows, self.n, self.k, self.dtype_bytes, self.experts, self.chosen, self.skew)
        if self.n:
            return Gemm(rows, self.n, self.k, self.dtype_bytes)
        return Elementwise(self.times * rows, self.bytes_per_row)


def linear_operators(model: ModelSpec) -> tuple[Operator, ...]:
    """Everything but attention, in launch order within each scope; kernels fused as current engines fuse them."""
    m, s = model, model.dtype_bytes
    kv_width = 2 * m.kv_heads * m.head_dim
    norm = 4 * m.hidden * s  # reads the sub-layer's output and the residual, writes the sum and its norm
    per_layer = [
        Operator("norm/input", bytes_per_row=norm),
        *_projection(m, "qkv", m.qkv_width, m.hidden),
        *([Operator("norm/qk", bytes_per_row=2 * (m.q_width + kv_width // 2) * s)] if m.qk_norm else []),
        *([Operator("rope", bytes_per_row=2 * (m.q_width + kv_width // 2) * s)] if m.rope else []),
        Operator("kv_write", bytes_per_row=2 * kv_width * s),
        *_projection(m, "o", m.hidden, m.q_width),
        Operator("norm/post_attention", bytes_per_row=norm),
        *(_expert_ffn(m) if m.experts else _dense_ffn(m)),
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


def _projection(m: ModelSpec, role: str, n: int, k: int) -> list[Operator]:
    """A linear layer, behind the cast of its input where it is quantised."""
    cast = [Operator(f"quantise/{role}", bytes_per_row=_cast_bytes(m, k))] if m.quantization else []
    return [*cast, Operator(f"gemm/{role}", n=n, k=k, dtype_bytes=m.linear_bytes)]


def _cast_bytes(m: ModelSpec, k: int) -> int:
    """Bytes a row that a cast reads and writes."""
    return k * (m.dtype_bytes + m.linear_bytes)


def _dense_ffn(m: ModelSpec) -> list[Operator]:
    return [
        *_projection(m, "gate_up", m.ffn_in_width, m.hidden),
        Operator("activation", bytes_per_row=(m.ffn_in_width + m.ffn) * m.dtype_bytes),
        *_projection(m, "down", m.hidden, m.ffn),
    ]


def _expert_ffn(m: ModelSpec) -> list[Operator]:
    """Router, rows to their experts, the experts' products, and the weighted sum back; a shared expert beside them."""
    s, chosen, hidden = m.dtype_bytes, m.experts_per_token, m.hidden
    size, skew = m.linear_bytes, m.routing_skew
    casts = []
    if m.quantization:
        casts = [
            Operator("quantise/experts_gate_up", bytes_per_row=_cast_bytes(m, hidden)),
            Operator("quantise/experts_down", bytes_per_row=_cast_bytes(m, m.ffn), times=chosen),
        ]
    shared = []
    if m.shared_ffn:
        shared = [
            *_projection(m, "shared_gate_up", 2 * m.shared_ffn, hidden),
            Operator("activation/shared", bytes_per_row=3 * m.shared_ffn * s),
            *_projection(m, "shared_down", hidden, m.shared_ffn),
        ]
    return [
        Operator("gemm/router", n=m.experts, k=hidden, dtype_bytes=s),
        Operator("routing/topk", bytes_per_row=m.experts * s + PICK_BYTES * chosen),
        *shared,
        *casts[:1],
        Operator("routing/permute", bytes_per_row=2 * chosen * hidden * s),
        Operator(
            "moe/gate_up", "layer", "tokens", m.ffn_in_width, hidden, 0, size, 1, m.experts, chosen, skew
        ),
        Operator("activation", bytes_per_row=(m.ffn_in_width + m.ffn) * s, times=chosen),
        *casts[1:],
        Operator("moe/down", "layer", "tokens", hidden, m.ffn, 0, size, 1, m.experts, chosen, skew),
        Operator("routing/unpermute", bytes_per_row=(chosen + 1) * hidden * s),
    ]


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
    """Floating-point operations of one call (a multiply-add is two); element-wise operators count as none.

    In units of 16-bit ones: two of e4m3 count as one, since tensor cores do them in its time and for about its energy.
    """
    if isinstance(shape, Gemm | Experts):
        return (1.0 if shape.dtype_bytes == 1 else 2.0) * gemm_rows(shape) * shape.n * shape.k
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
    if isinstance(shape, Gemm | Experts):
        m, s = gemm_rows(shape), shape.dtype_bytes
        weights = expert_bytes(shape) if isinstance(shape, Experts) else 1.0 * s * shape.n * shape.k
        return s * m * shape.k + max(s, 2) * m * shape.n + weights
    if isinstance(shape, Elementwise):
        return np.asarray(shape.rows, dtype=np.float64) * shape.bytes_per_row
    rows = shape.q if isinstance(shape, PrefillAttention) else shape.batch
    query_and_output = 2.0 * shape.q_heads * shape.head_dim * shape.dtype_bytes * np.asarray(rows)
    if isinstance(shape, PrefillAttention):
        return query_and_output + kv_bytes(shape, prefill_keys(shape.q, shape.h, shape.window))
    return query_and_output + kv_bytes(shape, decode_keys(shape))


def gemm_rows(shape: Gemm | Experts) -> Floats:
    """Rows of a product: one a token, or one for each expert that a token takes."""
    m = np.asarray(shape.m, dtype=np.float64)
    return m * shape.chosen if isinstance(shape, Experts) else m


def expert_bytes(shape: Experts) -> Floats:
    """Bytes of the weights of the experts that are touched."""
    return shape.dtype_bytes * touched(shape) * shape.n * shape.k


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

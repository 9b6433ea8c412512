"""Prices of a step's parts: look-ups, multiplications and additions in one fixed order, and nothing else.

Each function reads the tables of `sim.cost.prices.Prices`; the same source runs under numba and CPython.
`part` is the partition's index (0: the whole GPU). `_sm` twins answer SM-seconds with a resident warp.
"""

from __future__ import annotations

from typing import Any

from sim.cost.prices import Prices
from sim.jit import jit


@jit
def dense_s(P: Prices, part: int, m: int, graph: bool) -> float:
    """Seconds of everything but attention, LM head and sampling, for m tokens."""
    at = part * (P.max_tokens + 1) + m
    if graph:
        return P.dense_graph_s[at]  # type: ignore[no-any-return]
    return P.dense_eager_s[at]  # type: ignore[no-any-return]


@jit
def dense_sm(P: Prices, part: int, m: int, graph: bool) -> float:
    """SM-seconds of `dense_s`."""
    at = part * (P.max_tokens + 1) + m
    if graph:
        return P.dense_graph_sm[at]  # type: ignore[no-any-return]
    return P.dense_eager_sm[at]  # type: ignore[no-any-return]


@jit
def head_s(P: Prices, part: int, n: int) -> float:
    """Seconds of LM head and sampling for n sequences."""
    return P.head_s[part * (P.max_seqs + 1) + n]  # type: ignore[no-any-return]


@jit
def head_sm(P: Prices, part: int, n: int) -> float:
    """SM-seconds of `head_s`."""
    return P.head_sm[part * (P.max_seqs + 1) + n]  # type: ignore[no-any-return]


@jit
def decode_index(P: Prices, part: int, b: int, c: int) -> int:
    """Where the line of a batch of b > 0 sequences with c context tokens in all stands in the tables."""
    mean = (c // b) >> P.dec_shift
    last = len(P.dec_seg) - 1
    if mean > last:
        mean = last
    return (part * (P.max_seqs + 1) + b) * P.segments + P.dec_seg[mean]  # type: ignore[no-any-return]


@jit
def decode_attention_s(P: Prices, part: int, b: int, c: int) -> float:
    """Seconds of decode attention, all layers; nothing for an empty batch."""
    if b == 0:
        return 0.0
    at = decode_index(P, part, b, c)
    return P.dec_a[at] + P.dec_b[at] * c  # type: ignore[no-any-return]


@jit
def decode_attention_sm(P: Prices, part: int, b: int, c: int) -> float:
    """SM-seconds of `decode_attention_s`."""
    if b == 0:
        return 0.0
    at = decode_index(P, part, b, c)
    return P.dec_sm_a[at] + P.dec_sm_b[at] * c  # type: ignore[no-any-return]


@jit
def overhang_s(P: Prices, part: int, b: int, overhang: int) -> float:
    """Seconds that b decodes wait for a longest context `overhang` tokens beyond their mean, all layers."""
    return P.over_s[part * (P.max_seqs + 1) + b] * overhang  # type: ignore[no-any-return]


@jit
def overhang_sm(P: Prices, part: int, b: int, overhang: int) -> float:
    """SM-seconds of `overhang_s`."""
    return P.over_sm[part * (P.max_seqs + 1) + b] * overhang  # type: ignore[no-any-return]


@jit
def _between_knots(P: Prices, table: Any, part: int, q: int, h: int) -> float:
    """Bilinear in a prefill table at a chunk of q > 0 tokens on h earlier ones."""
    slot = h >> P.pre_shift
    last = len(P.pre_hi) - 1
    if slot > last:
        slot = last
    i = P.pre_qi[q]
    j = P.pre_hi[slot]
    u = (q - P.pre_q[i]) * P.pre_dq[i]
    v = (h - P.pre_h[j]) * P.pre_dh[j]
    at = (part * P.q_knots + i) * P.h_knots + j
    below = table[at] + (table[at + 1] - table[at]) * v
    at += P.h_knots
    above = table[at] + (table[at + 1] - table[at]) * v
    return below + (above - below) * u  # type: ignore[no-any-return]


@jit
def prefill_attention_s(P: Prices, part: int, q: int, h: int) -> float:
    """Seconds of prefill attention of one chunk of q > 0 tokens on h earlier ones, all layers."""
    seconds: float = _between_knots(P, P.pre_s, part, q, h)
    return seconds


@jit
def prefill_attention_sm(P: Prices, part: int, q: int, h: int) -> float:
    """SM-seconds of `prefill_attention_s`."""
    sm_seconds: float = _between_knots(P, P.pre_sm, part, q, h)
    return sm_seconds


@jit
def fallback_code(P: Prices, chunks: int) -> int:
    """Why a step of so many chunks beside decodes takes separate kernels (`sim.cost.fallbacks`); 0 if it does not."""
    if P.mix_reason > 0:
        return P.mix_reason
    return 1 if chunks > P.mix_chunks else 0


@jit
def _between(P: Prices, at: int, width: int, v: float, w: float) -> float:
    """Bilinear in batch and context, from a corner of the table of ratios whose batches lie `width` apart."""
    T = P.mix_ratio
    low = T[at] + (T[at + 1] - T[at]) * w
    at += width
    high = T[at] + (T[at + 1] - T[at]) * w
    return low + (high - low) * v  # type: ignore[no-any-return]


@jit
def fused_ratio(P: Prices, q: int, keys: int, b: int, c: int) -> float:
    """Attention seconds of q chunk tokens with `keys` keys on average beside b decodes of mean context c, over those of
    separate kernels; beyond the knots as at the last one."""
    widths = len(P.mix_c_knot)
    depth = widths * len(P.mix_b_knot)
    i = P.mix_q_at[min((q + 127) >> 7, len(P.mix_q_at) - 1)]
    j = P.mix_k_at[min(keys >> 6, len(P.mix_k_at) - 1)]
    k = P.mix_b_at[min(b, len(P.mix_b_at) - 1)]
    m = P.mix_c_at[min(c >> 6, len(P.mix_c_at) - 1)]
    u = min(max((keys - P.mix_k_knot[j]) * P.mix_k_inv[j], 0.0), 1.0)
    v = min(max((b - P.mix_b_knot[k]) * P.mix_b_inv[k], 0.0), 1.0)
    w = min(max((c - P.mix_c_knot[m]) * P.mix_c_inv[m], 0.0), 1.0)
    at = (i * len(P.mix_k_knot) + j) * depth + k * widths + m
    low: float = _between(P, at, widths, v, w)
    high: float = _between(P, at + depth, widths, v, w)
    ratio: float = low + (high - low) * u
    return ratio


@jit
def fused_saving_s(P: Prices, chunks: int, q: int, pairs: int, b: int, c: int, apart_s: float) -> float:
    """Seconds by which a step's attention is shorter than the `apart_s` of separate kernels, all layers.

    `pairs`: query-key pairs of the chunks, `c`: context of the b decodes in all. Nothing for a step without both,
    and for shapes that fall back."""
    if P.mix_on == 0 or b == 0 or chunks == 0 or fallback_code(P, chunks) > 0:
        return 0.0
    ratio: float = fused_ratio(P, q, pairs // q, b, c // b)
    return float((1.0 - ratio) * apart_s)


@jit
def chunked_pass_s(
    P: Prices,
    part: int,
    chunks: int,
    tokens: int,
    pairs: int,
    prefill_s: float,
    b: int,
    c: int,
    overhang: int,
) -> float:
    """GPU seconds of a step of `tokens` tokens in `chunks` chunks with b decodes of c context tokens in all.

    `prefill_s`: attention of the chunks as kernels apart, each with its fixed time; `pairs`: their query-key pairs;
    `overhang`: tokens by which the longest of the b contexts exceeds their mean."""
    seconds: float = dense_s(P, part, tokens + b, False) + head_s(P, part, chunks + b)
    seconds += prefill_s - (chunks - 1) * P.pre_fixed_s[part]
    if b > 0:
        decode_s = decode_attention_s(P, part, b, c) + overhang_s(P, part, b, overhang)
        seconds += decode_s
        seconds -= fused_saving_s(P, chunks, tokens, pairs, b, c, prefill_s + decode_s)
    return seconds


@jit
def decode_pass_s(P: Prices, part: int, b: int, c: int) -> float:
    """GPU seconds of a step of b decodes with c context tokens in all, launched as a graph, without an overhang."""
    seconds: float = dense_s(P, part, b, True)
    return seconds + head_s(P, part, b) + decode_attention_s(P, part, b, c)


@jit
def decode_pass_sm(P: Prices, part: int, b: int, c: int) -> float:
    """SM-seconds of `decode_pass_s`."""
    sm_s: float = dense_sm(P, part, b, True)
    return sm_s + head_sm(P, part, b) + decode_attention_sm(P, part, b, c)


@jit
def step_s(P: Prices, gpu_s: float, host_s: float, gap_s: float, number: int) -> float:
    """Seconds of a whole step: the longer of GPU and host, what cannot be hidden, jitter of this step's number."""
    longer = gpu_s if gpu_s >= host_s else host_s
    return (longer + gap_s) * P.noise[number % len(P.noise)]  # type: ignore[no-any-return]

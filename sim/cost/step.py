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
def decode_pass_s(P: Prices, part: int, b: int, c: int) -> float:
    """GPU seconds of a step of b decodes with c context tokens in all, launched as a graph."""
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

"""Slowdown tables for two launches side by side: a prefill pass and a decode step on given SM sets.

The surface itself belongs to the cost model (`CostModel.slowdown`); here it is sampled once on a grid for the
splits that a policy can use, so that the engine's loop only looks up. Bilinear in the prefill's tokens and the
decode batch, nearest in the prefill's history and the decode's mean context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sim.columns import Columns, columns
from sim.cost.base import CostModel
from sim.cost.keyed import Keyed
from sim.cost.shapes import Launch
from sim.jit import jit

Q_KNOTS = np.array([16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768])
H_KNOTS = np.array([0, 1024, 4096, 16384, 65536])
B_KNOTS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
C_KNOTS = np.array([128, 512, 1024, 2048, 4096, 8192, 16384, 65536])
Q_SHIFT, H_SHIFT, C_SHIFT = 4, 8, 6
QS, HS, BS, CS = len(Q_KNOTS), len(H_KNOTS), len(B_KNOTS), len(C_KNOTS)


@columns
class Pairs(Columns):
    """Tables over C configurations x prefill tokens x history x batch x context, flat.

    `sms[i]`: SMs of price partition i (0: the whole GPU). `config[i * len(sms) + j]`: configuration of prefill on
    partition i beside decode on partition j, -1 if the policy did not ask for it.
    """

    sms: Any
    config: Any
    q_at: Any
    q_knot: Any
    q_inv: Any
    h_at: Any
    b_at: Any
    b_knot: Any
    b_inv: Any
    c_at: Any
    factor_prefill: Any
    factor_decode: Any


@jit
def pair_factor(x: Any, table: Any, config: int, q: int, h: int, b: int, c: int) -> float:
    """Slowdown from `table` for q prefill tokens on mean history h beside b decodes of mean context c."""
    qs = min(q >> Q_SHIFT, len(x.q_at) - 1)
    i = x.q_at[qs]
    j = x.h_at[min(h >> H_SHIFT, len(x.h_at) - 1)]
    k = x.b_at[min(b, len(x.b_at) - 1)]
    m = x.c_at[min(c >> C_SHIFT, len(x.c_at) - 1)]
    u = min(max((q - x.q_knot[i]) * x.q_inv[i], 0.0), 1.0)
    v = min(max((b - x.b_knot[k]) * x.b_inv[k], 0.0), 1.0)
    at = (((config * QS + i) * HS + j) * BS + k) * CS + m
    low = table[at] + (table[at + CS] - table[at]) * v
    at += HS * BS * CS
    high = table[at] + (table[at + CS] - table[at]) * v
    factor: float = low + (high - low) * u
    return factor


@jit
def worst_factor(x: Any, table: Any, config: int, q: int, h: int, b: int, c: int) -> float:
    """The largest slowdown at the corners of the grid's cell that `pair_factor` interpolates in."""
    i = x.q_at[min(q >> Q_SHIFT, len(x.q_at) - 1)]
    j = x.h_at[min(h >> H_SHIFT, len(x.h_at) - 1)]
    k = x.b_at[min(b, len(x.b_at) - 1)]
    m = x.c_at[min(c >> C_SHIFT, len(x.c_at) - 1)]
    at = (((config * QS + i) * HS + j) * BS + k) * CS + m
    next_q = at + HS * BS * CS
    low, high = max(table[at], table[at + CS]), max(table[next_q], table[next_q + CS])
    return float(max(low, high))


def _lower(knots: Any, positions: Any) -> Any:
    return np.clip(np.searchsorted(knots, positions, side="right") - 1, 0, len(knots) - 2)


def _nearest(knots: Any, positions: Any) -> Any:
    middles = np.sqrt(np.maximum(knots[:-1], 64) * knots[1:].astype(float))
    return np.searchsorted(middles, positions, side="right")


@lru_cache(maxsize=512)  # a policy that moves both sets freely asks for every pair of them
def _surface(key: tuple[str, int, int, int, str], cost: Keyed[CostModel]) -> tuple[Any, Any]:
    _, prefill_sms, decode_sms, overlap, priority = key
    model = cost.value
    prefills = [Launch(chunks=((int(q), int(h)),)) for q in Q_KNOTS for h in H_KNOTS]
    decodes = [
        Launch(decode_batch=int(b), decode_context_sum=int(b * c), decode_context_max=int(c), graph=True)
        for b in B_KNOTS
        for c in C_KNOTS
    ]
    split = (prefill_sms, decode_sms)
    if priority == "normal":
        return model.slowdowns(prefills, decodes, split, overlap)
    return model.slowdowns(prefills, decodes, split, overlap, priority=priority)


def compile_pairs(
    cost: CostModel,
    partitions: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    *,
    contention: bool = True,
    priority: str = "normal",
) -> Pairs:
    """Tables for `pairs` of (prefill SMs, decode SMs); both must stand in (whole GPU, *partitions).

    Prefill takes SMs from the bottom, decode from the top: they overlap where the sum exceeds the GPU.
    Without `contention` all factors of disjoint sets are 1 (a belief that some policies hold). `priority` of decode's
    stream, normal or high, matters where SMs are shared.
    """
    total = cost.gpu.sms
    sizes = [total, *partitions]
    config = np.full(len(sizes) * len(sizes), -1)
    prefill, decode = [], []
    held = Keyed(cost, cost.profile_hash)
    for number, (p, d) in enumerate(pairs):
        config[sizes.index(p) * len(sizes) + sizes.index(d)] = number
        overlap = max(0, p + d - total)
        if contention or overlap:
            a, b = _surface((cost.profile_hash, p, d, overlap, priority), held)
        else:
            a = b = np.ones((len(Q_KNOTS) * len(H_KNOTS), len(B_KNOTS) * len(C_KNOTS)))
        prefill.append(np.ravel(a))
        decode.append(np.ravel(b))
    return Pairs(
        sms=np.array(sizes),
        config=config,
        q_at=_lower(Q_KNOTS, np.arange(0, Q_KNOTS[-1] + 1, 1 << Q_SHIFT)),
        q_knot=Q_KNOTS.astype(float),
        q_inv=1.0 / np.diff(Q_KNOTS),
        h_at=_nearest(H_KNOTS, np.arange(0, H_KNOTS[-1] + 1, 1 << H_SHIFT)),
        b_at=_lower(B_KNOTS, np.arange(0, B_KNOTS[-1] + 1)),
        b_knot=B_KNOTS.astype(float),
        b_inv=1.0 / np.diff(B_KNOTS),
        c_at=_nearest(C_KNOTS, np.arange(0, C_KNOTS[-1] + 1, 1 << C_SHIFT)),
        factor_prefill=np.concatenate(prefill) if prefill else np.ones(1),
        factor_decode=np.concatenate(decode) if decode else np.ones(1),
    )

"""A cost model's price tables: everything that is slow about a price happens here, once.

Linear layers are stairs over `grid_tokens`, decode attention is piecewise linear in the context sum with a line
per batch size and context segment, prefill attention is bilinear with knots on both sides of tile edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cost.attention import SERIAL, AttentionMode
from sim.cost.fused import fused_tables
from sim.cost.keyed import Keyed
from sim.cost.launching import grid_tokens
from sim.cost.measured import splits_up_to
from sim.cost.operators import decode_shape, prefill_shape
from sim.cost.prices import UNBOUNDED, Prices
from sim.cost.shapes import Floats, Ints, Shape
from sim.cost.spec import ROW_TILE
from sim.cost.warming import warming_tables
from sim.errors import SimctlError

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost

DEC_SHIFT = 6  # decode segments meet at multiples of 64 tokens of mean context
PRE_SHIFT = 7  # history knots stand at multiples of 128 tokens
EDGES = 256  # row-tile edges that get a knot on both sides; beyond, a tile is under 0.4 % of the chunk
NOISE_LENGTH = 4096
MOST_SPLITS = 12  # with more pieces than that to spare a batch is as good as even


@dataclass(frozen=True)
class Limits:
    """The largest step that the tables must answer, and the SM partitions beside the whole GPU."""

    max_tokens: int
    max_seqs: int
    max_context: int
    partitions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_seqs", "max_context"):
            if getattr(self, name) < 1:
                raise SimctlError(f"{name} must be above 0, but is {getattr(self, name)}.")


def compile_prices(
    cost: ProfiledCost,
    limits: Limits,
    *,
    seed: int,
    replica: int,
    jitter: bool,
    compiled: bool,
    attention: AttentionMode = SERIAL,
    page_size: int = 16,
) -> Prices:
    """Tables as numpy arrays (`compiled`) or as plain lists with the same numbers.

    `attention`: how that of mixed steps runs; `page_size`: tokens of a KV block, which fused kernels may refuse.
    """
    tables = _shared(Keyed(cost, cost.profile_hash), limits, attention, page_size, compiled)
    drawn = noise(seed, replica, cost.profile.jitter_sd) if jitter else np.ones(1)
    return tables._replace(noise=drawn if compiled else drawn.tolist())


def noise(seed: int, replica: int, sigma: float) -> Floats:
    """Log-normal factors of mean 1 and log sd `sigma` for one replica, the same for the same seed."""
    drawn = np.random.default_rng([seed, replica]).normal(-0.5 * sigma**2, sigma, NOISE_LENGTH)
    return np.exp(drawn)


@lru_cache(maxsize=8)
def _shared(
    key: Keyed[ProfiledCost], limits: Limits, attention: AttentionMode, page_size: int, compiled: bool
) -> Prices:
    """All but the noise: replicas read the same memory, which then stays in the caches."""
    prices = _tables(key, limits)._replace(**_mixed(key, limits, attention, page_size))
    return prices if compiled else prices.as_lists()


@lru_cache(maxsize=8)
def _mixed(
    key: Keyed[ProfiledCost], limits: Limits, attention: AttentionMode, page_size: int
) -> dict[str, Any]:
    return fused_tables(
        key.value, attention, limits.max_tokens, limits.max_seqs, limits.max_context, page_size
    )


@lru_cache(maxsize=8)
def _tables(key: Keyed[ProfiledCost], limits: Limits) -> Prices:
    cost = key.value
    sms = (cost.gpu.sms, *limits.partitions)
    for count in limits.partitions:
        if not 0 < count <= cost.gpu.sms:
            raise SimctlError(
                f"A partition of {count} SMs is impossible: {cost.gpu.name} has {cost.gpu.sms}."
            )
    dec_knots = decode_knots(limits.max_context)
    pre_q = chunk_knots(limits.max_tokens, max(1, ROW_TILE // cost.model.group))
    pre_h = history_knots(limits.max_context)
    sequences = np.arange(limits.max_seqs + 1)
    linear = [_linear_tables(cost, limits, count) for count in sms]
    decode = [_decode_tables(cost, limits.max_seqs, dec_knots, count) for count in sms]
    prefill = [_prefill_tables(cost, pre_q, pre_h, count) for count in sms]
    layers, launching = cost.model.layers, cost.launching
    return Prices(
        partitions=len(sms),
        max_tokens=limits.max_tokens,
        max_seqs=limits.max_seqs,
        segments=len(dec_knots) - 1,
        q_knots=len(pre_q),
        h_knots=len(pre_h),
        dec_shift=DEC_SHIFT,
        pre_shift=PRE_SHIFT,
        dense_graph_s=_flat(linear, 0),
        dense_eager_s=_flat(linear, 1),
        dense_graph_sm=_flat(linear, 2),
        dense_eager_sm=_flat(linear, 3),
        head_s=_flat(linear, 4),
        head_sm=_flat(linear, 5),
        dec_seg=interval(dec_knots, np.arange(0, dec_knots[-1], 1 << DEC_SHIFT)),
        dec_a=_flat(decode, 0),
        dec_b=_flat(decode, 1),
        dec_sm_a=_flat(decode, 2),
        dec_sm_b=_flat(decode, 3),
        **_ragged_tables(cost, limits, sms),
        pre_qi=interval(pre_q, np.arange(limits.max_tokens + 1)),
        pre_hi=interval(pre_h, np.arange(0, pre_h[-1], 1 << PRE_SHIFT)),
        pre_q=pre_q.astype(np.float64),
        pre_h=pre_h.astype(np.float64),
        pre_dq=1.0 / np.diff(pre_q),
        pre_dh=1.0 / np.diff(pre_h),
        pre_s=_flat(prefill, 0),
        pre_sm=_flat(prefill, 1),
        pre_fixed_s=np.full(len(sms), layers * cost.prefill_fixed_s()),
        host_graph_s=launching.host_s(sequences, True, layers),
        host_eager_s=launching.host_s(sequences, False, layers),
        gap_graph_s=launching.gap_s(sequences, True),
        gap_eager_s=launching.gap_s(sequences, False),
        gap_group_s=float(launching.terms.gap_group_s),
        noise=np.ones(1),
        **_mixed(key, limits, SERIAL, 16),
        **coverage(cost, limits),
        **warming_tables(cost, limits.max_tokens, limits.max_seqs),
    )


def coverage(cost: ProfiledCost, limits: Limits) -> dict[str, int]:
    """`cover_*` of the tables: the largest size along each axis that every curve concerned covers on all SMs.

    The other axes stand at sizes of everyday steps; what is covered up to the tables' own limit is unbounded.
    """

    def reach(limit: int, covered: Callable[[Ints], bool]) -> int:
        sizes = [size for size in 2 ** np.arange(40) if size < limit] + [limit]
        held = [int(size) for size in sizes if covered(np.array([size]))]
        return UNBOUNDED if held and held[-1] == limit else max(held, default=0)

    def holds(operator: str, shape: Shape) -> bool:
        return cost.profile.curve(operator).covered(shape, cost.gpu.sms)

    def tokens(m: Ints) -> bool:
        rows = [operator for operator in cost.operators if operator.rows == "tokens"]
        return all(holds(operator.name, operator.shape(m)) for operator in rows)

    def decodes(batch: Ints, context: Ints) -> bool:
        return holds("decode_attention", decode_shape(model, batch, context.astype(np.float64)))

    model, few = cost.model, np.array([512])
    return {
        "cover_tokens": reach(limits.max_tokens, tokens),
        "cover_chunk": reach(
            limits.max_tokens, lambda q: holds("prefill_attention", prefill_shape(model, q, 0 * q))
        ),
        "cover_history": reach(
            limits.max_context, lambda h: holds("prefill_attention", prefill_shape(model, few, h))
        ),
        "cover_batch": reach(limits.max_seqs, lambda b: decodes(b, 1024 * b)),
        "cover_context": reach(limits.max_context, lambda c: decodes(0 * c + 8, 8 * c)),
    }


def _flat(tables: Sequence[tuple[Floats, ...]], at: int) -> Floats:
    return np.ascontiguousarray(np.concatenate([table[at].ravel() for table in tables]))


def interval(knots: Ints, positions: Ints) -> Ints:
    """Index of the interval between knots that holds each position, within 0..len(knots) - 2."""
    return np.clip(np.searchsorted(knots, positions, side="right") - 1, 0, len(knots) - 2)


def decode_knots(max_context: int) -> Ints:
    """Mean contexts at which segments meet: 0, 64, 128, then two per octave, to max_context or beyond."""
    unit = 1 << DEC_SHIFT
    knots = [0, unit, 2 * unit]
    while knots[-1] < max_context:
        power = 1 << (knots[-1].bit_length() - 1)
        knots.append(power + power // 2 if knots[-1] == power else 2 * power)
    return np.array(knots, dtype=np.int64)


def history_knots(max_context: int) -> Ints:
    """Histories with a knot: 0, 128, 256, then four per octave (multiples of 128), to max_context or beyond."""
    unit = 1 << PRE_SHIFT
    knots = [0, unit, 2 * unit]
    while knots[-1] < max_context:
        power = 1 << (knots[-1].bit_length() - 1)
        knots.append(knots[-1] + max(unit, power // 4))
    return np.array(knots, dtype=np.int64)


def chunk_knots(max_tokens: int, tile: int) -> Ints:
    """Chunk sizes with a knot: both sides of the first row-tile edges, then steps of 1/64, to max_tokens or beyond."""
    edges = tile * np.arange(1, EDGES + 1)
    edges = edges[: np.searchsorted(edges, max_tokens) + 1]
    knots = {1, 2, *edges.tolist(), *(edges + 1).tolist()}
    last = int(edges[-1])
    while last < max_tokens:
        last += max(tile, last // 64 // tile * tile)
        knots.add(last)
    return np.array(sorted(knots), dtype=np.int64)


def _linear_tables(cost: ProfiledCost, limits: Limits, sms: int) -> tuple[Floats, ...]:
    tokens = np.arange(limits.max_tokens + 1)
    eager, graph = grid_tokens(tokens), grid_tokens(cost.launching.padded(tokens, True))
    grid = np.unique(np.concatenate([eager, graph]))[1:]
    timing = cost.linear("tokens", grid, sms)
    rows = grid_tokens(np.arange(limits.max_seqs + 1))
    head_grid = np.unique(rows)[1:]
    head = cost.linear("sequences", head_grid, sms)
    factor = cost.linear_factor(grid, sms)
    gaps = cost.model.layers * cost.gap_s(grid, sms)
    between, gather = cost.collective("tokens", grid, sms), cost.collective("sequences", head_grid, sms)
    return (
        _stairs(grid, timing.seconds + gaps + between.seconds + cost.joints_s(grid), graph),
        _stairs(grid, timing.seconds * factor + between.seconds, eager),
        _stairs(grid, timing.sm_s + between.sm_s, graph),
        _stairs(grid, timing.sm_s * factor + between.sm_s, eager),
        _stairs(head_grid, head.seconds + gather.seconds, rows),
        _stairs(head_grid, head.sm_s + gather.sm_s, rows),
    )


def _stairs(grid: Ints, values: Floats, sizes: Ints) -> Floats:
    """Value of the grid point that each size stands on; nothing for size 0."""
    at = np.searchsorted(grid, sizes)
    return np.where(sizes > 0, values[np.minimum(at, len(grid) - 1)], 0.0)


def _decode_tables(cost: ProfiledCost, max_seqs: int, knots: Ints, sms: int) -> tuple[Floats, ...]:
    batch = np.arange(1, max_seqs + 1, dtype=np.int64)[:, None]
    context = (batch * knots[None, :]).astype(np.float64)
    timing = cost.decode(np.broadcast_to(batch, context.shape), context, sms)
    lines = (
        *_lines(cost.model.layers * timing.seconds, context),
        *_lines(cost.model.layers * timing.sm_s, context),
    )
    # row 0: an empty batch costs nothing
    return tuple(np.vstack([np.zeros((1, line.shape[1])), line]) for line in lines)


def _lines(values: Floats, context: Floats) -> tuple[Floats, Floats]:
    """Intercept and slope of the line through the values at both ends of each segment."""
    slope = np.diff(values, axis=1) / np.diff(context, axis=1)
    return values[:, :-1] - slope * context[:, :-1], slope


def _ragged_tables(cost: ProfiledCost, limits: Limits, sms: Sequence[int]) -> dict[str, Any]:
    """`over_*` and `spare_*`: what a decode batch waits for its longest context, and how far that is split."""
    batch = np.arange(limits.max_seqs + 1, dtype=np.int64)
    over = [cost.model.layers * cost.overhang_s(batch, count) * (batch > 0) for count in sms]
    active = [seconds * min(cost.model.kv_heads, count) for seconds, count in zip(over, sms, strict=True)]
    slots = splits_up_to(cost.model.kv_heads, cost.gpu)

    def spare(padded: Ints) -> Ints:
        left = np.maximum(slots - padded, 0)
        return np.where(left > MOST_SPLITS, -1, left)

    return {
        "over_on": int(any(seconds.any() for seconds in over)),
        "over_s": np.concatenate(over),
        "over_sm": np.concatenate(active),
        "spare_graph": spare(cost.launching.padded(batch, True)),
        "spare_eager": spare(batch),
    }


def _prefill_tables(cost: ProfiledCost, q: Ints, h: Ints, sms: int) -> tuple[Floats, Floats]:
    grid_q, grid_h = np.meshgrid(q, h, indexing="ij")
    timing = cost.prefill(grid_q, grid_h, sms)
    return cost.model.layers * timing.seconds, cost.model.layers * timing.sm_s

"""Thread blocks (CTAs) that attention kernels launch for a chunk and a decode batch: tiles, KV splits, CTAs on an SM.

Rules as coded in microsoft/vattention pod_attn (POD-Attention's artefact over FlashAttention 2.6.1: fused_api.cpp,
fused_api_setup.h, fused_fwd_launch_template.h) and in flashinfer-ai/flashinfer include/flashinfer/attention/pod.cuh and
batch_pod.cuh. Decode folds the query heads of a KV head into the rows of its tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sim.cost.cta_schedule import HALF, NO_CTAS, PREFILL_FIRST, Ctas, Tickets, proportional
from sim.cost.cta_terms import (
    FLASHINFER_DECODE,
    FLASHINFER_SMALL,
    LARGE,
    ONE_WARP,
    SMALL,
    SPLIT,
    CtaTerms,
    Tile,
)
from sim.cost.flashinfer_plan import MANY_ROWS, alike_splits, pod_splits
from sim.cost.waves import ceil_div

KEYS_PER_BLOCK = 128  # unit in which FlashAttention cuts a context into splits
MAX_SPLITS = 128


@dataclass(frozen=True)
class MixedShape:
    """One layer's attention of a mixed step: a chunk of `q` tokens on `h` earlier ones beside `batch` decodes of mean
    context `context`, with the heads of one GPU."""

    q: int
    h: int
    batch: int
    context: float
    q_heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key and value in one KV head (16 bit)."""
        return 4 * self.head_dim


@dataclass(frozen=True)
class Grid:
    """One launch: its CTAs by kind, how they share SMs, and how many kernels follow to merge KV splits.

    `virtual`: decode CTAs that run side by side in one CTA.
    """

    prefill: Ctas
    decode: Ctas
    slots: int
    tickets: Tickets
    merges: int
    prefill_tile: Tile | None
    decode_tile: Tile | None
    prefill_splits: int = 1
    decode_splits: int = 1
    virtual: int = 1


def flash_splits(blocks: int, slots: int, key_blocks: int, most: int = MAX_SPLITS) -> int:
    """FlashDecoding's rule: the fewest splits within 85 % of the best fill of waves, none from 80 % of a wave on."""
    if blocks >= 0.8 * slots:
        return 1
    fills = {}
    for splits in range(1, min(most, slots, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = blocks * splits / slots
            fills[splits] = waves / math.ceil(waves)
    best = max(fills.values(), default=1.0)
    return next((splits for splits, fill in fills.items() if fill >= 0.85 * best), 1)


def prefill_ctas(
    terms: CtaTerms, shape: MixedShape, tile: Tile, splits: int = 1, packed: bool = False
) -> Ctas:
    """CTAs of a chunk: all with the mean number of keys, and half a tile beyond the diagonal.

    `packed`: the query heads of a KV head share row tiles (FlashInfer).
    """
    heads, rows = shape.q_heads, shape.q
    if packed:
        heads, rows = shape.kv_heads, shape.q * (shape.q_heads // shape.kv_heads)
    count = ceil_div(rows, tile.rows) * heads * splits
    keys = shape.h + (shape.q + 1) / 2 + tile.keys / 2
    flops = 4.0 * shape.head_dim * tile.rows * keys / splits
    rate = terms.rate(tile)
    # the chunk's CTAs of one KV head run together and read its keys once
    traffic = float(shape.key_bytes) * shape.kv_heads * (shape.q + shape.h) / count
    return Ctas(count, flops, traffic, rate, flops / terms.alone_rate(tile))


def decode_ctas(terms: CtaTerms, shape: MixedShape, tile: Tile, splits: int = 1, virtual: int = 1) -> Ctas:
    """CTAs of the decode batch, `virtual` one-warp ones in each; contexts count as alike."""
    parts = shape.batch * shape.kv_heads * splits
    count = ceil_div(parts, virtual)
    keys = shape.context / splits
    share = parts / (count * virtual)  # of the CTAs' room that is used
    flops = 4.0 * shape.head_dim * tile.rows * keys * virtual * share
    traffic = shape.key_bytes * keys * virtual * share
    return Ctas(count, flops, traffic, terms.rate(tile), keys * terms.key_s(tile, shape.head_dim))


def serial_prefill(terms: CtaTerms, shape: MixedShape) -> Grid:
    """The prefill kernel of separate attention: FlashAttention 2 with its splits, or 3 (one CTA an SM)."""
    if terms.serial == "fa3":
        return Grid(
            prefill_ctas(terms, shape, terms.fa3_tile), NO_CTAS, 1, PREFILL_FIRST, 0, terms.fa3_tile, None
        )
    blocks = ceil_div(shape.q, SPLIT.rows) * shape.q_heads
    splits = flash_splits(blocks, 2 * terms.sms, ceil_div(shape.q + shape.h, KEYS_PER_BLOCK))
    tile = LARGE if splits == 1 else SPLIT
    made = prefill_ctas(terms, shape, tile, splits)
    return Grid(made, NO_CTAS, 2, PREFILL_FIRST, int(splits > 1), tile, None, splits)


def serial_decode(terms: CtaTerms, shape: MixedShape) -> Grid:
    """The decode kernel of separate attention: FlashAttention 2's tile of 64 rows, or FlashInfer's on Hopper."""
    parts = shape.batch * shape.kv_heads
    if terms.serial == "fa3":
        splits = alike_splits(shape.batch, int(shape.context), 2 * terms.sms // shape.kv_heads)
        made = decode_ctas(terms, shape, FLASHINFER_DECODE, splits)
        return Grid(NO_CTAS, made, 2, PREFILL_FIRST, int(splits > 1), None, FLASHINFER_DECODE, 1, splits)
    splits = flash_splits(parts, 2 * terms.sms, ceil_div(int(shape.context), KEYS_PER_BLOCK))
    made = decode_ctas(terms, shape, SPLIT, splits)
    return Grid(NO_CTAS, made, 2, PREFILL_FIRST, int(splits > 1), None, SPLIT, 1, splits)


def artefact(terms: CtaTerms, shape: MixedShape, ctas_per_sm: int, half: bool, limited: bool) -> Grid:
    """POD-Attention's fused kernel. `ctas_per_sm`: 2 or 4, 0 by its rule; `half`: 50:50 tickets; `limited`: prefill is
    split no more than two waves of it need, and not at all beside a wave of decode (section 4.2.4)."""
    sms, blocks, parts = terms.sms, ceil_div(shape.q, 128) * shape.q_heads, shape.batch * shape.kv_heads
    decode_splits = prefill_splits = 0
    forced = ctas_per_sm == 2 or (ctas_per_sm == 0 and (blocks >= 2 * sms or 2 * blocks < 1.6 * sms))
    if forced and 1.6 * sms <= parts < 2 * sms:
        decode_splits = 2 * sms // parts + 1
    most = MAX_SPLITS
    if limited:
        most = 2 * sms // blocks
        prefill_splits = 1 if parts >= 2 * sms else 0
    small_blocks = ceil_div(shape.q, SPLIT.rows) * shape.q_heads
    keys = shape.q + shape.h
    p_splits = prefill_splits or flash_splits(small_blocks, 2 * sms, ceil_div(keys, KEYS_PER_BLOCK), most)
    d_blocks = ceil_div(int(shape.context), KEYS_PER_BLOCK)
    d_splits = decode_splits or flash_splits(parts, 2 * sms, d_blocks)
    four = ctas_per_sm == 4 if ctas_per_sm else _four(sms, shape, p_splits, d_splits)
    p_tile = SPLIT if p_splits > 1 else SMALL if four else LARGE
    d_tile = SPLIT if d_splits > 1 else ONE_WARP
    warps = max(p_tile.warps, d_tile.warps)
    virtual = warps // d_tile.warps
    made_p = _grouped(prefill_ctas(terms, shape, p_tile, p_splits), warps // p_tile.warps)
    made_d = decode_ctas(terms, shape, d_tile, d_splits, virtual)
    smem = max(
        p_tile.smem_bytes(shape.head_dim) * (warps // p_tile.warps),
        d_tile.smem_bytes(shape.head_dim) * virtual,
    )
    return Grid(
        made_p,
        made_d,
        terms.ctas_per_sm(smem, warps),
        HALF if half else proportional(made_p.count, made_d.count),
        int(p_splits > 1) + int(d_splits > 1),
        p_tile,
        d_tile,
        p_splits,
        d_splits,
        virtual,
    )


def _four(sms: int, shape: MixedShape, p_splits: int, d_splits: int) -> bool:
    """The artefact's choice between 4 and 2 CTAs an SM (fused_params 15)."""
    prefill = shape.q_heads * ceil_div(shape.q, 64 if p_splits > 1 else 128) * p_splits
    decode = shape.batch * shape.kv_heads * d_splits
    if p_splits > 1 or d_splits > 1:
        return False
    if prefill < 2 * sms and decode < 3 * sms:
        return True
    long_prefill = (shape.q + shape.h) * 8 >= shape.context * 5
    if long_prefill and prefill < 2 * sms:
        return False
    if long_prefill and decode < 2 * sms:
        return True
    return bool(decode >= prefill)


def _grouped(made: Ctas, factor: int) -> Ctas:
    """`factor` CTAs side by side in one."""
    if factor == 1:
        return made
    count = ceil_div(made.count, factor)
    times = made.count / count
    return replace(made, count=count, flops=made.flops * times, hbm_bytes=made.hbm_bytes * times)


def flashinfer(terms: CtaTerms, shape: MixedShape, batched: bool) -> Grid:
    """FlashInfer's POD (one prefill) or, `batched`, BatchPOD: at most two CTAs an SM, no virtual decode CTAs; decode is
    planned over two CTAs an SM, a single prefill over one wave, a batched one over what decode leaves."""
    rows, keys = shape.q * (shape.q_heads // shape.kv_heads), shape.q + shape.h
    tile = LARGE if rows > 64 and shape.head_dim < 256 else FLASHINFER_SMALL
    tiles, planned = ceil_div(rows, tile.rows), 2 * terms.sms
    d_splits = alike_splits(shape.batch, int(shape.context), planned // shape.kv_heads)
    slots = min(2, terms.ctas_per_sm(max(tile.smem_bytes(128), FLASHINFER_DECODE.smem_bytes(128)), 4))
    if batched:
        # the plan's unit is a part of a request, whose KV heads come on top
        taken = 0 if shape.q > MANY_ROWS else shape.batch * d_splits
        p_splits = alike_splits(tiles, keys, max(planned - taken, 0) // shape.kv_heads)
    else:
        p_splits = pod_splits(keys, slots * terms.sms // (tiles * shape.kv_heads))[0]
    made_p = prefill_ctas(terms, shape, tile, p_splits, packed=True)
    made_d = decode_ctas(terms, shape, FLASHINFER_DECODE, d_splits)
    tickets = proportional(made_p.count, made_d.count)
    merges = int(p_splits > 1) + int(d_splits > 1)
    return Grid(made_p, made_d, slots, tickets, merges, tile, FLASHINFER_DECODE, p_splits, d_splits)


def one_prefill_kernel(terms: CtaTerms, shape: MixedShape) -> Grid:
    """Decodes as rows of a batched prefill kernel (FlashInfer): the tile follows the mean rows of a request, and pads
    each decode to as many; keys are cut into the shortest chunks whose CTAs fit two to an SM."""
    group = shape.q_heads // shape.kv_heads
    mean = group * (shape.q + shape.batch) / (1 + shape.batch)
    tile = LARGE if mean > 64 else SPLIT if mean > 16 else FLASHINFER_DECODE
    tiles, keys, context = ceil_div(shape.q * group, tile.rows), shape.q + shape.h, int(shape.context)
    budget = 2 * terms.sms // shape.kv_heads
    low, high = 1, ceil_div(max(keys, context), KEYS_PER_BLOCK)
    while low < high:
        middle = (low + high) // 2
        chunk = middle * KEYS_PER_BLOCK
        if tiles * ceil_div(keys, chunk) + shape.batch * ceil_div(context, chunk) > budget:
            low = middle + 1
        else:
            high = middle
    splits = [ceil_div(length, low * KEYS_PER_BLOCK) for length in (keys, context)]
    made_p = prefill_ctas(terms, shape, tile, splits[0], packed=True)
    made_d = decode_ctas(terms, shape, tile, splits[1])
    return Grid(made_p, made_d, 2, PREFILL_FIRST, int(max(splits) > 1), tile, tile, *splits)

"""FlashInfer's plans: which tiles and KV splits it makes CTAs of, from the lengths of a batch.

As coded in flashinfer 0.6.8: include/flashinfer/attention/scheduler.cuh (PrefillBinarySearchKVChunkSize,
PrefillSplitQOKVIndptr, PrefillPlan), include/flashinfer/utils.cuh (FA2DetermineCtaTileQ), include/flashinfer/attention/
pod.cuh (PODWithKVCacheTensorDispatched), flashinfer/pod.py (BatchPODWithPagedKVCacheWrapper.plan). The query heads of a
KV head share row tiles. Plans look at the whole GPU, not at a partition of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.cost.shapes import Floats
from sim.cost.waves import ceil_div

PAGE = 16  # tokens
SLOTS = 2  # CTAs an SM that are planned for
LEAST_PAGES = 128 // PAGE  # of a split
LEAST_KEYS = 256  # of a split of POD's prefill
MANY_ROWS = 1536  # new tokens from which BatchPOD's prefill is planned as if it had the GPU to itself
# keys that a CTA takes at a time, by the rows of its tile (head dim 128)
TILE_KEYS = {128: 64, 64: 128, 16: 128}


@dataclass(frozen=True)
class Side:
    """CTAs of one side in the order of their numbers: `keys` that each reads, `rows` of its tile, most `splits` of a
    sequence; `merged`: query rows of all heads that another kernel merges out of `parts` ones (0: none follows)."""

    keys: Floats
    rows: int
    splits: int
    merged: int
    parts: int


def tile_rows(packed_rows: int, head_dim: int) -> int:
    """Rows of the tile for sequences of that many rows (tokens x query heads of a KV head) on average."""
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def split_pages(tiles: Sequence[int], pages: Sequence[int], most: int) -> int:
    """Pages of a split: the fewest whose CTAs (of one KV head) are within `most`; the longest sequence if none are."""
    low, high = LEAST_PAGES, max(1, *pages)
    while low < high:
        middle = (low + high) // 2
        count = sum(tile * ceil_div(max(held, 1), middle) for tile, held in zip(tiles, pages, strict=True))
        if count > most:
            low = middle + 1
        else:
            high = middle
    return low


def alike_splits(tiles: int, keys: int, most: int) -> int:
    """Splits of sequences alike, `tiles` row tiles in all: what `split_pages` makes of them."""
    pages = max(1, ceil_div(keys, PAGE))
    room = most // tiles
    chunk = max(LEAST_PAGES, ceil_div(pages, room)) if room else pages
    return int(ceil_div(pages, min(chunk, pages)))


def pod_splits(keys: int, most: int) -> tuple[int, int]:
    """(splits, keys of each) of POD's chunk where `most` splits fill one wave; one where not even the tiles fit."""
    chunk = max(ceil_div(keys, most), LEAST_KEYS) if most else keys
    return int(ceil_div(keys, chunk)), int(chunk)


def decode_side(contexts: Sequence[int], q_heads: int, kv_heads: int, head_dim: int, sms: int) -> Side:
    """One query row a sequence: planned over two CTAs an SM."""
    group = q_heads // kv_heads
    pages = [ceil_div(context, PAGE) for context in contexts]
    chunk = PAGE * split_pages([1] * len(pages), pages, SLOTS * sms // kv_heads)
    keys: list[int] = []
    for context in contexts:
        keys += [min(chunk, context - start) for start in range(0, context, chunk)]
    most = ceil_div(max(contexts), chunk)
    merged = (len(contexts) * q_heads, len(keys) * q_heads) if chunk < PAGE * max(pages) else (0, 0)
    return Side(np.tile(keys, kv_heads) * 1.0, tile_rows(group, head_dim), most, *merged)


def prefill_side(q: int, h: int, q_heads: int, kv_heads: int, head_dim: int, ctas: int) -> Side:
    """A chunk of `q` tokens on `h` earlier ones, paged, planned over `ctas` CTAs (a batch prefill, BatchPOD)."""
    group, keys = q_heads // kv_heads, q + h
    rows = tile_rows(q * group, head_dim)
    tiles, pages = ceil_div(q * group, rows), ceil_div(keys, PAGE)
    chunk = split_pages([tiles], [pages], ctas // kv_heads)
    splits = ceil_div(pages, chunk)
    if chunk >= pages:
        return _prefill(q, h, group, kv_heads, rows, 1, keys, by_tile=True)
    return _prefill(q, h, group, kv_heads, rows, splits, chunk * PAGE, by_tile=True)


def pod_side(q: int, h: int, q_heads: int, kv_heads: int, head_dim: int, sms: int) -> Side:
    """POD's single chunk: as many splits as one wave of two CTAs an SM holds."""
    group, keys = q_heads // kv_heads, q + h
    rows = tile_rows(q * group, head_dim)
    most = SLOTS * sms // (kv_heads * ceil_div(q * group, rows))
    return _prefill(q, h, group, kv_heads, rows, *pod_splits(keys, most), by_tile=False)


def batch_pod_sides(
    q: int, h: int, contexts: Sequence[int], q_heads: int, kv_heads: int, head_dim: int, sms: int
) -> tuple[Side, Side]:
    """BatchPOD's chunk and decodes: a short chunk is planned over what decode's work items leave of two CTAs an SM."""
    decode = decode_side(contexts, q_heads, kv_heads, head_dim, sms)
    # the count is of items, though each is a CTA for every KV head
    items = 0 if q > MANY_ROWS else len(decode.keys) // kv_heads
    return prefill_side(q, h, q_heads, kv_heads, head_dim, max(0, SLOTS * sms - items)), decode


def pod_sides(
    q: int, h: int, contexts: Sequence[int], q_heads: int, kv_heads: int, head_dim: int, sms: int
) -> tuple[Side, Side]:
    """POD's chunk and decodes, each planned as if it had the GPU to itself."""
    heads = (q_heads, kv_heads, head_dim)
    return pod_side(q, h, *heads, sms), decode_side(contexts, *heads, sms)


def _prefill(
    q: int, h: int, group: int, kv_heads: int, rows: int, splits: int, chunk: int, by_tile: bool
) -> Side:
    """Keys that each CTA of a chunk reads: those of its split that its last row may look at, in whole key tiles.
    `by_tile`: all splits of a row tile come one after the other, else all row tiles of a split."""
    tiles = ceil_div(q * group, rows)
    last = np.minimum(h + ceil_div((np.arange(tiles) + 1) * rows, group), q + h)
    seen = np.clip(last[:, None] - chunk * np.arange(splits), 0, chunk)
    step = TILE_KEYS[rows]
    keys = (ceil_div(seen, step) * step if by_tile else ceil_div(seen, step).T * step).ravel()
    merged = q * group * kv_heads if splits > 1 else 0
    return Side(np.tile(keys, kv_heads) * 1.0, rows, splits, merged, merged * splits)

"""FlashInfer's plans against the grids that Nsight Compute saw, and against what any plan must keep."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.flashinfer_plan import (
    alike_splits,
    batch_pod_sides,
    decode_side,
    pod_side,
    pod_sides,
    prefill_side,
    split_pages,
    tile_rows,
)

HEADS, SMS = (32, 8, 128), 132


def test_tiles_follow_the_rows_of_a_sequence() -> None:
    assert [tile_rows(rows, 128) for rows in (1, 16, 17, 64, 65, 4096)] == [16, 16, 64, 64, 128, 128]
    assert tile_rows(4096, 256) == 64


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 300)), min_size=1, max_size=6), st.integers(0, 200)
)
def test_a_split_is_the_shortest_whose_ctas_fit(sequences: list[tuple[int, int]], most: int) -> None:
    tiles, pages = [one for one, _ in sequences], [one for _, one in sequences]

    def count(chunk: int) -> int:
        return sum(tile * -(-held // chunk) for tile, held in zip(tiles, pages, strict=True))

    found, longest = split_pages(tiles, pages, most), max(pages)
    fits = [chunk for chunk in range(8, longest + 1) if count(chunk) <= most]
    assert found == (min(fits) if fits else max(8, longest))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40000), st.integers(0, 300))
def test_sequences_alike_have_a_closed_form(batch: int, tiles: int, keys: int, most: int) -> None:
    pages = -(-keys // 16)
    chunk = split_pages([tiles] * batch, [pages] * batch, most)
    assert alike_splits(batch * tiles, keys, most) == -(-pages // chunk)


@given(
    st.integers(1, 5000),
    st.integers(0, 30000),
    st.lists(st.integers(1, 20000), min_size=1, max_size=60),
    st.sampled_from([(32, 8, 128), (32, 32, 128), (16, 2, 128), (32, 8, 64)]),
)
def test_every_key_is_read_once_by_every_row_tile(q, h, contexts, heads) -> None:
    q_heads, kv_heads, _ = heads
    for prefill, decode in (
        pod_sides(q, h, contexts, *heads, SMS),
        batch_pod_sides(q, h, contexts, *heads, SMS),
    ):
        assert decode.keys.sum() == sum(contexts) * kv_heads
        tiles = -(-q * (q_heads // kv_heads) // prefill.rows)
        assert len(prefill.keys) == tiles * prefill.splits * kv_heads
        # each row sees at least its own keys, and no tile more than the chunk's, rounded up for each split
        group = q_heads // kv_heads
        last = np.minimum(h + -(-(np.arange(tiles) + 1) * prefill.rows // group), q + h)
        assert prefill.keys.sum() >= kv_heads * last.sum()
        assert prefill.keys.sum() <= kv_heads * (last.sum() + tiles * prefill.splits * 128)
        assert (prefill.merged == 0) == (prefill.splits == 1)
        assert prefill.parts == prefill.merged * prefill.splits
        assert (decode.merged == 0) == (decode.splits == 1)


def test_only_what_decode_leaves_is_planned_for_a_short_chunk() -> None:
    alone = prefill_side(512, 16384 - 512, *HEADS, 2 * SMS)
    prefill, decode = batch_pod_sides(512, 16384 - 512, [16384] * 16, *HEADS, SMS)
    assert (alone.splits, prefill.splits, decode.splits) == (2, 1, 2)
    assert pod_side(512, 16384 - 512, *HEADS, SMS).splits == 2
    # a long one is planned as if it were alone
    assert batch_pod_sides(1537, 8000, [16384] * 16, *HEADS, SMS)[0].splits == 1


def test_the_longest_context_of_a_ragged_batch_sets_the_split() -> None:
    even, ragged = (decode_side(contexts, *HEADS, SMS) for contexts in ([2000] * 16, [1000] * 15 + [17000]))
    assert even.splits == 2
    assert ragged.splits > 4
    assert len(ragged.keys) <= 2 * SMS


def test_grids_are_those_that_ran() -> None:
    path = files("calib").joinpath("profiles/h200-sxm/measurements/fused_counters.csv.gz")
    if not path.is_file():
        pytest.skip("the profile of the H200 has no counters of mixed attention")
    rows = pd.read_csv(str(path))
    seen = 0
    for row in rows.itertuples():
        q, h, batch = int(row.q_tokens), int(row.history_tokens), int(row.decode_batch)
        contexts = [int(row.context_sum // row.decode_batch)] * batch
        if "POD" in row.kernel:
            plan = pod_sides if row.label == "pod" else batch_pod_sides
            assert sum(len(side.keys) for side in plan(q, h, contexts, *HEADS, SMS)) == row.grid
            seen += 1
        elif row.label == "serial_fa2" and "BatchPrefill" in row.kernel:
            sides = (prefill_side(q, h, *HEADS, 2 * SMS), decode_side(contexts, *HEADS, SMS))
            assert row.grid in [len(side.keys) for side in sides]
            seen += 1
    assert seen == 24

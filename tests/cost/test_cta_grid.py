"""What attention kernels launch: tiles, splits and occupancy against the sources' own arithmetic, and one real GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import MixedShape, artefact, flash_splits, flashinfer, serial_decode, serial_prefill
from sim.cost.cta_schedule import HALF, Tickets
from sim.cost.cta_terms import LARGE, ONE_WARP, SMALL, SPLIT, cta_terms
from sim.cost.fused_modes import fused_run, serial_s
from sim.cost.gpu import load_gpu

A100, H200 = (cta_terms(load_gpu(name)) for name in ("a100-80gb-sxm", "h200-sxm"))


def pod(shape: MixedShape, ctas: int = 0, half: bool = False, limited: bool = True):
    return artefact(A100, shape, ctas, half, limited)


def test_shared_memory_and_occupancy_of_the_artefacts_tiles():
    assert LARGE.smem_bytes(128) == 64 << 10
    assert ONE_WARP.smem_bytes(128) == 20 << 10
    assert SMALL.smem_bytes(128) == 32 << 10
    assert A100.ctas_per_sm(80 << 10, 4) == 2
    assert A100.ctas_per_sm(40 << 10, 2) == 4
    # shared memory of an L40S holds one
    assert cta_terms(load_gpu("l40s")).ctas_per_sm(80 << 10, 4) == 1


def test_splits_follow_flash_decoding():
    # 48 blocks on 108 slots: two splits fill 89 % of a wave, three 67 %
    assert flash_splits(48, 108, 128) == 2
    assert flash_splits(87, 108, 128) == 1
    assert flash_splits(10, 216, 1) == 1
    assert flash_splits(8, 216, 128, most=4) <= 4


def test_decode_of_54_yi_requests_is_one_round_of_slots_and_55_is_not():
    full, past = (serial_decode(A100, MixedShape(512, 0, batch, 16384, 32, 4)) for batch in (54, 55))
    assert (full.decode.count, past.decode.count) == (216, 220)
    assert full.decode_tile is SPLIT


def test_serial_prefill_is_split_where_its_blocks_do_not_fill_the_slots():
    few = serial_prefill(A100, MixedShape(512, 15872, 1, 1, 16, 4))
    assert (few.prefill_splits, few.prefill_tile, few.merges, few.prefill.count) == (3, SPLIT, 1, 384)
    many = serial_prefill(A100, MixedShape(2048, 0, 1, 1, 32, 4))
    assert (many.prefill_splits, many.prefill_tile, many.prefill.count) == (1, LARGE, 512)


def test_a_wave_of_decode_keeps_the_prefill_whole():
    shape = MixedShape(512, 15872, 64, 16384, 16, 4)
    limited, vanilla = pod(shape, 2), pod(shape, 2, limited=False)
    assert (limited.prefill_splits, limited.prefill_tile, limited.virtual, limited.slots) == (1, LARGE, 4, 2)
    assert (limited.prefill.count, limited.decode.count) == (64, 64)
    assert limited.tickets == Tickets(2, 1)
    assert (vanilla.prefill_splits, vanilla.prefill_tile) == (3, SPLIT)
    assert vanilla.tickets == Tickets(7, 6)


def test_fewer_decodes_than_a_wave_are_split_into_tiles_of_64_rows():
    grid = pod(MixedShape(2048, 8192, 45, 8192, 32, 4), 2)  # 180 of 216 slots
    assert (grid.decode_splits, grid.decode_tile, grid.virtual) == (2, SPLIT, 1)


def test_two_or_four_ctas_by_the_artefacts_rule():
    assert pod(MixedShape(512, 0, 16, 8192, 16, 4)).slots == 2  # split
    assert pod(MixedShape(512, 8192, 64, 16384, 16, 4)).slots == 4  # few of both
    assert pod(MixedShape(512, 15872, 100, 16384, 16, 4)).slots == 2  # a long prefill beside much decode
    assert pod(MixedShape(1024, 1024, 400, 16384, 16, 4)).slots == 4  # decode outnumbers a short one
    assert pod(MixedShape(512, 0, 64, 8192, 16, 4), 2).slots == 2
    assert pod(MixedShape(512, 0, 64, 8192, 16, 4), half=True).tickets is HALF


def test_flashinfer_packs_heads_and_has_no_virtual_ctas():
    grid = flashinfer(H200, MixedShape(1024, 7168, 32, 8192, 32, 8), batched=False)
    assert (grid.prefill.count, grid.virtual, grid.slots) == (256, 1, 2)
    assert grid.decode_splits == 1
    assert flashinfer(H200, MixedShape(512, 0, 16, 16384, 32, 8), batched=False).decode_splits == 2
    # what decode leaves of two CTAs an SM; many rows are planned as if alone
    few, many = MixedShape(128, 16384, 8, 2048, 32, 8), MixedShape(512, 16384, 8, 2048, 32, 8)
    assert [flashinfer(H200, few, batched).prefill_splits for batched in (False, True)] == [8, 1]
    assert [flashinfer(H200, many, batched).prefill_splits for batched in (False, True)] == [2, 2]


# decode batch x context, chunk, us: fused, separate with FA2 and with FA3 prefill, two streams (docs/h200.md)
H200_US = [
    (32, 8192, 1024, 487, 604, 440, 576),
    (64, 4096, 2048, 450, 588, 433, 515),
    (16, 16384, 512, 508, 610, 441, 598),
    (128, 2048, 512, 282, 310, 294, 302),
]


@pytest.mark.parametrize(("batch", "context", "chunk", "fused", "fa2", "fa3", "streams"), H200_US)
def test_a_fused_kernel_on_an_h200_from_kernels_alone(batch, context, chunk, fused, fa2, fa3, streams):
    shape = MixedShape(chunk, context - chunk, batch, context, 32, 8)
    ours = fused_run(H200, AttentionMode("pod", "flashinfer"), shape).seconds * 1e6
    as_fa2 = replace(H200, serial="fa2")
    assert ours == pytest.approx(fused, rel=0.10)
    assert sum(serial_s(H200, shape)) * 1e6 == pytest.approx(fa3, rel=0.10)
    assert sum(serial_s(as_fa2, shape)) * 1e6 == pytest.approx(fa2, rel=0.20)
    assert fused_run(as_fa2, AttentionMode("streams"), shape).seconds * 1e6 == pytest.approx(
        streams, rel=0.10
    )
    # faster than the kernels that it fuses; against FlashAttention 3 it wins only where decode is nearly all
    assert (ours < sum(serial_s(H200, shape)) * 1e6) == (fused < fa3)

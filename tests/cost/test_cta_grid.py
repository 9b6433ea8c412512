"""What attention kernels launch: tiles, splits and occupancy against the sources' own arithmetic, and one real GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pandas as pd
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
    # what decode leaves of two CTAs an SM
    few, many = MixedShape(128, 16384, 8, 2048, 32, 8), MixedShape(512, 16384, 8, 2048, 32, 8)
    assert [flashinfer(H200, few, batched).prefill_splits for batched in (False, True)] == [8, 7]
    assert [flashinfer(H200, many, batched).prefill_splits for batched in (False, True)] == [2, 1]


# chunk, history, decode batch, context; us of one layer of Llama-3.1-8B: fused by FlashInfer's POD, separate with FA2
# and with FA3 prefill, two streams (calib/profiles/h200-sxm/measurements/fused.csv.gz)
H200_US = [
    (1024, 8192, 32, 8192, 542, 694, 515, 675),
    (2048, 4096, 64, 4096, 636, 820, 577, 771),
    (512, 16384, 16, 16384, 528, 719, 495, 670),
    (512, 2048, 128, 2048, 296, 372, 301, 360),
    (1024, 0, 64, 2048, 155, 193, 172, 169),
    (256, 8192, 128, 4096, 551, 628, 615, 609),
    (4096, 0, 64, 4096, 587, 750, 540, 683),
]


@pytest.mark.parametrize(("q", "h", "batch", "context", "fused", "fa2", "fa3", "streams"), H200_US)
def test_a_fused_kernel_on_an_h200_from_kernels_alone(q, h, batch, context, fused, fa2, fa3, streams):
    shape = MixedShape(q, h, batch, context, 32, 8)
    ours = fused_run(H200, AttentionMode("pod", "flashinfer"), shape).seconds * 1e6
    as_fa2 = replace(H200, serial="fa2")
    apart = [sum(serial_s(terms, shape)) * 1e6 for terms in (as_fa2, H200)]
    assert ours == pytest.approx(fused, rel=0.08)
    assert apart[1] == pytest.approx(fa3, rel=0.09)
    assert apart[0] == pytest.approx(fa2, rel=0.18)
    assert fused_run(as_fa2, AttentionMode("streams"), shape).seconds * 1e6 == pytest.approx(
        streams, rel=0.21
    )
    # faster than the kernels that it fuses; against FlashAttention 3 it wins where decode is most of it
    assert ours < apart[0]
    assert (ours < apart[1]) == (fused < fa3)


def test_many_shapes_on_an_h200_from_kernels_alone():
    found = files("calib").joinpath("profiles/h200-sxm/measurements/fused.csv.gz")
    if not found.is_file():
        pytest.skip("the profile of the H200 has no measurements of fused attention")
    rows = pd.read_csv(str(found))
    rows = rows[rows["time_s"].notna() & ~rows["q_tokens"].astype(str).str.contains(";")]
    axes = ["q_tokens", "history_tokens", "decode_batch", "context_mean"]
    measured = rows.pivot_table("time_s", axes, "attention", "median").sample(200, random_state=1)
    errors, ratios = [], []
    for (q, h, batch, context), row in measured.iterrows():
        shape = MixedShape(int(q), int(h), int(batch), int(context), 32, 8)
        ours, apart = (
            fused_run(H200, AttentionMode("pod", "flashinfer"), shape).seconds,
            sum(serial_s(H200, shape)),
        )
        errors.append(abs(ours / row["pod"] - 1))
        ratios.append((ours / apart, row["pod"] / row["serial_fa3"]))
    assert np.median(errors) < 0.08
    assert np.corrcoef(np.array(ratios).T)[0, 1] > 0.9

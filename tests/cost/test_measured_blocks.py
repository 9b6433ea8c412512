"""Prefill attention as blocks on planned SMs: known answers, and the FA3 figures that led to the form."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost.gpu import load_gpu
from sim.cost.measured_blocks import Blocks, BlocksCurve, busiest, planned
from sim.cost.shapes import Gemm, PrefillAttention
from sim.errors import SimctlError

H200 = load_gpu("h200-sxm")
BASE = {
    **{"fixed_s": 1e-6, "efficiency": 0.66, "wave_s": 0.0, "memory": 3.0, "knee": 0.3, "packed": 0.0},
    **{"workers": 0.0, "split": 0.0, "split_s": 0.0, "merge_s": 0.0},
}


def shape(q: int, h: int, heads: int = 32, kv_heads: int = 8) -> PrefillAttention:
    return PrefillAttention(np.array([q]), np.array([h]), heads, kv_heads, 128, 2, None)


def blocks(**changes: float) -> Blocks:
    return Blocks(**{**BASE, **changes})


def seconds(q: int, h: int, sms: int, **changes: float) -> float:
    return float(BlocksCurve(H200, blocks(**changes), "").timing(shape(q, h), sms).seconds[0])


def test_blocks_and_their_keys_are_counted_by_hand():
    plan = planned(
        shape(512, 0), blocks()
    )  # 4 rows of 128 tokens for each of 32 heads: 128, 256, 384, 512 keys
    assert int(plan.units[0]) == 128
    assert float(plan.total[0]) == 32 * (128 + 256 + 384 + 512)
    assert [float(plan.seen(row)[0]) for row in range(4)] == [128, 256, 384, 512]
    packed = planned(shape(512, 0), blocks(packed=1.0))  # 16 rows of 32 tokens for each of 8 KV heads
    assert int(packed.units[0]) == 128


def test_the_busiest_sm_of_two_waves():
    # 192 blocks of about 32768 keys on 132 SMs: a full wave, and 60 blocks behind it
    keys, waves = busiest(planned(shape(768, 32768), blocks()), 132, blocks())
    assert float(waves[0]) == 2
    assert float(keys[0]) == pytest.approx(2 * 33000, rel=0.02)


def test_a_persistent_kernel_planned_for_all_sms_takes_twice_as_long_on_four_fewer():
    """Measured: 8192 on 0 takes 983 us on 132 SMs and 1.77 times what 132/128 of that is on 128."""
    whole, fewer = (seconds(8192, 0, sms, workers=132.0) for sms in (132, 128))
    assert fewer / whole == pytest.approx(1.77 * 132 / 128, rel=0.04)
    assert seconds(8192, 0, 66, workers=132.0) == pytest.approx(fewer, rel=0.05)
    assert seconds(8192, 0, 128) / seconds(8192, 0, 132) == pytest.approx(132 / 128, rel=0.03)


def test_without_splitting_few_tokens_on_a_long_history_take_as_long_as_many():
    """Measured (FA3): 16 to 512 new tokens on 32768 all take 440-480 us, 768 twice that."""
    times = [seconds(q, 32768, 132, workers=132.0) for q in (16, 128, 512)]
    assert max(times) / min(times) < 1.02
    assert seconds(768, 32768, 132, workers=132.0) / times[2] == pytest.approx(2.0, rel=0.03)


def test_splitting_shares_a_long_history_among_idle_sms():
    split = {"packed": 1.0, "split": 264.0}
    assert seconds(16, 32768, 132, **split) < 0.15 * seconds(16, 32768, 132)
    merged = seconds(512, 32768, 132, **split, merge_s=1e-7) - seconds(512, 32768, 132, **split)
    assert merged == pytest.approx(512 * 32 * 1e-7)


def test_merging_costs_by_tokens_and_heads():
    """Measured (FA2): 256 to 1024 tokens of a shard of 8 heads take a quarter of what merging 32 heads would."""
    split = blocks(packed=1.0, split=264.0, merge_s=1e-7)
    few, all_ = (
        BlocksCurve(H200, split, "").timing(shape(256, 0, heads, heads // 8), 132).seconds[0]
        - BlocksCurve(H200, blocks(packed=1.0, split=264.0), "")
        .timing(shape(256, 0, heads, heads // 8), 132)
        .seconds[0]
        for heads in (8, 32)
    )
    assert all_ == pytest.approx(4 * few)


@pytest.mark.parametrize(("heads", "q", "half"), [(32, 1024, 512), (16, 2048, 1024), (8, 4096, 2048)])
def test_nobody_evens_out_a_second_round(heads, q, half):
    """256 blocks on 132 SMs: the first SM has the longest, of q keys, and the one 132 places on, of half of them.

    Measured (FA3, heads of shards of one model): 36.6, 57.7 and 99.6 us for these; 15.0, 20.7 and 33.9 us for half the
    tokens, whose 128 blocks are one round.
    """
    keys, rounds = busiest(planned(shape(q, 0, heads, heads // 8), blocks(workers=132.0)), 132, blocks())
    assert float(rounds[0]) == 2
    assert float(keys[0]) == q + half
    alone, one = busiest(planned(shape(half, 0, heads, heads // 8), blocks()), 132, blocks())
    assert (float(alone[0]), float(one[0])) == (half, 1)


@pytest.mark.parametrize("workers", [0.0, 132.0])
@pytest.mark.parametrize("sms", [8, 64, 100, 132])
@pytest.mark.parametrize(("q", "h"), [(1, 0), (640, 0), (3000, 500), (8192, 0), (16384, 4096)])
def test_what_the_busiest_sm_runs_is_counted_as_a_list_of_blocks(workers, sms, q, h):
    """Against a deal of all blocks, longest first; beyond what is counted one by one within 3 %."""
    plan = planned(shape(q, h), blocks(workers=workers))
    units = int(plan.units[0])
    longest_first = [float(plan.seen(np.floor((units - 1 - i) / plan.heads))[0]) for i in range(units)]
    dealt = [longest_first[i :: int(workers)] for i in range(min(units, int(workers)))] if workers else None
    if dealt is None:
        expected = sum(longest_first[::sms]), len(longest_first[::sms])
    else:
        mine = dealt[::sms]
        expected = sum(map(sum, mine)), sum(map(len, mine))
    keys, count = busiest(plan, sms, blocks(workers=workers))
    near = 0.03
    assert float(keys[0]) == pytest.approx(expected[0], rel=near)
    assert float(count[0]) == pytest.approx(expected[1], rel=near)
    assert float(keys[0]) * sms >= float(plan.total[0]) * (1 - near)


def test_sm_seconds_are_at_most_what_there_are_and_time_falls_with_the_clock():
    timing = BlocksCurve(H200, blocks(), "").timing(shape(300, 1000), 132)
    assert float(timing.sm_s[0]) <= float(timing.seconds[0]) * 132 + 1e-12
    fast, slow = (
        float(BlocksCurve(H200, blocks(), "").timing(shape(8192, 0), 132, clock=c).seconds[0])
        for c in (1.0, 0.5)
    )
    assert slow == pytest.approx(2 * fast, rel=0.01)


def test_other_operators_and_bad_terms_are_refused():
    with pytest.raises(SimctlError, match="for prefill attention only"):
        BlocksCurve(H200, blocks(), "").timing(Gemm(np.array([1]), 1, 1, 2), 132)
    with pytest.raises(SimctlError, match=r"here must hold values of 0 or more"):
        Blocks.from_data({"fixed_s": 1.0}, "here")

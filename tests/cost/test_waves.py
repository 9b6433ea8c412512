"""Wave arithmetic against Table 2 of arXiv:2504.19516 (A100, Llama-3.1-8B) and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.waves import attention_blocks, gemm_blocks, idle_share, tail_sms, waves

TABLE_2 = {  # sequence length: idle share in per cent of QKV, attention, O
    1024: (11.1, 21.0, 40.7),
    2048: (11.1, 5.2, 21.0),
    4096: (11.1, 5.2, 5.2),
    16384: (1.9, 0.2, 0.2),
}


@pytest.mark.parametrize(("tokens", "published"), TABLE_2.items())
def test_bullets_table_2(tokens, published):
    ours = (
        idle_share(gemm_blocks(tokens, 6144), 108, blocks_per_sm=2),
        idle_share(attention_blocks(tokens, 32), 108),
        idle_share(gemm_blocks(tokens, 4096), 108, blocks_per_sm=2),
    )
    assert tuple(round(100 * share, 1) for share in ours) == published


def test_500_blocks_on_108_sms_leave_40_idle_in_the_fifth_wave():
    assert waves(500, 108) == 5
    assert 108 - tail_sms(500, 108) == 40


@given(st.integers(1, 100_000), st.integers(1, 200), st.integers(1, 8))
def test_waves_hold_all_blocks_and_no_more(blocks, sms, per_sm):
    count = waves(blocks, sms, per_sm)
    assert (count - 1) * per_sm * sms < blocks <= count * per_sm * sms
    assert 1 <= tail_sms(blocks, sms, per_sm) <= sms
    assert 0 <= idle_share(blocks, sms, per_sm) < 1

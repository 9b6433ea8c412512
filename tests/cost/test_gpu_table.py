"""GPU data sheets."""

from __future__ import annotations

import pytest

from sim.cost.gpu import list_gpus, load_gpu
from sim.errors import SimctlError

NAMES = [
    *("a100-40gb-sxm", "a100-80gb-sxm", "a800-80gb-sxm", "h100-sxm", "h100-pcie"),
    *("h800-sxm", "h20-sxm", "h200-sxm", "b200-sxm", "l40s"),
]


def test_the_ten_gpus_are_there_with_sources():
    assert [gpu.name for gpu in list_gpus()] == NAMES
    assert all(gpu.source for gpu in list_gpus())


def test_h200_has_the_numbers_of_its_data_sheet():
    gpu = load_gpu("h200-sxm")
    assert (gpu.sms, gpu.peak_flops, gpu.hbm_bytes_per_s) == (132, 989e12, 4.8e12)
    # peak = SMs x 4096 FLOP per clock: the clock behind the data sheet lies below the boost clock
    assert gpu.peak_flops / (gpu.sms * 4096) < gpu.boost_mhz * 1e6


def test_memory_seen_by_a_program_is_below_the_marketing_size():
    sizes = {
        "a100-40gb-sxm": 40,
        "a100-80gb-sxm": 80,
        "h100-sxm": 80,
        "h20-sxm": 96,
        "h200-sxm": 141,
        "b200-sxm": 180,
    }
    for name, gib in sizes.items():
        assert 0.92 * gib < load_gpu(name).hbm_bytes / 2**30 < gib


def test_an_unknown_gpu_gets_the_nearest_name():
    with pytest.raises(SimctlError, match="Did you mean 'h200-sxm'"):
        load_gpu("h200")

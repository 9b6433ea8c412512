"""Tensor parallelism within a replica, and power caps."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.energy import DRAM_J_PER_BYTE
from sim.cost.gpu import load_gpu
from sim.cost.model import load_model
from sim.cost.parallel import RING_FIXED_S, RING_HOP_S, RING_SHARE, RingCurve, shard
from sim.cost.shapes import Elementwise, Launch
from sim.errors import SimctlError

ONE = load_cost("llama-2-70b", "h200-sxm", "spec")
EIGHT = load_cost("llama-2-70b", "h200-sxm", "spec", {"tp": 8})
PREFILL, DECODE = Launch(((2048, 0),)), Launch((), 16, 16 * 1024, graph=True)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["llama-2-70b", "opt-66b", "llama-3.1-8b", "yi-6b"])
def test_shards_add_up_to_the_model(name: str, tp: int) -> None:
    whole, part = load_model(name), shard(load_model(name), tp)
    # what every GPU holds whole: norms, biases of the residual, tables of positions
    repeated = whole.layers * 8 * whole.hidden + whole.learned_positions * whole.hidden + 2 * whole.hidden
    kv_repeats = max(1, tp // whole.kv_heads)
    assert 0 <= tp * part.params() - whole.params() <= (tp - 1) * repeated + kv_repeats * whole.params() // 20
    assert tp * part.kv_bytes_per_token() == kv_repeats * whole.kv_bytes_per_token()
    assert part.name == name


@pytest.mark.parametrize(
    ("name", "tp", "published"),
    [("opt-13b", 1, 66_144), ("opt-13b", 2, 163_008), ("opt-66b", 4, 78_496)],
)
def test_kv_capacity_is_that_of_distserves_table(name: str, tp: int, published: int) -> None:
    """DistServe:simdistserve max_num_tokens.csv, A100-80GB at 95 % of memory."""
    plan = load_cost(name, "a100-80gb-sxm", "spec", {"tp": tp}).memory(
        gpu_memory_utilization=0.95, max_tokens=2048
    )
    assert plan.kv_tokens == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize("launch", [PREFILL, DECODE])
def test_eight_gpus_are_faster_than_one_but_not_eight_times(launch: Launch) -> None:
    alone, shared = ONE.solo(launch), EIGHT.solo(launch)
    rings = [part for part in shared.by_operator if part.name.startswith("all")]
    assert [part.calls for part in rings] == [1, 80, 80, 1]
    assert all("extrapolated" in part.label for part in rings)
    assert 2 < alone.gpu_s / shared.gpu_s < 8
    without = shared.gpu_s - sum(part.seconds for part in rings)
    assert alone.gpu_s / without == pytest.approx(8, rel=0.45)
    assert 8 * shared.flops == pytest.approx(alone.flops, rel=1e-3)


def test_a_ring_costs_its_hops_and_its_bytes() -> None:
    gpu = load_gpu("h100-sxm")
    curve = RingCurve(gpu, 4, "")
    seconds = curve.timing(Elementwise(np.array([1024]), 16384), gpu.sms).seconds[0]
    carried = 1.5 * 1024 * 16384 / (RING_SHARE * 450e9)
    assert seconds == pytest.approx(RING_FIXED_S + 6 * RING_HOP_S + carried, rel=1e-12)
    slow = RingCurve(load_gpu("l40s"), 4, "")
    assert slow.timing(Elementwise(np.array([1024]), 16384), 142).seconds[0] > 4 * seconds


def test_price_tables_hold_the_rings() -> None:
    p, one = (
        cost.compile(max_tokens=256, max_seqs=8, max_context=4096, compiled=True) for cost in (EIGHT, ONE)
    )
    ring = sum(part.seconds for part in EIGHT.solo(DECODE).by_operator if part.name.startswith("all"))
    assert ring < p.dense_graph_s[16] + p.head_s[8] < one.dense_graph_s[16] / 3
    assert EIGHT.profile_hash != ONE.profile_hash


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        ("llama-3.1-8b", 16, "1 to the 8 GPUs of one machine"),
        ("yi-34b", 3, "tp = 3 does not divide the 56 query heads"),
        ("llama-3.1-8b", 0, "tp"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(model: str, tp: int, message: str) -> None:
    with pytest.raises(SimctlError, match=message):
        load_cost(model, "h100-sxm", "spec", {"tp": tp})


def test_a_model_that_does_not_fit_a_group_shows_the_arithmetic() -> None:
    cost = load_cost("llama-3.1-405b", "h100-sxm", "spec", {"tp": 8})
    with pytest.raises(
        SimctlError, match=r"does not fit on 8 x h100-sxm \(each holds a shard\).*94\.50 GiB of weights"
    ):
        cost.memory()


def test_half_the_power_slows_prompts_and_leaves_decode_alone() -> None:
    """Splitwise section 3.6: H100 at 350 of 700 W; its table has prompts at 1.3 times, decode unchanged."""
    free, half = (load_cost("llama-2-70b", "h100-sxm", "spec", {"tp": 8}, power_cap_w=w) for w in (None, 350))
    prompt = half.solo(PREFILL).gpu_s / free.solo(PREFILL).gpu_s
    decode = half.solo(DECODE).gpu_s / free.solo(DECODE).gpu_s
    assert 1.1 < prompt < 1.4
    assert 1.0 <= decode < 1.02
    assert "power cap of 350 W" in half.provenance()["gemm/qkv"]
    assert half.profile_hash != free.profile_hash


def test_the_lower_the_cap_the_slower_and_never_above_it() -> None:
    seconds = []
    for watts in (None, 600, 450, 300, 200):
        cost = load_cost("llama-3.1-8b", "h200-sxm", "spec", power_cap_w=watts)
        step = cost.solo(Launch(((8192, 0),)))
        seconds.append(step.gpu_s)
        assert step.watts <= (watts or 700)
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.5 * seconds[0]
    # a compute-bound kernel's draw above idle falls with the cube of its clock
    gemm = [
        next(part.seconds for part in load_cost("llama-3.1-8b", "h200-sxm", "spec", power_cap_w=w)
             .solo(Launch(((8192, 0),))).by_operator if part.name == "gemm/gate_up")
        for w in (None, 450)
    ]  # fmt: skip
    assert gemm[1] / gemm[0] == pytest.approx(((682 - 97) / (450 - 97)) ** (1 / 3), rel=0.05)


def test_a_cap_near_what_the_board_draws_anyway_slows_decode_too() -> None:
    """The joules of a byte hardly follow the clock, so that the watts that are left bound the bytes a second."""
    free, low, lowest = (
        load_cost("llama-3.1-8b", "h200-sxm", "auto", power_cap_w=w) for w in (None, 300, 200)
    )
    step = Launch((), 64, 64 * 2048, graph=True)
    seconds = [cost.solo(step).gpu_s for cost in (free, low, lowest)]
    assert 1.3 < seconds[1] / seconds[0] < 2.5
    assert seconds[2] / seconds[1] > 2.0
    assert lowest.solo(step).watts <= 200
    # what is left for work bounds the joules that the cheapest clock costs
    terms = free.energy
    moved = free.solo(step).hbm_bytes
    clocked = (terms.j_per_byte - DRAM_J_PER_BYTE) * terms.slowest_clock**terms.clock_power
    least_j = (DRAM_J_PER_BYTE + clocked) * moved
    assert seconds[2] >= 0.9 * least_j / (200 - terms.idle_w - terms.active_w)


@pytest.mark.parametrize(
    ("gpu", "watts", "message"),
    [
        ("h100-sxm", 700, "has no effect: the TDP"),
        ("h200-sxm", 149, "lowest power limit of h200-sxm is 200 W"),
        ("l40s", 30, "draws 35 W before it computes anything"),
    ],
)
def test_a_cap_that_cannot_be_or_never_binds_is_refused(gpu: str, watts: float, message: str) -> None:
    with pytest.raises(SimctlError, match=message):
        load_cost("llama-3.1-8b", gpu, "spec", power_cap_w=watts)


def test_a_cap_keeps_what_the_longest_context_costs() -> None:
    free, capped = (load_cost("llama-3.1-8b", "h200-sxm", power_cap_w=cap) for cap in (None, 400.0))
    batch = np.array([8, 40, 100])
    assert (free.overhang_s(batch, 132) > 0).all()
    np.testing.assert_array_equal(capped.overhang_s(batch, 132), free.overhang_s(batch, 132))

"""SM-seconds by counters: shares by CTAs and waves, kernels alone and in a step, and files that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.activity import Activity, Terms, activity_data, load_activity
from sim.cost.gpu import load_gpu
from sim.cost.shapes import DecodeAttention, Elementwise, Gemm, Launch, PrefillAttention, Timing
from sim.errors import SimctlError

H200 = load_gpu("h200-sxm")
PLAIN = Activity(
    H200,
    {
        "elementwise": Terms(1.0, launch_s=2e-6),
        "decode": Terms(1.0, launch_s=2e-6, partial=0.25),
        "prefill": Terms(0.9, start_s=1e-6),
    },
    {(100, 200): ((1, 64), (0.5, 0.8)), (300, 200): ((1, 64), (0.7, 0.9))},
    "made up",
    parted=0.9,
)
TEN_US = Timing(np.array([1e-5]), np.array([1e-5 * 132]))


def share(operator: str, shape: object, sms: int = 132, base: Timing = TEN_US) -> float:
    found = PLAIN.timing(operator, shape, base, sms)  # type: ignore[arg-type]
    return float(found.sm_s[0] / (found.seconds[0] * sms))


def decode(batch: int) -> DecodeAttention:
    return DecodeAttention(np.array([batch]), np.array([batch * 1000.0]), 32, 8, 128, 2, None)


def test_rows_hold_an_sm_each() -> None:
    norm = Elementwise(np.array([33]), 8192)
    assert share("norm/input", norm) == pytest.approx(33 / 132)
    assert share("norm/input", norm, sms=16, base=Timing(np.array([1e-5]), np.array([1e-5 * 16]))) == 1.0
    assert share("rope", norm) == 1.0  # several CTAs a row
    alone = PLAIN.alone("norm/input", norm, TEN_US, 132)
    assert alone[0] == pytest.approx(33 / 132 * 10 / 12)  # 2 us to launch


def test_linear_layers_as_counted_between_sizes_and_for_others() -> None:
    def gemm(m: int, n: int) -> Gemm:
        return Gemm(np.array([m]), n, 200, 2)

    assert share("gemm/qkv", gemm(8, 100)) == pytest.approx(0.65)  # half way in doublings
    assert share("gemm/qkv", gemm(500, 100)) == pytest.approx(0.8)
    assert share("gemm/qkv", gemm(64, 999)) == pytest.approx(0.85)
    half = Timing(np.array([1e-5]), np.array([1e-5 * 66]))
    assert share("gemm/qkv", gemm(1, 100), sms=66, base=half) == pytest.approx(
        0.9
    )  # all 66, less what parts lose


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (4, 1.0),  # split to fill the GPU
        (33, 1.0),  # 264 CTAs: one wave of two an SM
        (66, 1.0),
        (48, (1 + (120 / 264) ** 2) / (1 + 120 / 264)),
        (36, (1 + 0.25 * 24 / 264) / 1.25),  # a wave of 24 CTAs takes a quarter of one at least
    ],
)
def test_waves_of_decode_attention(batch: int, expected: float) -> None:
    assert share("decode_attention", decode(batch)) == pytest.approx(expected)


def test_prefill_as_its_curve_deals_blocks_and_every_sm_starts() -> None:
    base = Timing(np.array([1e-5]), np.array([0.6e-5 * 132]))
    shape = PrefillAttention(np.array([512]), np.array([0]), 32, 8, 128, 2, None)
    assert share("prefill_attention", shape, base=base) == pytest.approx(0.9 * 0.6 + 0.1 * 0.4)


def test_seconds_never_change_and_no_sm_works_overtime() -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm", "auto")
    bare = replace(cost, profile=replace(cost.profile, activity=None))
    for launch in (
        Launch(((2048, 0),)),
        Launch((), 48, 48 * 2000, 9000, graph=True),
        Launch(((300, 700),), 20, 20000),
    ):
        for sms in (132, 64, 16):
            ours, theirs = cost.solo(launch, sms), bare.solo(launch, sms)
            assert ours.gpu_s == theirs.gpu_s
            assert 0.3 * sms * ours.gpu_s < ours.sm_active <= sms * ours.gpu_s


def test_steps_are_as_active_as_gpm_saw_them() -> None:
    """Held for a second on an H200 (power.csv.gz, GPM): no counter of a step is in any fit."""
    cost = load_cost("llama-3.1-8b", "h200-sxm", "auto")
    for launch, counted in (
        (Launch(((2048, 0),)), 0.949),
        (Launch(((512, 4096),)), 0.921),
        (Launch((), 64, 64 * 2048, graph=True), 0.824),
        (Launch((), 256, 256 * 1024, graph=True), 0.907),
        (Launch((), 8, 8 * 1024, graph=True), 0.711),
    ):
        step = cost.solo(launch)
        assert step.sm_active / step.gpu_s / 132 == pytest.approx(counted, abs=0.03)


def test_a_file_comes_back_as_it_went_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "activity.json"
    path.write_text(json.dumps(activity_data(PLAIN)))
    assert load_activity(path, H200, "made up", "") == PLAIN
    data = activity_data(PLAIN)
    for broken, message in (
        ({**data, "families": {"gemms": data["families"]["decode"]}}, "unknown family 'gemms'"),
        ({**data, "families": {"decode": {"kept": 1.0}}}, "must hold values of 0 or more"),
        ({key: value for key, value in data.items() if key != "counted"}, "KeyError 'counted'"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(SimctlError, match=message):
            load_activity(path, H200, "", "")

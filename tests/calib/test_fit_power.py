"""Terms of watts out of made-up measurements, what is held out, pauses, and reaction times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib import rows
from calib.fit.points import read_rows
from calib.fit.power import BACKEND, beyond_share, fit_power, idle_watts, reaction_s, read_held
from sim.cost import load_cost
from sim.cost.energy import DRAM_J_PER_BYTE, EnergyTerms
from sim.cost.gpu import load_gpu
from sim.cost.shapes import Launch

H200 = load_gpu("h200-sxm")
TRUE = EnergyTerms(
    idle_w=120.0,
    active_w=30.0,
    j_per_flop=1.1e-12,
    j_per_byte=9e-11,
    more_per_prefill_flop=2e-13,
    more_per_decode_flop=5e-12,
    more_per_element_byte=3e-11,
    cap_w=690.0,
    clock_power=1.6,
    label="made up",
)


def drawn(kind: str, flops: float, moved: float, seconds: float) -> tuple[float, float]:
    """Watts and MHz of work of one kind at the clock that the limit leaves."""
    joules = float(TRUE.work_j(kind, flops, moved))
    clock = float(TRUE.clock(joules, moved, seconds))
    rest = (joules - DRAM_J_PER_BYTE * moved) * clock**TRUE.clock_power + DRAM_J_PER_BYTE * moved
    return TRUE.idle_w + TRUE.active_w + rest / seconds, 1980 * clock


def write(folder: Path, sweep: str, made: list[dict[str, Any]]) -> None:
    (folder / "measurements").mkdir(parents=True, exist_ok=True)
    whole = [rows.row(sweep, model="llama-3.1-8b", launch="graph", **row) for row in made]
    rows.write_table(whole, folder / "measurements" / f"{sweep}.csv.gz")


def singles() -> list[dict[str, Any]]:
    """Operators from light to heavy."""
    made = []
    for n, (kind, flops, moved) in enumerate(
        [("gemm", f, b) for f in (5e10, 2e11, 4e11, 6e11, 7e11) for b in (1e7, 3e8, 1.5e9)]
        + [("prefill_attention", f, 5e7) for f in (1e11, 3e11, 5e11)]
        + [("decode_attention", 1e10 * share, 4e9 * share) for share in (0.3, 0.7, 1.0)]
        + [("norm", 1e6, 3.5e9 * share) for share in (0.4, 0.8, 1.0)]
    ):
        watts, mhz = drawn(kind, flops, moved, 1e-3)
        extra = {"attention": BACKEND} if kind == "prefill_attention" else {}
        made.append(
            {
                "kind": kind, "flops": flops, "bytes": moved, "time_s": 1e-3, "elapsed_s": 1.6, "sms": 132,
                "power_w": watts, "sm_mhz": mhz, "point": f"p{n}", **extra,
            }
        )  # fmt: skip
    return made


def step_row(cost: Any, launch: Launch, point: str, kind: str, **shape: Any) -> dict[str, Any]:
    parts = cost.solo(launch).by_operator
    seconds = 0.02
    joules = sum(float(TRUE.work_j(one.name, one.flops, one.hbm_bytes)) for one in parts)
    watts = min(TRUE.cap_w, TRUE.idle_w + TRUE.active_w + joules / seconds)
    flops, moved = sum(one.flops for one in parts), sum(one.hbm_bytes for one in parts)
    return {
        "kind": kind, "flops": flops, "bytes": moved, "time_s": seconds, "elapsed_s": 1.6, "sms": 132,
        "power_w": watts, "sm_mhz": 1980.0, "point": point, "layers": 32, **shape,
    }  # fmt: skip


def test_terms_come_back_from_single_operators_and_steps_are_held_out(tmp_path: Path) -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    decode = step_row(
        cost, Launch((), 16, 16000, graph=True), "s1", "decode_step", decode_batch=16, context_sum=16000
    )
    prefill = step_row(
        cost, Launch(((256, 512),)), "s2", "prefill_step", q_tokens="256", history_tokens="512"
    )
    write(tmp_path, "power", [*singles(), decode, {**prefill, "power_w": 1.1 * prefill["power_w"]}])
    terms, errors = fit_power(tmp_path, H200, 1980.0)
    for name in ("j_per_flop", "j_per_byte", "more_per_decode_flop", "clock_power"):
        assert terms[name] == pytest.approx(getattr(TRUE, name), rel=0.03), name
    assert terms["idle_w"] + terms["active_w"] == pytest.approx(150.0, rel=0.03)
    assert terms["cap_w"] == pytest.approx(690.0, rel=0.01)
    held = errors["held_out"]
    assert held["all"]["points"] == 2
    assert held["decode_step"]["median"] < 0.02
    assert held["prefill_step"]["bias"] == pytest.approx(1 / 1.1 - 1, abs=0.02)
    assert errors["fitted"]["all"]["p95"] < 0.02
    assert "2 steps, fused and side-by-side runs" in terms["label"]


def test_two_sides_are_one_run_of_both_ones_work(tmp_path: Path) -> None:
    shape = {"elapsed_s": 1.0, "power_w": 650.0, "sm_mhz": 1700.0, "point": "x", "neighbour_kind": "y"}
    sides = [
        {
            **shape,
            "kind": "prefill_layer",
            "q_tokens": "512",
            "history_tokens": "0",
            "sms": 64,
            "time_s": 1e-3,
        },
        {**shape, "kind": "decode_step", "decode_batch": 8, "context_sum": 8000, "sms": 68, "time_s": 1e-2},
    ]
    write(tmp_path, "power_mix", sides)
    (both,) = read_held(tmp_path, H200, 1980.0)
    assert (both.kind, both.single) == ("side by side", False)
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    layer = cost.solo(Launch(((512, 0),), layers=(1, 2)))
    step = cost.solo(Launch((), 8, 8000, graph=True))
    assert both.work[0] == pytest.approx(layer.flops / 1e-3 + step.flops / 1e-2)
    assert both.work[3] == pytest.approx(layer.hbm_bytes / 1e-3 + step.hbm_bytes / 1e-2)


def test_nothing_is_claimed_without_measurements(tmp_path: Path) -> None:
    (tmp_path / "measurements").mkdir()
    assert fit_power(tmp_path, H200, 1980.0) == ({}, {})
    assert reaction_s(tmp_path) is None
    assert idle_watts(tmp_path) is None


def test_idle_watts_are_what_long_pauses_leave(tmp_path: Path) -> None:
    busy = {"kind": "decode_step", "decode_batch": 8, "time_s": 5e-3, "sm_mhz": 1980.0, "sms": 132}
    made = [{**busy, "gap_s": 0.0, "power_w": 480.0, "point": "a"}]
    made += [{**busy, "gap_s": 0.2, "power_w": (480 * 5e-3 + 124 * 0.2) / 0.205, "point": "b"}]
    write(tmp_path, "power_duty", made)
    assert idle_watts(tmp_path) == pytest.approx(124.0, rel=1e-3)


def test_what_runs_with_pauses_draws_tells_what_is_asked_for_beyond_the_limit(tmp_path: Path) -> None:
    shape = {"kind": "prefill_layer", "q_tokens": "2048", "history_tokens": "0", "time_s": 1.2e-3, "sms": 132}
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    layer = cost.solo(Launch(((2048, 0),), layers=(1, 2)))
    joules = sum(float(TRUE.work_j(one.name, one.flops, one.hbm_bytes)) for one in layer.by_operator)
    asked = 150.0 + joules / 1.2e-3
    assert asked > 800
    mean = 0.5 * (690 + 0.6 * (asked - 690)) + 0.5 * 120
    made = [{**shape, "gap_s": gap, "power_w": watts, "sm_mhz": mhz, "point": str(gap)}
            for gap, watts, mhz in ((1e-5, 690.0, 1500.0), (1.2e-3, mean, 1980.0))]  # fmt: skip
    write(tmp_path, "power_duty", made)
    assert beyond_share(read_rows(tmp_path, "power_duty"), TRUE, H200)["beyond"] == pytest.approx(
        0.6, abs=0.02
    )


def test_reaction_is_the_area_under_what_is_left_of_a_change(tmp_path: Path) -> None:
    at = np.arange(0.005, 0.3, 0.01)
    made = []
    for phase in (0, 1):
        for t in at:
            time_s = 1e-3 * (1.0 + 0.2 * (1.0 - np.exp(-t / 0.04))) if phase else 1e-3
            made.append({"kind": "gemm", "phase": phase, "elapsed_s": t, "time_s": time_s, "point": "a"})
    write(tmp_path, "clock_step", made)
    assert reaction_s(tmp_path) == pytest.approx(0.04, abs=0.008)


def test_the_clock_falls_with_the_draw_that_is_asked_for() -> None:
    asked = [float(TRUE.clock(watts * 1.0, 0.0, 1.0)) for watts in (300.0, 540.0, 700.0, 1000.0)]
    assert asked[:2] == [1.0, 1.0]  # 150 + 540 is the limit
    assert asked[2] == pytest.approx((540 / 700) ** (1 / 1.6))
    assert asked[3] < asked[2]
    heavy = [one for one in singles() if one["sm_mhz"] < 1900]
    assert heavy
    assert all(one["power_w"] == pytest.approx(690.0) for one in heavy)

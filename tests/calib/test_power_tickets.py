"""Sustained power out of a counter, synthetic CTAs, counters: what is read and what becomes of it, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calib import rows
from calib.counters import read, shapes
from calib.device import Meter, Reading
from calib.energy import Watch
from calib.fake import FakeLab
from calib.fit.hosts import power_runs
from calib.kernels.tickets import ALONE, LOOP_BYTES, RULES, Mix, works
from calib.measure import FULL
from calib.models import MODELS
from calib.run import Order, calibrate
from calib.sweeps import chosen_sweeps
from calib.sweeps.fused import FusedRandomSweep, FusedSweep, balanced, variants_of
from calib.sweeps.power import BESIDE_SEED, MIXES, TicketSweep

MODEL = MODELS["llama-3.1-8b"]


def lab() -> FakeLab:
    return FakeLab(MODEL, FULL, 0)


def test_power_is_the_slope_of_the_settled_part() -> None:
    watch = Watch(Meter(), 2.0)
    # 200 W while it settles, 650 W from then on, read at uneven times
    at = np.sort(np.random.default_rng(0).uniform(0, 2, 80))
    joules = np.where(at < 0.8, 200 * at, 160 + 650 * (at - 0.8))
    watch.seen = [(float(t), float(e), Reading(1500.0, 600.0, True)) for t, e in zip(at, joules, strict=True)]
    assert watch.power_w() == pytest.approx(650.0)
    assert 0 < len(watch.readings()) < 80
    watch.seen = [(float(t), float("nan"), Reading()) for t in at]
    assert watch.power_w() is None


def test_counters_of_a_meter_without_them_are_empty() -> None:
    class Nvml:
        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
            return "handle"

    meter = Meter(nvml=Nvml())
    assert meter.gpm_sample() is None
    assert meter.gpm_between(None, None) == {}


def test_held_runs_say_watts_joules_and_both_times(tmp_path: Path) -> None:
    calibrate(lab(), Order(tmp_path / "out", chosen_sweeps(["power"], 0, 0)))
    table = rows.read_table(tmp_path / "out" / "measurements" / "power.csv.gz")
    solo = table[table["neighbour_kind"].isna()]
    hot = solo[solo["elapsed_s"] > 0]
    assert len(hot) == len(solo) / 2  # a rested row for each
    np.testing.assert_allclose(hot["energy_j"], hot["power_w"] * hot["time_s"], rtol=1e-4)
    beside = table[table["neighbour_kind"].notna()]
    assert set(beside["neighbour_mode"]) == {"disjoint", "streams"}
    assert beside["energy_j"].isna().all()  # watts are of the board: of neither side alone
    runs = power_runs(tmp_path / "out")
    assert len(runs) == hot["kind"].str.endswith("_step").sum()
    assert all(one["power_w"] > 0 for one in runs)


@given(st.integers(0, 99), st.integers(1, 400), st.integers(1, 300))
def test_alike_jobs_are_alike_and_spread_ones_seeded(seed: int, count: int, work: int) -> None:
    assert works(seed, count, work, 0.0) == [work] * count
    spread = works(seed, count, work, 1.5)
    assert spread == works(seed, count, work, 1.5)
    assert min(spread) >= 1
    assert len(spread) == count


def test_work_of_a_mix() -> None:
    mix = Mix("proportional", 3, 5, 100, 20)
    assert mix.bytes == 5 * 20 * LOOP_BYTES
    assert LOOP_BYTES == 16384
    assert mix.loops() == ([100] * 3, [20] * 5)
    columns = mix.columns()
    assert (columns["compute_ctas"], columns["bandwidth_work"], columns["label"]) == (3, 20, "proportional")


def test_every_mix_runs_by_every_rule_and_each_side_alone() -> None:
    points = TicketSweep().points(lab(), True)
    both = [p["mix"] for p in points if p["sms"] == 132 and p["mix"]["computes"] and p["mix"]["bandwidths"]]
    whole = [m for m in both if m["seed"] < BESIDE_SEED]
    beside = {(m["seed"], m["rule"]) for m in both if m["seed"] >= BESIDE_SEED}
    assert len(beside) == len(both) - len(whole) == 32
    assert len(whole) == MIXES * len(RULES)
    for draw in range(MIXES):
        mine = [m for m in whole if m["seed"] == draw]
        assert {m["rule"] for m in mine} == set(RULES)
        assert len({(m["computes"], m["bandwidths"], m["spread"]) for m in mine}) == 1
    alone = [p["mix"] for p in points if p["mix"]["rule"] in ALONE]
    assert all((m["computes"] == 0) != (m["bandwidths"] == 0) for m in alone)
    stress = [p for p in points if p["sms"] < 132]
    assert {p["sms"] for p in stress} == {8, 16, 64, 100}
    assert all(p["mix"]["spread"] > 1 for p in stress)


def test_the_mixs_own_seed_reaches_its_row(tmp_path: Path) -> None:
    calibrate(lab(), Order(tmp_path / "out", [TicketSweep()], seed=7))
    table = rows.read_table(tmp_path / "out" / "measurements" / "tickets.csv.gz")
    assert set(range(MIXES)) <= set(table["seed"])
    assert (table["span_s"] <= table["time_s"]).all()


def test_a_prefix_of_the_fused_sweep_is_mostly_balanced() -> None:
    bench, sweep = lab(), FusedSweep()
    points = sweep.order(bench, sweep.points(bench, True), 0)
    share = np.mean([balanced(bench, p) for p in points[9:309]])
    assert share == pytest.approx(0.8, abs=0.05)
    assert points == sweep.order(bench, sweep.points(bench, True), 0)


def test_random_shapes_are_seeded_and_off_the_grid() -> None:
    bench = lab()
    drawn = FusedRandomSweep(40, 3).points(bench, True)
    assert drawn == FusedRandomSweep(40, 3).points(bench, True)
    assert drawn != FusedRandomSweep(40, 4).points(bench, True)
    grid = {(p["q"][0], p["h"][0]) for p in FusedSweep().points(bench, True)}
    assert not grid & {(p["q"][0], p["h"][0]) for p in drawn}
    assert any(len(set(p["contexts"])) > 1 for p in drawn)


def test_a_refusing_variant_leaves_the_others_of_its_shape() -> None:
    class Refusing(FakeLab):
        def time(self, kernel: Any, sms: int, launch: str = "graph", priority: str = "normal") -> Any:
            if getattr(kernel, "variant", "") == "pod":
                raise RuntimeError("not for this\nshape")
            return super().time(kernel, sms, launch, priority)

    bench = Refusing(MODEL, FULL, 0)
    sweep = FusedSweep()
    point = sweep.points(bench, True)[0]
    found = sweep.measure(bench, point)
    assert [row.get("attention") for row in found] == list(variants_of(point))
    refused = [row for row in found if "skip" in row]
    assert [row["skip"] for row in refused] == ["RuntimeError: not for this shape"]
    assert refused[0]["attention"] == "pod"
    assert variants_of({"q": [1, 2]}) == tuple(v for v in variants_of({"q": [1]}) if v != "pod")


def test_a_wrong_result_is_not_timed() -> None:
    class Wrong(FakeLab):
        def error(self, kernel: Any) -> float:
            return 0.5 if getattr(kernel, "variant", "") == "batched" else 1e-3

    bench = Wrong(MODEL, FULL, 0)
    sweep = FusedSweep()
    found = sweep.measure(bench, sweep.points(bench, True)[0])
    skipped = {row["attention"]: row["skip"] for row in found if "skip" in row}
    assert skipped == {"batched": "CalibrationError: relative error 0.5 against float32"}


def log(kernels: list[tuple[str, float, float]]) -> list[str]:
    """ncu's raw CSV: names, microseconds, per cent of SM cycles."""
    lines = [
        '"ID","Kernel Name","gpu__time_duration.sum","sm__cycles_active.avg.pct","sm__pipe_tensor_cycles_active"'
    ]
    lines.append('"","","us","%","%"')
    lines += [f'"{i}","{name}","{us}","{share}","10"' for i, (name, us, share) in enumerate(kernels)]
    return ["==PROF== noise", *lines]


def test_kernels_between_marks_are_one_shape_weighted_by_time() -> None:
    count = len(shapes())
    kernels = [("hold(long long)", 1.0, 1.0), ("a", 30.0, 90.0), ("b", 10.0, 50.0)]
    kernels += [("hold(long long)", 1.0, 1.0), ("a", 2.0, 70.0)] * (count - 1)
    found = read(log(kernels))
    assert len(found) == count
    assert found[0]["time_s"] == pytest.approx(40e-6)
    assert found[0]["sm_active"] == pytest.approx((30 * 0.9 + 10 * 0.5) / 40)
    assert found[0]["count"] == 2
    assert found[1]["tensor_active"] == pytest.approx(0.1)
    assert len(read(log(kernels[:-2]))) == count - 1  # cut short
    with pytest.raises(ValueError, match="shapes in the log"):
        read(log(kernels + kernels[:2]))


def test_a_row_names_the_model_of_its_point(tmp_path: Path) -> None:
    calibrate(lab(), Order(tmp_path / "out", chosen_sweeps(["shapes"], 0, 0)))
    table = rows.read_table(tmp_path / "out" / "measurements" / "shapes.csv.gz")
    assert {"llama-2-7b", "llama-3.1-70b-tp8"} <= set(table["model"])
    mine = {(n, k) for n, k in map(MODEL.linear, ("qkv", "o", "gate_up", "down"))}
    gemms = table[table["kind"] == "gemm"]
    assert not mine & set(zip(gemms["n"], gemms["k"], strict=True))
    said = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert said["model"] == MODEL.name

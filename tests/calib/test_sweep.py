"""Sweeps on the fake bench: coarse-to-fine order, checkpoints that survive a kill, budgets, failures as rows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calib import rows
from calib.bench import Bench
from calib.fake import FakeLab
from calib.measure import QUICK, SMOKE
from calib.models import MODELS
from calib.run import Order, calibrate
from calib.sweep import BrokenContext, Point, Sweep, bisection_levels, coarse_first
from calib.sweeps import all_sweeps, chosen_sweeps
from calib.sweeps.common import SoloSweep, near_sizes, size_beside, sizes
from calib.sweeps.corun import CorunSweep
from calib.sweeps.others import RandomSweep
from sim.errors import SimctlError

MODEL = MODELS["llama-3.1-8b"]


class Norms(SoloSweep):
    name = "norms"
    axes = ("m",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        return [{"kind": "norm", "m": m, "sms": 132} for m in range(1, 41)]


class Broken(Norms):
    """Fails at m = 7, and breaks the context at m = 13."""

    name = "broken"
    axes = ("late",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        return [{**point, "late": point["m"]} for point in super().points(lab, full)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        if point["m"] == 7:
            raise RuntimeError("no kernel image\nis available")
        if point["m"] == 13 and not getattr(lab, "repaired", False):
            lab.broken = True  # type: ignore[attr-defined]
            raise RuntimeError("illegal memory access")
        return super().measure(lab, point)


def fake(seed: int = 0) -> FakeLab:
    return FakeLab(MODEL, QUICK, seed)


def test_bisection_levels() -> None:
    assert bisection_levels(9) == [0, 3, 2, 3, 1, 3, 2, 3, 0]
    assert bisection_levels(1) == [0]
    assert bisection_levels(2) == [0, 0]


@given(st.integers(2, 20), st.integers(2, 20), st.integers(0, 99))
def test_a_prefix_covers_the_corners_of_the_space(a: int, b: int, seed: int) -> None:
    points = [{"q": q, "h": h} for q, h in product(range(a), range(b))]
    ordered = coarse_first(points, ("q", "h"), seed)
    assert sorted(map(str, ordered)) == sorted(map(str, points))
    assert {(p["q"], p["h"]) for p in ordered[:4]} == set(product((0, a - 1), (0, b - 1)))


def test_any_prefix_leaves_no_wide_gap() -> None:
    points = [{"m": m} for m in range(129)]
    for count, gap in ((5, 64), (9, 32), (17, 16), (33, 8)):
        held = sorted(p["m"] for p in coarse_first(points, ("m",), 3)[:count])
        assert max(b - a for a, b in pairwise(held)) <= gap


def test_the_whole_gpu_comes_first_and_late_points_last() -> None:
    points = [{"sms": s, "late": late} for s in (8, 64, 112, 132) for late in (0, 9)]
    ordered = coarse_first(points, ("sms", "late"), 0, top=132)
    assert ordered[0] == {"sms": 132, "late": 0}
    assert all(p["late"] == 9 for p in ordered[4:])


def test_a_short_corun_budget_sees_every_mode_and_split() -> None:
    lab, sweep = fake(), CorunSweep()
    prefix = sweep.order(lab, sweep.points(lab, False), 1)[:300]
    modes = Counter(p["mode"] for p in prefix)
    assert modes["disjoint"] == pytest.approx(150, abs=5)
    assert set(modes) == {"disjoint", "whole", "streams", "half"}
    splits = Counter(p["sms"] for p in prefix if p["mode"] == "disjoint")
    assert set(splits) == {16, 32, 48, 64, 80, 96, 112}
    assert max(splits.values()) - min(splits.values()) <= 1
    chunks = Counter(p["a"]["q"][0] for p in prefix)
    assert len(chunks) == 6
    assert min(chunks.values()) >= 30


def test_order_depends_on_the_seed_only() -> None:
    points = [{"m": m, "sms": s} for m in range(30) for s in (8, 16)]
    assert coarse_first(points, ("m", "sms"), 5) == coarse_first(points, ("m", "sms"), 5)
    assert coarse_first(points, ("m", "sms"), 5) != coarse_first(points, ("m", "sms"), 6)


def test_a_run_leaves_one_table_a_sweep_and_no_checkpoint(tmp_path: Path) -> None:
    record = calibrate(fake(), Order(tmp_path / "out", [Norms()]))
    assert record["complete"]
    table = rows.read_table(tmp_path / "out" / "measurements" / "norms.csv.gz")
    assert sorted(table["m"]) == list(range(1, 41))
    assert set(table.columns) <= set(rows.COLUMNS)
    assert (table["time_s"] > 0).all()
    assert (table["p25_s"] <= table["p75_s"]).all()
    assert not (tmp_path / "out" / "checkpoint").exists()
    said = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert said["gpu"]["name"] == "Fake H200"
    assert said["sweeps"]["norms"]["rows"] == 40
    assert said["partitions"][0]["shared"] == 0
    assert said["protocol"]["least"] == QUICK.least


def test_the_same_seed_writes_the_same_times(tmp_path: Path) -> None:
    for name in ("a", "b"):
        calibrate(fake(3), Order(tmp_path / name, [Norms()], seed=3))
    a, b = (rows.read_table(tmp_path / n / "measurements" / "norms.csv.gz") for n in ("a", "b"))
    assert a.drop(columns="unix_s").equals(b.drop(columns="unix_s"))


def test_a_time_limit_stops_cleanly_and_resume_finishes(tmp_path: Path) -> None:
    lab = fake()
    record = calibrate(lab, Order(tmp_path / "out", [Norms()], time_limit_s=0.2))
    measured = record["sweeps"]["norms"]["measured"]
    assert 0 < measured < 40
    assert not record["complete"]
    assert lab.clock() < 0.3
    assert len(rows.read_table(tmp_path / "out" / "measurements" / "norms.csv.gz")) == measured
    record = calibrate(fake(), Order(tmp_path / "out", [Norms()], resume=True))
    assert record["complete"]
    table = rows.read_table(tmp_path / "out" / "measurements" / "norms.csv.gz")
    assert sorted(table["m"]) == list(range(1, 41))


def test_resume_drops_a_line_cut_short_by_a_kill(tmp_path: Path) -> None:
    calibrate(fake(), Order(tmp_path / "out", [Norms()], time_limit_s=0.2))
    path = tmp_path / "out" / "checkpoint" / "norms.jsonl"
    whole = path.read_bytes()
    held = whole.count(b"\n")
    path.write_bytes(whole[:-25])
    kept, size = rows.read_lines(path)
    assert len(kept) == held - 1
    assert size == whole[:-25].rfind(b"\n") + 1
    record = calibrate(fake(), Order(tmp_path / "out", [Norms()], resume=True))
    assert record["sweeps"]["norms"]["rows"] == 40
    table = rows.read_table(tmp_path / "out" / "measurements" / "norms.csv.gz")
    assert sorted(table["m"]) == list(range(1, 41))


def test_resume_of_a_finished_run_measures_nothing(tmp_path: Path) -> None:
    calibrate(fake(), Order(tmp_path / "out", [Norms()]))
    before = (tmp_path / "out" / "measurements" / "norms.csv.gz").read_bytes()
    lab = fake(9)
    calibrate(lab, Order(tmp_path / "out", [Norms()], resume=True))
    assert lab.clock() == 0.0
    assert (tmp_path / "out" / "measurements" / "norms.csv.gz").read_bytes() == before


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupt(runs: Any, run: Any, left: float) -> None:
        raise KeyboardInterrupt

    class Slow(Norms):
        def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
            lab._now += 0.4  # type: ignore[attr-defined]
            return super().measure(lab, point)

    with pytest.raises(KeyboardInterrupt):
        calibrate(fake(), Order(tmp_path / "out", [Slow()]), interrupt)
    assert len(rows.read_table(tmp_path / "out" / "measurements" / "norms.csv.gz")) == 3


def test_budgets_follow_weights_and_unused_time_passes_on(tmp_path: Path) -> None:
    class Endless(Norms):
        def __init__(self, name: str, weight: float, count: int) -> None:
            self.name, self.weight, self.count = name, weight, count

        def points(self, lab: Bench, full: bool) -> list[Point]:
            return [{"kind": "norm", "m": 1 + i, "sms": 132} for i in range(self.count)]

    sweeps = [Endless("short", 1.0, 3), Endless("light", 1.0, 4000), Endless("heavy", 3.0, 4000)]
    lab = fake()
    record = calibrate(lab, Order(tmp_path / "out", sweeps, time_limit_s=8.0))
    spent = {name: state["spent_s"] for name, state in record["sweeps"].items()}
    assert record["sweeps"]["short"]["measured"] == 3
    assert spent["heavy"] / spent["light"] == pytest.approx(3.0, rel=0.1)
    assert 7.9 < lab.clock() < 8.2


def test_a_failing_point_becomes_a_row_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    lab = fake()
    lab.repaired = True  # type: ignore[attr-defined]
    record = calibrate(lab, Order(tmp_path / "out", [Broken()]))
    assert record["sweeps"]["broken"] | {"spent_s": 0} == {
        "points": 40,
        "measured": 40,
        "rows": 40,
        "skipped": 1,
        "spent_s": 0,
    }
    table = rows.read_table(tmp_path / "out" / "measurements" / "broken.csv.gz")
    failed = table[table["skip"].notna()].iloc[0]
    assert failed["skip"] == "RuntimeError: no kernel image is available"
    assert (failed["kind"], failed["m"]) == ("norm", 7)


def test_a_broken_context_ends_the_process_with_data_and_resume_steps_over_it(tmp_path: Path) -> None:
    with pytest.raises(BrokenContext, match="illegal memory access"):
        calibrate(fake(), Order(tmp_path / "out", [Broken()]))
    table = rows.read_table(tmp_path / "out" / "measurements" / "broken.csv.gz")
    assert len(table) == 13
    record = calibrate(fake(), Order(tmp_path / "out", [Broken()], resume=True))
    assert record["complete"]
    assert record["sweeps"]["broken"]["skipped"] == 2


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    calibrate(fake(), Order(tmp_path / "out", [Norms()]))
    with pytest.raises(SimctlError, match="--resume"):
        calibrate(fake(), Order(tmp_path / "out", [Norms()]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(SimctlError, match="is not empty"):
        calibrate(fake(), Order(tmp_path / "other", [Norms()]))
    assert sorted(p.name for p in (tmp_path / "other").iterdir()) == ["notes.txt"]


def test_measurements_of_two_gpus_are_never_mixed(tmp_path: Path) -> None:
    calibrate(fake(), Order(tmp_path / "out", [Norms()]))
    path = tmp_path / "out" / "run.yaml"
    path.write_text(path.read_text().replace("Fake H200", "Fake H100"))
    with pytest.raises(SimctlError, match="never mixed"):
        calibrate(fake(), Order(tmp_path / "out", [Norms()], resume=True))


def test_a_single_operator_can_be_added_to_a_folder(tmp_path: Path) -> None:
    calibrate(fake(), Order(tmp_path / "out", [Norms()]))
    calibrate(fake(), Order(tmp_path / "out", chosen_sweeps(["stream_read"], 0, 0), resume=True))
    said = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert set(said["sweeps"]) == {"norms", "stream_read"}


def test_an_unknown_operator_names_the_nearest() -> None:
    with pytest.raises(SimctlError, match="Did you mean 'gemm'"):
        chosen_sweeps(["gem"], 0, 0)


@pytest.mark.parametrize("sweep", all_sweeps(3, 1), ids=lambda sweep: sweep.name)
def test_every_sweep_makes_valid_rows(sweep: Sweep) -> None:
    lab = FakeLab(MODEL, SMOKE, 0)
    listed = sweep.points(lab, False)
    points = sweep.order(lab, listed, 0)
    assert points
    assert sorted(map(str, points)) == sorted(map(str, listed))
    for point in points[:8]:
        for values in sweep.measure(lab, point):
            made = rows.row(sweep.name, **values)
            assert made["kind"]
            assert {"time_s", "kernel", "error"} & set(made)
            assert made.get("sms", 132) in lab.sizes()


def test_a_column_that_the_schema_does_not_have_is_an_error() -> None:
    with pytest.raises(KeyError, match="colour"):
        rows.row("x", colour="red")


def test_gemm_covers_both_sides_of_tile_edges_and_the_graph_steps() -> None:
    sweep = next(s for s in all_sweeps(0, 0) if s.name == "gemm")
    points = sweep.points(fake(), False)
    ms = {p["m"] for p in points if p["sms"] == 132}
    assert {127, 128, 129, 255, 256, 257, 511, 512, 513} <= ms
    assert set(range(32, 1025, 32)) | set(range(1088, 2049, 64)) <= ms
    assert len({p["sms"] for p in points}) >= 17


def test_partition_sizes_of_a_quick_run() -> None:
    lab = fake()
    assert near_sizes(lab) == [8, 16, 32, 48, 64, 80, 96, 112]
    assert sizes(lab, False) == sorted(
        [8, 16, 32, 48, 64, 80, 96, 112, 20, 36, 52, 68, 84, 100, 116, 124, 132]
    )
    assert len(sizes(lab, True)) == 33


def test_sizes_of_side_b_by_mode() -> None:
    lab = fake()
    assert size_beside(lab, 112, "disjoint") == 20
    assert size_beside(lab, 112, "half") == 76  # the rest and 56 of a's
    assert size_beside(lab, 112, "whole") == 132
    assert size_beside(lab, 132, "streams") == 132


def test_random_shapes_are_off_every_grid_and_seeded() -> None:
    lab = fake()
    grids = [p for sweep in all_sweeps(0, 0) for p in sweep.points(lab, True)]
    held = {(p["role"], p["m"]) for p in grids if p.get("kind") == "gemm" and "role" in p}
    drawn = RandomSweep(30, 5).points(lab, False)
    gemms = [(p["role"], p["m"]) for p in drawn if p.get("kind") == "gemm"]
    assert gemms
    assert not held & set(gemms)
    kinds = {p["kind"] for p in drawn if "kind" in p}
    assert {"gemm", "lm_head", "prefill_attention", "decode_attention", "mixed_step", "decode_step"} <= kinds
    assert any("a" in p for p in drawn)
    assert drawn == RandomSweep(30, 5).points(lab, False)
    assert drawn != RandomSweep(30, 6).points(lab, False)

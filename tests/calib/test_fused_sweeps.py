"""Scattered shapes, what a resumed sweep asks again, the log of CTAs, counters of each kernel: without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib import fused_counters, rows, timeline
from calib.fake import FakeLab
from calib.kernels.tickets import Mix
from calib.measure import FULL
from calib.models import MODELS, model_shape
from calib.run import Order, calibrate
from calib.sweeps import chosen_sweeps
from calib.sweeps.fused import FusedRandomSweep, FusedSweep
from calib.sweeps.fused_scatter import HEADS, HeadsRandomSweep, HeadsSweep, ScatterSweep

MODEL = MODELS["llama-3.1-8b"]


def sizes(point: dict[str, Any]) -> tuple[int, int, int, int]:
    return point["q"][0], point["h"][0], len(point["contexts"]), point["contexts"][0]


def test_scattered_shapes_are_fixed_and_none_is_held_out() -> None:
    lab = FakeLab(MODEL, FULL, 0)
    points = ScatterSweep().points(lab, True)
    assert points == ScatterSweep().points(lab, True)
    held_out = {sizes(p) for seed in (0, 77, 91) for p in FusedRandomSweep(120, seed).points(lab, True)}
    assert not held_out & {sizes(p) for p in points}
    grid = {p["q"][0] for p in FusedSweep().points(lab, True)}
    assert np.mean([p["q"][0] in grid for p in points]) < 0.2


def test_every_prefix_of_other_heads_has_some_of_all_and_fits_their_cache() -> None:
    lab = FakeLab(MODEL, FULL, 0)
    points = HeadsSweep().order(lab, HeadsSweep().points(lab, True), 0)
    assert len(points) == sum(count for _, _, count in HEADS)
    seen = {(p["model"], p.get("dtype", "bfloat16")) for p in points[:60]}
    assert seen == {(model, dtype) for model, dtype, _ in HEADS}
    most = 1 << 20
    for p in points:
        held = model_shape(p["model"]).kv_bytes_per_token / MODEL.kv_bytes_per_token
        q, h, batch, context = sizes(p)
        assert (q + h + batch * context) * max(held, 1.0) <= most
    drawn = HeadsRandomSweep(3).points(lab, True)
    assert drawn != HeadsRandomSweep(4).points(lab, True)
    assert not {sizes(p) for p in drawn} & {sizes(p) for p in points}


def test_a_resumed_sweep_asks_again_where_memory_or_a_module_lacked(tmp_path: Path) -> None:
    class Short(FakeLab):
        lacking = True

        def time(self, kernel: Any, sms: int, launch: str = "graph", priority: str = "normal") -> Any:
            if self.lacking and getattr(kernel, "variant", "") == "batch_pod" and kernel.q_lens == [2048]:
                raise OutOfMemoryError("full")
            if getattr(kernel, "variant", "") == "pod" and kernel.q_lens == [512]:
                raise RuntimeError("refused")
            return super().time(kernel, sms, launch, priority)

    class OutOfMemoryError(RuntimeError):
        pass

    lab = Short(MODEL, FULL, 0)
    sweeps = lambda: chosen_sweeps(["fused_shapes"], 0, 0)  # noqa: E731
    calibrate(lab, Order(tmp_path / "out", sweeps()))
    path = tmp_path / "out" / "measurements" / "fused_shapes.csv.gz"
    first = rows.read_table(path)
    lacked = first[first["skip"].fillna("").str.startswith("OutOfMemoryError")]
    refused = first[first["skip"].fillna("").str.startswith("RuntimeError")]
    assert len(lacked)
    assert len(refused)
    lab.lacking = False
    record = calibrate(lab, Order(tmp_path / "out", sweeps(), resume=True))
    again = rows.read_table(path)
    assert len(again) == len(first)  # the rows of a point measured again are replaced
    assert not again["skip"].fillna("").str.startswith("OutOfMemoryError").any()
    assert again["skip"].fillna("").str.startswith("RuntimeError").sum() == len(refused)
    assert record["sweeps"]["fused_shapes"]["skipped"] == len(refused)
    old = first[~first["point"].isin(lacked["point"])].set_index(["point", "attention"])["time_s"]
    new = again.set_index(["point", "attention"])["time_s"]
    assert new.loc[old.index].dropna().equals(old.dropna())


def test_latest_keeps_a_points_last_measurement() -> None:
    held = [
        {"point": "a", "unix_s": 1.0, "time_s": 1},
        {"point": "a", "unix_s": 1.0, "time_s": 2},
        {"point": "b", "unix_s": 1.0, "time_s": 3},
        {"point": "a", "unix_s": 2.0, "time_s": 4},
        {"time_s": 5},
    ]
    assert [item["time_s"] for item in rows.latest(held)] == [3, 4, 5]


def test_the_log_of_ctas_is_told_by_kind_from_the_first_start(tmp_path: Path) -> None:
    log = np.array([[0, 0, 5, 100, 300], [1, 0, 6, 90, 250], [1, -1, 7, 260, 265], [1, 1, 5, 300, 420]])
    found = timeline.ctas(Mix("proportional", 1, 2, 10, 10), log)
    assert [(one["kind"], one["sm"], one["start_ns"], one["end_ns"]) for one in found] == [
        (0, 5, 10, 210), (1, 6, 0, 160), (1, 5, 210, 330),
    ]  # fmt: skip
    both = timeline.ctas(Mix("horizontal", 3, 2, 10, 10), log[[0, 1, 3]])
    assert [one["kind"] for one in both] == [timeline.BOTH, timeline.BOTH, timeline.COMPUTE]
    more = timeline.ctas(Mix("intra_thread", 1, 3, 10, 10), log[[0, 1, 3]])
    assert [one["kind"] for one in more] == [timeline.BOTH, timeline.BANDWIDTH, timeline.BANDWIDTH]
    timeline.write(found, tmp_path / "a.csv.gz", "01234567")
    timeline.write(found, tmp_path / "b.csv.gz", "01234567")
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    held = timeline.read(tmp_path / "a.csv.gz")
    assert list(held.columns) == [*timeline.COLUMNS, "card"]
    assert held["card"].unique().tolist() == ["01234567"]


def test_each_kernel_between_marks_is_a_row_with_its_variant() -> None:
    names = ["ID", "Kernel Name", "gpu__time_duration.sum", "sm__warps_active.avg.pct"]
    names += ["launch__waves_per_multiprocessor", "launch__shared_mem_per_block_dynamic", "launch__grid_size"]
    names.append("sm__pipe_tensor_cycles_active.avg.pct")
    units = ["", "", "us", "%", "", "Kbyte/block", "", "%"]
    kernels = [
        ("hold(long long)", 1, 1, 1, 0, 1, 0),
        ("void f::Pod<a, b>(int)", 30, 25, 1.5, 65.5, "1,024", 40),
    ]
    kernels += [("Merge(x)", 4, 50, 0.5, 0, 64, 0), *kernels, kernels[0]]
    lines = [",".join(f'"{cell}"' for cell in line) for line in (names, units)]
    lines += [",".join(f'"{cell}"' for cell in (i, *kernel)) for i, kernel in enumerate(kernels)]
    found = fused_counters.read(["==PROF== noise", *lines])
    assert [one["kernel"] for one in found] == ["void f::Pod", "Merge(x)", "void f::Pod"]
    assert found[0]["time_s"] == pytest.approx(30e-6)
    assert (found[0]["waves"], found[0]["grid"], found[0]["smem_bytes"]) == (1.5, 1024, 65500.0)
    assert (found[0]["occupancy"], found[0]["tensor_active"]) == (0.25, 0.4)
    assert [one["label"] for one in found] == ["serial_fa2", "serial_fa2", "serial_fa3"]
    assert len(fused_counters.shapes()) == 30

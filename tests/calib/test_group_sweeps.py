"""Sweeps of several GPUs without any: sizes, rows of several ranks, the command, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from click.testing import CliRunner

from calib import rows
from calib.collectives.crew import CrewLab, row_of
from calib.collectives.curves import coverage, fit_collectives
from calib.collectives.fake import FakeCrew
from calib.collectives.knots import fitted
from calib.collectives.sizes import COLLECTIVES, bus_factor, grid_sizes, random_sizes
from calib.collectives.sweeps import crew_sweeps
from calib.collectives.timing import Piece
from calib.device import Reading
from calib.measure import QUICK
from calib.models import MODELS
from calib.sweeps import all_sweeps, chosen_sweeps
from sim.cli.calibrate import calibrate
from sim.cost.collectives_file import collectives_from_data
from sim.errors import CalibrationError, SimctlError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(calibrate, [*arguments], catch_exceptions=False, standalone_mode=False)
    return result.output


def test_sizes_hold_what_tokens_of_real_models_make() -> None:
    sizes = {size for size, _ in grid_sizes()}
    assert {2 * hidden << i for hidden in (4096, 8192) for i in range(14)} <= sizes
    assert (min(sizes), max(sizes)) == (1 << 10, 1 << 30)
    assert all(size % 16 == 0 for size in sizes)


def test_random_sizes_are_whole_rows_off_the_grid() -> None:
    sizes = random_sizes(50, 3)
    assert sizes == random_sizes(50, 3)
    assert sizes != random_sizes(50, 4)
    assert all(size % 8192 == 0 for size in sizes)
    assert len(set(sizes) - {size for size, _ in grid_sizes()}) > 30


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("allreduce", 2) == 1.0
    assert bus_factor("allreduce", 8) == 1.75
    assert bus_factor("allgather", 4) == 0.75
    assert bus_factor("sendrecv", 8) == 1.0


def test_a_sample_takes_as_long_as_its_slowest_rank() -> None:
    columns = {"kind": "allreduce", "message_bytes": 1024}
    pieces = [
        Piece(columns, [1e-5, 4e-5, 2e-5], "eager", 3e-6, [Reading(1900.0, 100.0, False)]),
        Piece(columns, [3e-5, 1e-5, 2e-5], "eager", 5e-6, [Reading(1700.0, 300.0, True)]),
    ]
    row = rows.row("allreduce", **row_of(pieces, 2))
    assert row["time_s"] == 3e-5
    assert (row["min_s"], row["max_s"], row["count"]) == (2e-5, 4e-5, 3)
    assert row["host_s"] == 5e-6
    assert (row["sm_mhz"], row["power_w"], row["throttled"]) == (1800.0, 200.0, 1)
    assert row["gpus"] == 2


def test_sides_of_a_corun_come_from_the_rank_that_is_slowest() -> None:
    pieces = [
        Piece({"kind": "gemm"}, [2e-3] * 9, alone=[1e-3] * 5),
        Piece({"kind": "gemm"}, [3e-3] * 7, alone=[2e-3] * 5),
        Piece({"kind": "gemm"}, []),
    ]
    row = row_of(pieces, 3)
    assert (row["time_s"], row["alone_s"], row["count"]) == (3e-3, 2e-3, 7)


def test_a_launch_that_a_rank_could_not_make_is_skipped_with_its_reason() -> None:
    pieces = [
        Piece({"kind": "sendrecv", "skip": "RuntimeError: no"}, [], "graph"),
        Piece({}, [1e-5], "graph"),
    ]
    assert row_of(pieces, 2)["skip"] == "RuntimeError: no"
    assert "time_s" not in row_of(pieces, 2)


def test_every_collective_has_a_sweep_and_one_name_means_all() -> None:
    names = [sweep.name for sweep in crew_sweeps(8, 0)]
    assert set(COLLECTIVES) <= set(names)
    assert names[-1] == "collective_kernels"  # it profiles: nothing is timed behind it
    assert sorted(s.name for s in chosen_sweeps(["collectives"], 8, 0)) == sorted(names)
    assert not {s.name for s in all_sweeps(8, 0)} & set(names)


def test_one_gpu_and_several_are_not_mixed_in_one_run() -> None:
    with pytest.raises(SimctlError, match=r"'allreduce' is measured on several GPUs and 'norm' on one"):
        chosen_sweeps(["norm", "allreduce"], 8, 0)


def test_points_name_every_column_that_a_skipped_row_needs() -> None:
    lab = CrewLab(MODELS["llama-3.1-8b"], QUICK, FakeCrew(2, 0))
    for sweep in crew_sweeps(4, 0):
        for full in (False, True):
            points = sweep.points(lab, full)
            assert points
            for point in points:
                rows.row(sweep.name, **sweep.shape(lab, point))


def test_a_fake_run_writes_rows_and_says_what_the_group_was(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run("--fake", "-o", str(folder), "--operator", "norm", "--time-limit", "0.5", "--no-fit", "-q")
    text = run("--fake", "-o", str(folder), "--operator", "allreduce", "--resume", "--no-fit", "-q")
    assert "allreduce" in text
    table = rows.read_table(folder / "measurements" / "allreduce.csv.gz")
    assert set(table.launch) == {"graph", "eager"}
    assert set(table.gpus) == {2}
    said = yaml.safe_load((folder / "run.yaml").read_text())
    assert said["group"]["link"]["links"] == 18
    assert said["group"]["gpus"] == 2
    assert set(said["sweeps"]) == {"norm", "allreduce"}
    assert len(said["partitions"]) > 1  # what the run on one GPU proved is kept


def test_fewer_than_two_gpus_are_refused_in_one_sentence(tmp_path: Path) -> None:
    try:
        import torch

        if torch.cuda.device_count() > 1:
            pytest.skip("this machine has several GPUs")
    except ImportError:
        pass
    with pytest.raises(CalibrationError, match=r"two or more GPUs of one host|needs PyTorch") as error:
        run("-o", str(tmp_path / "out"), "--operator", "allreduce")
    assert str(error.value).count("\n") == 0
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group") / "out"
    arguments = ("--full", "--fake", "--operator", "collectives", "--random", "8", "--no-fit", "-q")
    run(*arguments, "-o", str(folder))
    return folder


def test_fitted_curves_are_what_the_simulator_reads_and_hold_out_random_sizes(measured: Path) -> None:
    found = fit_collectives(measured, yaml.safe_load((measured / "run.yaml").read_text()))
    assert found is not None
    data, record = found
    read = collectives_from_data(json.loads(json.dumps(data)), "measured", coverage(data), "here")
    curve = read.find("allreduce", 2, "graph")
    assert curve is not None
    assert float(curve.knots.at(64 << 20)) == pytest.approx(8e-6 + (64 << 20) / 350e9, rel=0.05)
    assert curve.held_out.points >= 8
    assert curve.held_out.median is not None
    assert curve.held_out.median < 0.02
    assert "random sizes above 64 KiB" in record["allreduce/graph-2"]
    assert curve.held(1 << 20) == 16
    assert read.default is not None
    assert read.default.layout == "blocks"
    assert read.default.prefill is not None
    assert read.default.prefill.compute_factor == pytest.approx(1.1, abs=0.03)
    rows = read.beside_rows(("gemm",), "shared")
    assert rows
    assert all(1.0 <= one.collective_factor < 1.2 and one.compute_sms == 132 for one in rows)


def test_errors_are_of_sizes_that_no_knot_holds() -> None:
    sizes, fast = [1 << 16, 1 << 18, 1 << 20], lambda size: 1e-5 + size / 1e11
    table = pd.DataFrame({"message_bytes": sizes, "time_s": [fast(s) for s in sizes]}).set_index(
        "message_bytes"
    )
    drawn = pd.DataFrame({"message_bytes": [200_000], "time_s": [2 * fast(200_000)]})
    made = fitted(table.time_s, drawn)
    assert made["held_out"]["median"] == pytest.approx(0.5, abs=1e-3)  # half of what was measured
    assert made["errors"]["every other size"]["median"] == pytest.approx(0.0, abs=1e-4)

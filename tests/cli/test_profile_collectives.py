"""`simctl profile show` and `predict` of collectives, KV transfers and steps of a group."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import fake_collectives as fake
import pytest
from click.testing import CliRunner

from sim.cli.profile import profile
from sim.cost import load_cost
from sim.cost.shapes import Launch
from sim.errors import SimctlError

ROW = 8192 * 2


def ask(*arguments: str) -> Any:
    found = CliRunner().invoke(profile, list(arguments), catch_exceptions=False, standalone_mode=False)
    return json.loads(found.output)


def predict(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    points = folder.parent / "points.csv"
    points.write_text(text.getvalue())
    return ask("predict", str(folder), "--points", str(points), "--json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [fake.beside("gemm", "shared", 1.5, 1.25), fake.beside("gemm", "disjoint", 1.1, 1.0)]
    return fake.folder(tmp_path / "two", fake.table(beside=rows))


def test_operators_carry_label_points_and_errors(folder: Path) -> None:
    found = ask("show", str(folder), "--json")["operators"]
    for name in ("allreduce", "allreduce/graph-2", "allreduce/eager-2", "allgather", "kv_transfer"):
        assert found[name]["label"] == "measured"
        assert found[name]["points"] > 0
    assert found["allreduce"] == found["allreduce/graph-2"]
    assert (found["allreduce"]["median_error"], found["allreduce"]["p95_error"]) == (0.01, 0.05)
    assert found["kv_transfer"] == found["kv_transfer/copy-contiguous"]
    assert found["kv_transfer"]["median_error"] == 0.008
    text = CliRunner().invoke(profile, ["show", str(folder)], standalone_mode=False).output
    assert "allreduce/eager-2" in text


def test_rows_of_collectives_are_answered(folder: Path) -> None:
    size = 4 * fake.MIB
    graph, eager, small, four, gather, copy, other = predict(
        folder,
        [
            {"kind": "allreduce", "bytes": size, "gpus": 2, "launch": "graph"},
            {"kind": "allreduce", "bytes": size, "launch": "eager"},
            {"kind": "allreduce", "bytes": 1024, "launch": "eager"},
            {"kind": "allreduce", "bytes": size, "gpus": 4},
            {"kind": "allgather", "bytes": size, "tp": 2},
            {"kind": "kv_transfer", "bytes": size},
            {"kind": "broadcast", "bytes": size},
        ],
    )
    assert graph["gpu_s"] == pytest.approx(fake.LATENCY_S + size / fake.RATE)
    assert graph["sd_s"] == pytest.approx(0.03 * graph["gpu_s"])
    assert (graph["label"], graph["flags"]) == ("measured", [])
    assert eager["gpu_s"] == pytest.approx(fake.EAGER_S + size / fake.RATE)
    assert small["step_s"] == small["gpu_s"] == pytest.approx(fake.EAGER_S + 1024 / fake.RATE)
    assert four["gpu_s"] > graph["gpu_s"]
    assert four["label"].startswith("extrapolated from two-gpus's allreduce")
    assert four["flags"][0].startswith("allreduce: outside allreduce of 2 GPUs, graph")
    assert gather["gpu_s"] == pytest.approx(graph["gpu_s"])
    assert copy["gpu_s"] == pytest.approx(fake.COPY_S + size / fake.COPY_RATE)
    assert other["label"].startswith("extrapolated from the data sheet's NVLink rate")


def test_a_message_beyond_the_largest_and_a_group_that_cannot_be_are_told(folder: Path) -> None:
    large, wide = predict(
        folder,
        [{"kind": "allreduce", "bytes": 4 * 2**30}, {"kind": "allreduce", "bytes": 1024, "gpus": 16}],
    )
    assert large["flags"] == ["allreduce: outside allreduce of 2 GPUs, graph, to 1024 MiB"]
    assert large["gpu_s"] == pytest.approx(fake.LATENCY_S + 4 * 2**30 / fake.RATE)
    assert wide["gpu_s"] is None
    assert wide["flags"] == ["16 GPUs: a group is 2 to the 8 GPUs of one machine"]


def test_steps_of_a_group_are_priced_by_its_shards_and_collectives(folder: Path) -> None:
    step = {"kind": "step", "model": "llama-3.1-70b", "decode_contexts": ";".join(["1024"] * 16)}
    two, eager, eight = predict(
        folder,
        [{**step, "tp": 2}, {**step, "tp": 2, "launch": "eager"}, {**step, "tp": 8}],
    )
    price = load_cost("llama-3.1-70b", "h200-sxm", str(folder), {"tp": 2}).solo(
        Launch((), 16, 16 * 1024, graph=True)
    )
    assert two["gpu_s"] == pytest.approx(price.gpu_s, rel=1e-9)  # 16 is a captured size
    assert eager["gpu_s"] - two["gpu_s"] == pytest.approx(162 * (fake.EAGER_S - fake.LATENCY_S), rel=1e-6)
    assert eager["step_s"] > eager["gpu_s"]
    assert eight["gpu_s"] < two["gpu_s"]
    assert any(flag.startswith("allreduce") for flag in eight["flags"])
    heads = {"kind": "decode_attention", "model": "llama-3.1-70b", "decode_contexts": "4096;4096"}
    whole, shard = predict(folder, [heads, {**heads, "tp": 2}])
    assert shard["gpu_s"] < whole["gpu_s"]


def test_what_runs_beside_stretches_both(folder: Path) -> None:
    size = 4 * fake.MIB
    alone, beside, apart, unknown = predict(
        folder,
        [
            {"kind": "allreduce", "bytes": size},
            {"kind": "allreduce", "bytes": size, "neighbour_kind": "gemm"},
            {"kind": "allreduce", "bytes": size, "neighbour_kind": "gemm", "neighbour_sms": 112},
            {"kind": "allreduce", "bytes": size, "neighbour_kind": "decode_attention"},
        ],
    )
    assert beside["gpu_s"] == pytest.approx(1.25 * alone["gpu_s"])
    assert apart["gpu_s"] == pytest.approx(alone["gpu_s"])
    assert unknown["gpu_s"] is None
    assert unknown["flags"] == ["allreduce beside decode_attention was not measured"]
    gemm = {"kind": "gemm", "m": 512, "n": 8192, "k": 8192}
    one, slowed = predict(folder, [gemm, {**gemm, "neighbour_kind": "allreduce", "neighbour_bytes": size}])
    assert slowed["gpu_s"] == pytest.approx(1.5 * one["gpu_s"])


def test_a_collective_that_was_not_measured_is_flagged(folder: Path) -> None:
    (row,) = predict(folder, [{"kind": "broadcast", "bytes": 1024, "gpus": 2}])
    assert row["label"].startswith("extrapolated from the data sheet's NVLink rate")
    assert row["flags"] == ["broadcast: was not measured"]


def test_a_row_without_bytes_is_named(folder: Path) -> None:
    with pytest.raises(SimctlError, match="row 1: a row of kind allreduce needs bytes above 0"):
        predict(folder, [{"kind": "allreduce"}])

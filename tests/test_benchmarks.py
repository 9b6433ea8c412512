"""The benchmarks' code runs, and its sentences say what its figures say. How fast anything is, is no matter here."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks belong to a checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT))

main = import_module("benchmarks.__main__").main
Row = import_module("benchmarks.measure").Row
verdicts = import_module("benchmarks.verdicts").verdicts
common_workload = import_module("benchmarks.workload").common_workload


def test_a_group_is_measured_and_kept(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    words = ["--only", "size", "--sizes", "20", "--repeats", "1", "--by", "python", "-o", str(tmp_path)]
    words += ["--write", str(page)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0
    (row,) = json.loads((tmp_path / "size.json").read_text())["rows"]
    assert row["requests"] == 20
    assert row["output_tokens"] > 20
    assert row["iterations"] >= row["decisions"] > 0
    assert row["peak_mib"] > 10
    assert "20 requests" in done.output
    assert "| 20 requests | python | 20 |" in page.read_text()


def test_the_peers_workload_is_the_one_that_they_were_measured_on(tmp_path: Path) -> None:
    table, lines = common_workload(10_000, tmp_path)
    assert sum(json.loads(line)["output_length"] for line in lines.read_text().splitlines()) == 1_932_652
    assert table.read_text().splitlines()[1].startswith("1.0,")


def test_verdicts() -> None:
    ours = Row("peers", "lanesim sarathi-512", "compiled", 10, 100, 40, output_tokens=4_000, loop_s=0.001)
    mocker = Row("peers", "Dynamo mocker", "Rust", 10, output_tokens=4_000, loop_s=0.002)
    said = [(verdict.met, verdict.sentence) for verdict in verdicts([ours, mocker])]
    assert [met for met, _ in said] == [False, True]
    assert "10.00 us, 0.40 decisions" in said[0][1]
    assert "2.00 times" in said[1][1]

"""`simctl run`, `init` and `policies` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.cli import main

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
name: small
workload: {trace: sample-conv, max_requests: 20}
model: llama-3.1-8b
gpu: h200-sxm
policies: [vllm, sarathi-512]
sweep: {request_rate: [4, 8]}
slo: {ttft_ms: 1000, tpot_ms: 50}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simctl(*words: str) -> int:
    """Run a command line; returns its exit code."""
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_run_prints_a_table_and_writes_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simctl("run", "e.yaml", "-o", "out/x") == 0
    told = capsys.readouterr()
    assert "sarathi-512" in told.out
    assert "Results in out/x" in told.err
    names = {path.name for path in (folder / "out" / "x").iterdir()}
    assert {"report.html", "summary.json", "experiment.yaml", "runs.parquet", "requests.parquet"} <= names


def test_the_default_folder_is_named_after_the_experiment(folder: Path) -> None:
    assert simctl("run", "e.yaml", "--no-report", "-q", "--request-rate", "4") == 0
    assert (folder / "out" / "small" / "summary.json").is_file()
    assert not (folder / "out" / "small" / "report.html").exists()


def test_quiet_says_nothing_and_json_prints_the_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simctl("run", "e.yaml", "-q", "--no-report") == 0
    told = capsys.readouterr()
    assert told.out == told.err == ""
    assert simctl("run", "e.yaml", "--json", "--no-report") == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["request_rate"] for run in runs] == [4, 8, 4, 8]


def test_shorthands_reach_the_experiment(folder: Path) -> None:
    words = "run e.yaml -q --no-report --request-rate 2,3 --seed 7 --num-runs 2 --goodput ttft:200 tpot:40 e2el:9000"
    assert simctl(*words.split(), "--set", "replicas=2") == 0
    written = yaml.safe_load((folder / "out" / "small" / "experiment.yaml").read_text())
    assert written["sweep"] == {"request_rate": [2, 3], "per_gpu": False}
    assert (written["seed"], written["num_runs"], written["replicas"]) == (7, 2, 2)
    assert written["slo"] == {"ttft_ms": 200, "tpot_ms": 40, "e2el_ms": 9000, "attainment": 0.99}


def test_goodput_may_stand_before_the_experiment_and_repeat(folder: Path) -> None:
    assert simctl("run", "--goodput", "ttft:200", "tpot:40", "e.yaml", "-q", "--goodput", "itl:90") == 0
    written = yaml.safe_load((folder / "out" / "small" / "experiment.yaml").read_text())
    assert (written["slo"]["ttft_ms"], written["slo"]["tpot_ms"], written["slo"]["itl_ms"]) == (200, 40, 90)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--goodput tttf:200", "Did you mean 'ttft'?"),
        ("--goodput ttft:-5", "--goodput slo.ttft_ms=-5: `slo.ttft_ms` is -5, but must be greater than 0"),
        ("--set memory.blok_size=3", "Did you mean 'block_size'?"),
        (
            "--request-rate fast",
            "--request-rate sweep.request_rate=[fast]: `sweep.request_rate[0]` is the text 'fast'",
        ),
        ("--seed -1", "--seed seed=-1"),
        ("--set policies=[vlm]", "Did you mean 'vllm'?"),
        ("--set workload.trace=absent.csv", "was not found"),
    ],
)
def test_bad_input_is_one_sentence_exit_2_and_no_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert simctl("run", "e.yaml", *words.split()) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.out == ""
    assert [path.name for path in folder.iterdir()] == ["e.yaml"]


def test_an_interrupt_exits_130_and_says_how_to_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sim.study.run as study_run

    real = study_run.execute

    def interrupted(*task: Any) -> object:
        if task[1].index == 2:
            raise KeyboardInterrupt
        return real(*task)

    monkeypatch.setattr(study_run, "execute", interrupted)
    assert simctl("run", "e.yaml", "--no-report") == 130
    assert (
        "2 finished runs are kept in out/small.partial; --resume continues there" in capsys.readouterr().err
    )
    monkeypatch.setattr(study_run, "execute", real)
    assert simctl("run", "e.yaml", "--no-report", "--resume") == 0
    assert [path.name for path in (folder / "out").iterdir()] == ["small"]


def test_dry_run_shows_runs_and_memory_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simctl("run", "e.yaml", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "rescaled by stretch" in shown
    assert "BUDGET GIB" in shown
    assert simctl("run", "e.yaml", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["runs"]) == 4
    memory = plan["memory"][0]
    spent = sum(memory[f"{part}_bytes"] for part in ("weight", "activation", "runtime", "kv"))
    assert 0 <= memory["budget_bytes"] - spent < 2 * 2**20  # less than a block is left over
    assert [path.name for path in folder.iterdir()] == ["e.yaml"]


def test_steps_and_timeline_are_written_on_request(folder: Path) -> None:
    assert simctl("run", "e.yaml", "-q", "--no-report", "--steps", "--timeline") == 0
    names = {path.name for path in (folder / "out" / "small").iterdir()}
    assert {"steps.parquet", "timeline.json.gz"} <= names


def test_init_writes_an_experiment_that_runs_and_keeps_what_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simctl("init", "new") == 0
    assert "simctl run new/experiment.yaml" in capsys.readouterr().out
    assert simctl("run", "new/experiment.yaml", "-q", "--set", "workload.max_requests=20", "--no-report") == 0
    assert simctl("init", "new") == 2
    assert "--force overwrites it" in capsys.readouterr().err


def test_policies_are_listed_with_sources_and_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert simctl("policies", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["sarathi-512"]["base"] == "sarathi"
    assert rows["sarathi-512"]["knobs"]["token_budget"]["default"] == 512
    assert all(row["source"] and row["mirrors"] for row in rows.values())
    assert simctl("policies") == 0
    assert "sglang-1024" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "experiments").glob("*.yaml")))
def test_every_experiment_of_the_repository_loads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(ROOT / "experiments" / name), "--dry-run"]
    text = (ROOT / "experiments" / name).read_text()
    if "/traces/" in text and not (ROOT.parent / "shared" / "traces").is_dir():
        pytest.skip("needs the public trace in ../shared/traces, which is not there")
    assert simctl(*words) == 0
    assert "requests of" in capsys.readouterr().out


def test_a_missing_public_trace_is_told_with_where_it_was_looked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "azure.yaml").write_bytes((ROOT / "experiments" / "azure_conv_h200.yaml").read_bytes())
    assert simctl("run", "azure.yaml") == 2
    assert "was not found in" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sim.cli import cli; cli.main(['run', '--help'], standalone_mode=False); "
        "print([m for m in ('numpy', 'pandas', 'pydantic', 'plotly', 'numba') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("[]")
    assert "Example: simctl run" in shown

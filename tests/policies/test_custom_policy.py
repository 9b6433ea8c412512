"""The example of a policy of one's own: by `module:Class` beside the experiment, as an object, in the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import sim
from sim.errors import SimctlError
from sim.policies import make_policy
from sim.testing import check_policy

FOLDER = Path(__file__).parents[2] / "experiments"
EXPERIMENT = FOLDER / "custom_policy.yaml"
ENTRY = "custom_policy:ShortestFirst"

pytestmark = pytest.mark.skipif(not EXPERIMENT.exists(), reason="experiments/ is part of a checkout only")


@pytest.fixture(scope="module")
def result() -> sim.api.Result:
    """The experiment as it stands, cut to 250 requests at its higher rate."""
    return sim.run(EXPERIMENT, overrides={"workload.max_requests": 250, "sweep.request_rate": [24]})


def test_the_experiment_answers_its_question(result: sim.api.Result) -> None:
    requests = result.requests
    long = requests["prompt_tokens"] >= requests["prompt_tokens"].quantile(0.95)
    mean = requests.groupby("policy")["ttft_ms"].mean()
    longest = requests[long].groupby("policy")["ttft_ms"].mean()
    # the more patience, the sooner the many and the later the few
    assert mean["very-patient"] < mean["short-first"] < mean["fcfs"]
    assert longest["very-patient"] > longest["fcfs"]


def test_without_patience_it_is_first_come_first_served(result: sim.api.Result) -> None:
    rows = result.requests
    mine, sarathi = (
        rows.loc[rows["policy"] == name, "finish_s"].tolist() for name in ("fcfs", "sarathi-512")
    )
    assert mine == sarathi


def test_it_keeps_the_laws() -> None:
    policy = make_policy({"name": ENTRY, "patience_s": 0.5}, [FOLDER])
    assert check_policy(policy).ok


def test_an_object_runs_beside_the_experiments_own() -> None:
    cls = type(make_policy(ENTRY, [FOLDER]))
    base = yaml.safe_load(EXPERIMENT.read_text())
    small = {**base, "policies": ["sarathi-512"], "workload": {"trace": "sample-conv", "max_requests": 20}}
    result = sim.run(small, policy=[cls(2.0)])
    assert result.runs["policy"].drop_duplicates().tolist() == ["sarathi-512", "ShortestFirst"]


def test_simctl_finds_the_module_beside_the_file_from_anywhere(tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        "from sim.cli import main; main()",
        "run",
        str(EXPERIMENT),
        "-o",
        str(target),
    ]
    done = subprocess.run(
        [
            *command,
            "--no-report",
            "--jobs=2",
            "--set=workload.max_requests=20",
            "--set=sweep.request_rate=[16]",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(sim.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "very-patient" in done.stdout


def test_an_installed_module_wins_and_the_search_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("class Policy: ...\n")
    (tmp_path / "of_mine.py").write_text("class Policy:\n    def plan(self, view): ...\n")
    before = list(sys.path)
    with pytest.raises(SimctlError, match="cannot be loaded"):
        make_policy("yaml:Policy", [tmp_path])
    assert make_policy("of_mine:Policy", [tmp_path]).label == "Policy"
    assert sys.path == before
    with pytest.raises(SimctlError, match="cannot be loaded"):
        make_policy("not_there:Policy", [tmp_path])


def test_a_wrapper_may_hold_a_policy_of_ones_own() -> None:
    entry: dict[str, Any] = {"name": "slo-admission", "policy": {"name": ENTRY, "patience_s": 3}}
    assert make_policy(entry, [FOLDER]).wrapped.patience_s == 3

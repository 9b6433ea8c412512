"""Which cases are measured, and what becomes of one that fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner

from calib.executor.dry import DryDevice
from calib.validate import cases
from calib.validate.bench import DryBench, board_index
from calib.validate.cases import FLAT, STEP, listed
from calib.validate.hosts import write_hosts
from calib.validate.measure import BROKEN, Session, broken_cases, measure
from calib.validate.study import CAPACITY, capacities
from sim.cli import cli
from sim.errors import SimctlError
from sim.study.plan import Study, prepare

EXPERIMENT = {
    "workload": {"trace": "sample-conv", "max_requests": 12},
    "model": "llama-3.1-8b",
    "gpu": "h200-sxm",
    "profile": "spec",
    "policies": ["sarathi-512", "vllm", "pod"],
    "sweep": {"request_rate": [8]},
    "slo": {"ttft_ms": 1000, "tpot_ms": 50},
    "jitter": False,
}
TOPS = {"sarathi-512": 20.0, "vllm": 30.0, "pod": 20.0}
ENTRIES = [(name, name) for name in TOPS]


@pytest.fixture
def study() -> Study:
    return prepare(EXPERIMENT)


def test_cases_by_name_keep_their_order(study: Study) -> None:
    cases = listed(study.setting, ENTRIES, ["vllm@1.05", "pod@0.8step", "vllm@0.8#2"], TOPS)
    assert [(c.policy, c.load, c.mode, c.repeat) for c in cases] == [
        ("vllm", 1.05, FLAT, 0),
        ("pod", 0.8, STEP, 0),
        ("vllm", 0.8, FLAT, 2),
    ]
    assert cases[0].rate == pytest.approx(31.5)


@pytest.mark.parametrize("name", ["vllm", "vllm@", "vllm@0", "vllm@1.2.3", "other@0.8", "vllm@0.8#", "@0.8"])
def test_a_case_that_nobody_can_read_is_told(study: Study, name: str) -> None:
    with pytest.raises(SimctlError, match="--case"):
        listed(study.setting, ENTRIES, [name], TOPS)


def test_offered_loads_stay_what_they_were(study: Study, tmp_path: Path) -> None:
    cost = study.setting.cost()
    (tmp_path / CAPACITY).write_text("sarathi-512: 3.25\n")
    held = capacities(study.setting, ENTRIES[:2], cost, tmp_path)
    assert held["sarathi-512"] == 3.25
    assert held["vllm"] > 5
    assert yaml.safe_load((tmp_path / CAPACITY).read_text()) == held


def test_capacity_is_that_under_the_targets_and_the_mechanism_of_the_run(monkeypatch: Any) -> None:
    """A policy that splits by targets is asked for what it can do under them."""
    seen: dict[str, Any] = {}

    class Records:
        requests = pd.DataFrame({"finish_s": np.arange(100.0)})

    def record(workload: Any, policy: Any, cost: Any, **options: Any) -> Any:
        seen.update(options, stream=policy["decode_stream"])
        return Records()

    monkeypatch.setattr(cases, "simulate", record)
    study = prepare({**EXPERIMENT, "policies": ["streams"], "mechanism": "libsmctrl"})
    top = cases.capacity(study.setting, "streams", 0, study.setting.cost())
    assert top == pytest.approx(1.0)
    assert seen["mechanism"] == "libsmctrl"
    assert [target.ttft_s for target in seen["targets"]] == [1.0]
    assert seen["stream"] == "high"


def test_a_case_that_fails_leaves_the_others_alone(study: Study, tmp_path: Path) -> None:
    """The error is told and kept; the case is not tried again."""

    class Broken(DryDevice):
        fused = ""

        def launch(self, work: Any, released: list[int]) -> None:
            if self.fused:
                raise RuntimeError("no such kernel")
            super().launch(work, released)

    class Bench(DryBench):
        made = Broken()

        def device(self, lanes: int, rows: int, sequences: int, fused: str) -> Any:
            self.made.fused = fused
            return self.made

    said: list[str] = []
    cases = listed(study.setting, ENTRIES, ["pod@0.8", "vllm@0.8", "sarathi-512@0.8"], TOPS)
    setting, cost = study.setting, study.setting.cost()
    assert measure(setting, cost, cases, tmp_path, Bench(cost), 1e9, said.append) == 0
    assert broken_cases(tmp_path) == {"pod_open_0.8_0": "RuntimeError: no such kernel"}
    assert sum("failed" in line for line in said) == 1
    assert {path.stem for path in tmp_path.glob("*.json")} - {"_broken"} == {
        "vllm_open_0.8_0",
        "sarathi-512_open_0.8_0",
    }
    said.clear()
    measure(setting, cost, cases, tmp_path, Bench(cost), 1e9, said.append)
    assert said == []


def test_a_case_in_which_the_process_died_is_left_out(study: Study, tmp_path: Path) -> None:
    (tmp_path / BROKEN).write_text(json.dumps({"vllm_open_0.8_0": "the process ended while it ran"}))
    cases, cost = (
        listed(study.setting, ENTRIES, ["vllm@0.8", "sarathi-512@0.8"], TOPS),
        study.setting.cost(),
    )
    said: list[str] = []
    measure(study.setting, study.setting.cost(), cases, tmp_path, DryBench(cost), 1e9, said.append)
    assert [line.split(":")[0] for line in said] == ["sarathi-512_open_0.8_0"]


def test_graphs_are_made_once_a_policy_and_the_warm_up_only_where_it_is_cold(
    study: Study, tmp_path: Path
) -> None:
    prepared: list[int] = []

    class Device(DryDevice):
        def prepare(self, works: Any, pairs: Any = ()) -> dict[str, int]:
            prepared.append(len(works))
            return {}

    class Bench(DryBench):
        made = Device()

        def device(self, lanes: int, rows: int, sequences: int, fused: str) -> Any:
            return self.made

    cases = listed(study.setting, ENTRIES, ["vllm@0.5", "pod@0.5", "vllm@1.2"], TOPS)
    cost = study.setting.cost()
    session = Session(study.setting, cost, Bench(cost), tmp_path, cases)
    for case in cases:
        session.run(case)
    assert len(prepared) == 2
    # vllm's graphs are those of both of its cases
    assert prepared[0] > prepared[1]


def test_what_the_executor_has_no_kernel_for_is_told(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    for policy, words in (
        ({"name": "pod", "variant": "artefact"}, "no kernel for mixed attention"),
        ({"name": "pod", "speedup": 1.5}, "a price, not a kernel"),
    ):
        path.write_text(yaml.safe_dump({**EXPERIMENT, "policies": [policy]}))
        arguments = [
            "validate",
            str(path),
            "--dry-run",
            "-o",
            str(tmp_path / words[:8]),
            "--load",
            "0.5",
            "-q",
        ]
        done = CliRunner().invoke(cli, arguments)
        assert isinstance(done.exception, SimctlError)
        assert words in str(done.exception)


def test_measuring_alone_writes_no_page(tmp_path: Path) -> None:
    path, out = tmp_path / "e.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    arguments = [
        "validate",
        str(path),
        "--dry-run",
        "-o",
        str(out),
        "--case",
        "pod@0.5step",
        "--no-pages",
        "-q",
    ]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert (out / "cases" / "pod_load_step_0.5_0.json").exists()
    assert not (out / "fidelity.md").exists()


def test_nvml_counts_the_gpus_that_cuda_does_not_see() -> None:
    assert [board_index(text) for text in ("", "1", "3,0", "GPU-12")] == [0, 1, 3, 0]


def test_policies_believe_in_the_host_terms_of_the_folder(study: Study, tmp_path: Path) -> None:
    cost, workload = study.setting.cost(), study.setting.workload(5.0, 0)
    own, _ = Session(study.setting, cost, DryBench(cost), tmp_path / "none").open("vllm", workload)
    terms = replace(cost.launching.terms, gap_graph_s=0.123, gap_per_sequence_s=0.0)
    write_hosts(tmp_path, {1: terms})
    held, _ = Session(study.setting, cost, DryBench(cost), tmp_path).open("vllm", workload)
    assert held.replicas[0].lanes.p.gap_graph_s[1] == 0.123
    assert own.replicas[0].lanes.p.gap_graph_s[1] < 0.1

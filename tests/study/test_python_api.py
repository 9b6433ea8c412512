"""`import sim`: frames, figures and policies as objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import sim
from sim.engine import Decode, Plan, Prefill
from sim.errors import SimctlError

EXPERIMENT = {
    "workload": {"trace": "sample-conv", "max_requests": 15},
    "model": "llama-3.1-8b",
    "gpu": "h200-sxm",
    "policies": ["vllm"],
    "sweep": {"request_rate": [4, 8]},
    "slo": {"ttft_ms": 1000},
}


class OneAtATime:
    """Serves one request from its prompt to its last token, then the next."""

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, view: Any) -> Any:
        self.plans += 1
        if len(view.running):
            if view.running.computed_tokens[0] < view.running.prompt_tokens[0]:
                left = view.running.prompt_tokens[0] - view.running.computed_tokens[0]
                return Plan([Prefill([(view.running.id[0], left)])])
            return Plan([Decode(view.running.id[:1])])
        first = view.waiting.id[0]
        return Plan([Prefill([(first, view.waiting.prompt_tokens[0])])], admit=[first])


def test_frames_and_overrides() -> None:
    result = sim.run(EXPERIMENT, overrides={"sweep.request_rate": [4], "workload.max_requests": 10})
    assert len(result.runs) == 1
    assert len(result.requests) == 10
    assert len(result.steps) == result.runs["iterations"][0]
    assert result.summary["runs"][0]["policy"] == "vllm"
    assert EXPERIMENT["workload"] == {"trace": "sample-conv", "max_requests": 15}  # left alone


def test_figures_know_policies_rates_and_limits() -> None:
    result = sim.run(EXPERIMENT, policy="sarathi-512")
    figure = result.figure("slo")
    assert [trace.name for trace in figure.data if trace.name] == ["vllm", "sarathi-512"]
    assert list(figure.data[0].x) == [4, 8]
    assert list(result.figure("ttft", "p50").data[0].y) == pytest.approx(result.runs["median_ttft_ms"][:2])
    with pytest.raises(SimctlError, match="Did you mean 'goodput'"):
        result.figure("godput")
    with pytest.raises(SimctlError, match="unknown statistic 'p98'"):
        result.figure("ttft", "p98")


def test_a_policy_object_runs_beside_the_others_afresh_each_time() -> None:
    mine = OneAtATime()
    result = sim.run(EXPERIMENT, policy=mine)
    assert result.runs["policy"].tolist() == ["vllm", "vllm", "OneAtATime", "OneAtATime"]
    assert mine.plans == 0  # runs have copies of their own
    assert (result.runs["completed"] == 15).all()


def test_out_writes_the_folder_of_the_same_results(tmp_path: Path) -> None:
    result = sim.run(EXPERIMENT, out=tmp_path / "out")
    assert (tmp_path / "out" / "report.html").is_file()
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "requests.parquet"), result.requests)


@pytest.mark.parametrize(
    ("policy", "sentence"), [(object(), "neither a name"), ("vllm", "two policies are called")]
)
def test_what_is_no_policy_is_refused(policy: Any, sentence: str) -> None:
    with pytest.raises(SimctlError, match=sentence):
        sim.run(EXPERIMENT, policy=policy)


def test_importing_sim_costs_nothing() -> None:
    code = (
        "import sys, sim; print([m for m in ('numpy', 'pandas', 'pydantic', 'plotly') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"

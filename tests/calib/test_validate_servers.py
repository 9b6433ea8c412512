"""Results of real servers' benchmark tools, read into the names of a run's summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calib.validate.servers import against, read_server
from sim.errors import SimctlError

VLLM = {
    "request_throughput": 4.0,
    "mean_ttft_ms": 120.0,
    "p99_ttft_ms": 300.0,
    "mean_tpot_ms": 20.0,
    "completed": 9,
}
SGLANG = {
    "request_throughput": 5.0,
    "mean_ttft_ms": 90.0,
    "mean_e2e_latency_ms": 900.0,
    "p99_e2e_latency_ms": 2000.0,
}
AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 100.0, "p50": 80.0, "p99": 400.0},
    "inter_token_latency": {"unit": "ms", "avg": 21.0},
    "request_latency": {"unit": "s", "avg": 2.0},
    "request_throughput": {"unit": "requests/sec", "avg": 3.5},
}


def write(folder: Path, text: str) -> Path:
    path = folder / "result.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("data", "tool", "key", "value"),
    [
        (VLLM, "vLLM", "p99_ttft_ms", 300.0),
        (SGLANG, "SGLang", "p99_e2el_ms", 2000.0),
        (AIPERF, "AIPerf", "median_ttft_ms", 80.0),
        (AIPERF, "AIPerf", "mean_tpot_ms", 21.0),
        (AIPERF, "AIPerf", "mean_e2el_ms", 2000.0),
        (AIPERF, "AIPerf", "request_throughput", 3.5),
    ],
)
def test_each_tool(tmp_path: Path, data: Any, tool: str, key: str, value: float) -> None:
    found, metrics = read_server(write(tmp_path, json.dumps(data)))
    assert (found, metrics[key]) == (tool, value)


def test_the_last_line_of_appended_results_counts(tmp_path: Path) -> None:
    lines = [json.dumps({**SGLANG, "request_throughput": rate}) for rate in (1.0, 2.0)]
    assert read_server(write(tmp_path, "\n".join(lines) + "\n"))[1]["request_throughput"] == 2.0


@pytest.mark.parametrize("text", ["", "no json", "[1]", '{"a": 1}'])
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(SimctlError, match="result"):
        read_server(write(tmp_path, text))


def test_errors_are_signed_fractions_of_what_was_measured() -> None:
    rows = against({"mean_ttft_ms": 100.0, "p99_itl_ms": 5.0}, {"mean_ttft_ms": 90.0})
    assert rows == [
        {"metric": "mean_ttft_ms", "real": 100.0, "simulated": 90.0, "error": pytest.approx(-0.1)}
    ]

"""Results of real servers' benchmarks as a run's summary: vLLM's, SGLang's and AIPerf's files.

Names and units: vllm:vllm/benchmarks/serve.py, sglang:python/sglang/bench_serving.py, aiperf's JSON export. AIPerf's
"inter token latency" is a request's mean gap, which the others call TPOT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.errors import SimctlError

STATS = ("mean", "median", "std", "p90", "p95", "p99")
RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
LATENCIES = ("ttft", "tpot", "itl", "e2el")
AIPERF = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2el": "request_latency"}
AIPERF_STATS = {"mean": "avg", "median": "p50", "std": "std", "p90": "p90", "p95": "p95", "p99": "p99"}


def read_server(path: Path) -> tuple[str, dict[str, float]]:
    """(which tool wrote it, metrics by the names of `summary.json`) of a result file.

    Of a file of several lines (SGLang appends) the last counts. Raises SimctlError for anything else.
    """
    data = _load(path)
    if "time_to_first_token" in data or "request_latency" in data:
        return "AIPerf", _aiperf(data)
    flat = {key: float(value) for key, value in data.items() if _wanted(key) and _is_number(value)}
    if "mean_e2e_latency_ms" in data:
        flat |= {
            f"{stat}_e2el_ms": float(data[f"{stat}_e2e_latency_ms"])
            for stat in STATS
            if _is_number(data.get(f"{stat}_e2e_latency_ms"))
        }
    if not any(key.endswith("_ttft_ms") for key in flat):
        raise SimctlError(
            f"{path}: no result of vllm bench serve, sglang bench_serving or AIPerf (no key ending in _ttft_ms, "
            "no time_to_first_token)"
        )
    tool = "SGLang" if "mean_e2e_latency_ms" in data or "sharegpt_output_len" in data else "vLLM"
    return tool, flat


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SimctlError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SimctlError(f"{path} is not text in UTF-8: not a benchmark's result") from None
    lines = [line for line in text.splitlines() if line.strip()]
    for candidate in (text, lines[-1] if lines else ""):
        try:
            data = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(data, Mapping):
            return data
    raise SimctlError(f"{path}: neither a JSON object nor JSON lines: not a benchmark's result")


def _wanted(key: str) -> bool:
    return key in RATES or any(key == f"{stat}_{name}_ms" for stat in STATS for name in LATENCIES)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _aiperf(data: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for ours, theirs in AIPERF.items():
        block = data.get(theirs)
        if not isinstance(block, Mapping):
            continue
        scale = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}.get(str(block.get("unit", "ms")), 1.0)
        for stat, name in AIPERF_STATS.items():
            if _is_number(block.get(name)):
                found[f"{stat}_{ours}_ms"] = float(block[name]) * scale
    for ours, theirs in (
        ("request_throughput", "request_throughput"),
        ("output_throughput", "output_token_throughput"),
    ):
        block = data.get(theirs)
        if isinstance(block, Mapping) and _is_number(block.get("avg")):
            found[ours] = float(block["avg"])
    return found


def against(theirs: Mapping[str, float], ours: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a metric that both have: real, simulated, error as a fraction."""
    return [
        {"metric": key, "real": value, "simulated": ours[key], "error": ours[key] / value - 1.0}
        for key, value in theirs.items()
        if ours.get(key) is not None and value
    ]

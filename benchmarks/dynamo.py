"""Dynamo's mocker (Rust), the fastest peer: `pip install ai-dynamo-runtime`."""

from __future__ import annotations

import json
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measure import Row, process

ABSENT = "Dynamo's mocker is not installed (pip install ai-dynamo-runtime), so nothing is measured beside it."
# vLLM's scheduler with a budget of 512 tokens and 128 sequences, its own polynomial step times, no prefix cache
ENGINE = {"max_num_batched_tokens": 512, "max_num_seqs": 128, "enable_prefix_caching": False}
SCRIPT = """
import json, sys, time
import dynamo._core as core
engine, trace = json.loads(sys.argv[1]), sys.argv[2]
began = time.perf_counter()
result = core.run_mocker_trace_replay([trace], extra_engine_args={"engine": engine}, trace_block_size=512)
taken = time.perf_counter() - began
summary = result.summary() if callable(result.summary) else result.summary
print(json.dumps({"loop_s": summary["wall_time_ms"] / 1e3, "call_s": taken,
                  "output_tokens": summary["total_output_tokens"], "completed": summary["completed_requests"]}))
"""


def python() -> str | None:
    """An interpreter that has the mocker: this one."""
    return sys.executable if find_spec("dynamo") is not None else None


def run(group: str, trace: Path, requests: int, interpreter: str, repeats: int) -> Row:
    """Replay the common workload `repeats` times, each in a process of its own; `loop_s` is what the mocker reports."""
    said, costs = [], []
    for _ in range(repeats):
        cost = process([interpreter, "-c", SCRIPT, json.dumps(ENGINE), str(trace)])
        costs.append(cost)
        said.append(json.loads(cost.output.strip().splitlines()[-1]))
    loops = [one["loop_s"] for one in said]
    middle = statistics.median(loops)
    return Row(
        group,
        "Dynamo mocker",
        "Rust",
        requests=requests,
        output_tokens=said[0]["output_tokens"],
        loop_s=middle,
        startup_s=statistics.median(one["call_s"] - one["loop_s"] for one in said),
        process_s=statistics.median(cost.seconds for cost in costs),
        peak_mib=max(cost.peak_mib for cost in costs),
        spread=(max(loops) - min(loops)) / middle,
        loops_s=loops,
    )

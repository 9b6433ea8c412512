"""Which CUDA kernels an operator starts, with grid, block and shared memory: one profiled run, never a timed one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.kernels.base import Kernel

if TYPE_CHECKING:
    from calib.lab import GpuLab

MARK = "lanesim-point-"


def launched(lab: GpuLab, kernels: list[Kernel]) -> list[list[dict[str, Any]]]:
    """For each of `kernels`, the kernels that one eager run starts, in order; one profiler session for all."""

    def call(kernel: Kernel) -> Callable[[], Any]:
        return lambda: kernel.run(0)

    def prepare(i: int) -> None:
        kernels[i].prepare(lab.arena)
        lab.torch.cuda.current_stream().synchronize()

    with lab.torch.cuda.stream(lab.whole[0].stream()):
        return launched_by(lab.torch, [call(kernel) for kernel in kernels], prepare)


def launched_by(
    torch: Any, calls: list[Callable[[], Any]], prepare: Callable[[int], None] = lambda i: None
) -> list[list[dict[str, Any]]]:
    """For each of `calls`, the kernels that it starts on the current stream; `prepare(i)` comes before the i-th."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as session:
        for i, call in enumerate(calls):
            prepare(i)
            with record_function(f"{MARK}{i}"):
                call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        return parse_trace(json.loads(path.read_text()), len(calls))


def parse_trace(trace: dict[str, Any], count: int) -> list[list[dict[str, Any]]]:
    """Kernels of each marked range of a torch profiler trace, matched by the launch's correlation id."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.get("name", "").startswith(MARK) and event.get("cat") == "user_annotation":
            start = float(event["ts"])
            ranges[int(event["name"][len(MARK) :])] = (start, start + float(event["dur"]))
    point_of: dict[Any, int] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            for point, (start, end) in ranges.items():
                if start <= float(event["ts"]) <= end:
                    point_of[event["args"]["correlation"]] = point
                    break
    found: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"])):
        args = event["args"]
        point = point_of.get(args.get("correlation"))
        if point is not None:
            found[point].append(
                {
                    "kernel": event["name"],
                    "grid": "x".join(map(str, args.get("grid", []))),
                    "block": "x".join(map(str, args.get("block", []))),
                    "smem_bytes": args.get("shared memory"),
                }
            )
    return found

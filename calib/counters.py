"""Hardware counters of single kernels under Nsight Compute, to compare the simulator's activity with.

`python -m calib.counters run` starts every shape once between two marks, for `ncu` to profile; `read LOG.csv OUT` turns
ncu's raw CSV into a table of the measurements. Kernels between two marks are one shape; shares are averaged by their
duration.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calib import rows
from calib.kernels import make
from calib.models import model_shape

MARK = "hold"  # the kernel of `csrc/smid_probe.cu` that stands before every shape
SM, DRAM, TIME = "sm__cycles_active", "dram__throughput", "gpu__time_duration"
TENSOR = "sm__pipe_tensor"
SHARES = {"sm_active": SM, "dram_active": DRAM, "tensor_active": TENSOR}
NANOSECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6}


def shapes() -> list[dict[str, Any]]:
    """What is profiled: operators across the sizes that a step has, and mixed attention."""
    made: list[dict[str, Any]] = [
        {"kind": "gemm", "role": role, "m": m}
        for role in ("qkv", "gate_up", "down")
        for m in (1, 64, 256, 512, 2048)
    ]
    made += [
        {"kind": "prefill_attention", "q": [q], "h": [h], "attention": backend}
        for backend in ("fa3", "fa2")
        for q, h in ((512, 0), (512, 8192), (2048, 0), (2048, 4096))
    ]
    made += [
        {"kind": "decode_attention", "contexts": [context] * batch, "attention": "fa2"}
        for batch, context in ((1, 8192), (8, 2048), (32, 2048), (64, 4096), (256, 1024))
    ]
    made += [{"kind": kind, "m": m} for kind in ("norm", "activation", "rope") for m in (64, 2048)]
    made += [{"kind": "lm_head", "m": 64}, {"kind": "sampling", "m": 64}]
    mixed = {"kind": "fused_attention", "q": [1024], "h": [4096], "contexts": [4096] * 64}
    return made + [{**mixed, "attention": variant} for variant in ("serial_fa2", "batched", "batch_pod")]


def run(model: str = "llama-3.1-8b") -> None:
    """Start every shape once, warmed, between the profiler's start and stop."""
    from calib import cuda
    from calib.arena import Arena

    arena = Arena(model_shape(model), layers=4, kv_bytes=16 << 30)
    arena.fill()
    torch = arena.torch
    with torch.cuda.stream(torch.cuda.Stream()):
        stream = torch.cuda.current_stream()
        for point in shapes():
            kernel = make(arena.model, point)
            kernel.prepare(arena)
            kernel.run(0)
            stream.synchronize()
            torch.cuda.profiler.start()
            cuda.hold(stream.cuda_stream, 1000)
            kernel.run(1)
            stream.synchronize()
            torch.cuda.profiler.stop()
    print(f"{len(shapes())} shapes")


def read(lines: Iterable[str], model: str = "llama-3.1-8b") -> list[dict[str, Any]]:
    """A row a shape out of `ncu --csv --page raw`."""
    table = csv.reader(line for line in lines if line.startswith('"'))
    head, units = next(table), next(table)
    groups: list[list[dict[str, str]]] = []
    for cells in table:
        kernel = dict(zip(head, cells, strict=True))
        if kernel["Kernel Name"].split("(")[0] == MARK:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    unit = dict(zip(head, units, strict=True))
    found = []
    for point, kernels in zip(shapes(), groups, strict=True):
        shape = make(model_shape(model), point)
        columns = {"kind": shape.kind, "label": shape.label, **shape.columns(), "flops": shape.flops}
        origin = {"model": model, "bytes": shape.bytes, "launch": "eager"}
        found.append(rows.row("counters", **{**columns, **origin, **_shares(kernels, unit)}))
    return found


def _shares(kernels: list[dict[str, str]], unit: Mapping[str, str]) -> dict[str, Any]:
    names = [name for name in unit if name not in ("ID", "Kernel Name")]

    def column(piece: str) -> str | None:
        return next((name for name in names if piece in name), None)

    timed = column(TIME)
    if timed is None or not kernels:
        return {}
    seconds = [_number(k[timed]) * NANOSECONDS[unit[timed]] / 1e9 for k in kernels]
    found: dict[str, Any] = {"time_s": sum(seconds), "kernel": kernels[0]["Kernel Name"][:80]}
    found["count"] = len(kernels)
    for name, piece in SHARES.items():
        if (held := column(piece)) is not None:
            shares = [_number(k[held]) / 100.0 for k in kernels]
            found[name] = sum(s * t for s, t in zip(shares, seconds, strict=True)) / sum(seconds)
    return found


def _number(cell: str) -> float:
    return float(cell.replace(",", "")) if cell else 0.0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        run()
        return 0
    source, target = map(Path, arguments[1:3])
    rows.write_table(read(source.read_text().splitlines()), target)
    print(json.dumps({"rows": len(shapes()), "to": str(target)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

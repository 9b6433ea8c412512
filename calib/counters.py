"""Hardware counters of single kernels under Nsight Compute, to compare the simulator's activity with.

`python -m calib.counters run [SECONDS]` starts every shape once between two marks, for `ncu` to profile; `metrics` says
what to ask it for (beside its version's name of the tensor pipe's), and `read LOG.csv OUT` turns ncu's raw CSV into a
table of the measurements. Kernels between two marks are one shape; shares are averaged by their duration.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calib import rows
from calib.kernels import make
from calib.models import model_shape

MARK = "hold"  # the kernel of `csrc/smid_probe.cu` that stands before every shape
TIME = "gpu__time_duration.sum"
ELAPSED = "sm__cycles_elapsed.max"
# column -> (metric, whether it is a share of the cycles of the whole kernel); the tensor pipe's is called differently
# from one version of the profiler to the next
SHARES = {
    "sm_active": "sm__cycles_active.avg.pct",
    "dram_active": "dram__throughput.avg.pct",
    "tensor_active": "sm__pipe_tensor",
}
OF_CYCLES = {"sm_active_max": "sm__cycles_active.max", "sm_active_min": "sm__cycles_active.min"}
METRICS = (
    TIME,
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
MORE_METRICS = (ELAPSED, *OF_CYCLES.values(), "lts__t_bytes.sum")
NANOSECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
HEADROOM_S = 3.0


def shapes() -> list[dict[str, Any]]:
    """What is profiled: operators across the sizes that a step has, and mixed attention; the widest cover first."""
    made: list[dict[str, Any]] = []
    for many in ((1, 64, 256, 2048), (512, 16, 128, 1024), (32, 384, 768, 4096)):
        made += [{"kind": "gemm", "role": role, "m": m} for m in many for role in ("qkv", "gate_up", "down")]
        if len(made) < 20:
            made += _others()
    made += [{"kind": "gemm", "role": "o", "m": m} for m in (1, 64, 256, 512, 2048)]
    return made


def _others() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    made += [{"kind": kind, "m": m} for kind in ("rope", "activation", "norm") for m in (64, 2048)]
    made += [
        {"kind": "decode_attention", "contexts": [context] * batch, "attention": "fa2"}
        for batch, context in (
            (1, 8192),
            (8, 2048),
            (32, 2048),
            (64, 4096),
            (256, 1024),
            (4, 4096),
            (16, 4096),
        )
    ]
    made += [
        {"kind": "prefill_attention", "q": [q], "h": [h], "attention": backend}
        for q, h in ((512, 0), (512, 8192), (2048, 0), (2048, 4096))
        for backend in ("fa3", "fa2")
    ]
    made += [{"kind": "lm_head", "m": m} for m in (64, 1, 256)] + [{"kind": "sampling", "m": 64}]
    mixed = {"kind": "fused_attention", "q": [1024], "h": [4096], "contexts": [4096] * 64}
    made += [
        {**mixed, "attention": variant} for variant in ("batch_pod", "serial_fa3", "serial_fa2", "batched")
    ]
    made += [
        {"kind": "prefill_attention", "q": [q], "h": [h], "attention": "fa3"}
        for q, h in ((128, 0), (256, 2048), (1024, 1024), (4096, 0), (64, 8192))
    ]
    made += [
        {"kind": "decode_attention", "contexts": [context] * batch, "attention": "fa2"}
        for batch, context in ((33, 2048), (48, 2048), (128, 512), (2, 16384), (100, 1500))
    ]
    made += [{"kind": kind, "m": m} for kind in ("rope", "activation", "norm") for m in (512, 8192)]
    return made + [{"kind": "kv_write", "m": m} for m in (64, 2048)]


def marked(torch: Any, stream: Any, kernel: Any, arena: Any, name: Any) -> None:
    """Start a kernel once, warmed, behind a mark on `stream`, between the profiler's start and stop.

    Whatever a library raises: `name` is told, the shape has a mark and no kernels, and the run goes on.
    """
    from calib import cuda

    runs = True
    try:
        kernel.prepare(arena)
        kernel.run(0)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        runs = False
    stream.synchronize()
    torch.cuda.profiler.start()
    cuda.hold(stream.cuda_stream, 1000)
    if runs:
        kernel.run(1)
    stream.synchronize()
    torch.cuda.profiler.stop()


def between_marks(lines: Iterable[str]) -> tuple[dict[str, str], list[list[dict[str, str]]]]:
    """Units by column of `ncu --csv --page raw`, and the kernels behind each mark, a mapping of cells each."""
    table = csv.reader(line for line in lines if line.startswith('"'))
    head, units = next(table), next(table)
    groups: list[list[dict[str, str]]] = []
    for cells in table:
        kernel = dict(zip(head, cells, strict=True))
        if kernel["Kernel Name"].split("(")[0] == MARK:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return dict(zip(head, units, strict=True)), groups


def run(limit_s: float = float("inf"), model: str = "llama-3.1-8b") -> None:
    """Start every shape once, warmed, between the profiler's start and stop; none any more after `limit_s`."""
    from calib.arena import Arena

    start, done = time.monotonic(), 0
    arena = Arena(model_shape(model), layers=4, kv_bytes=8 << 30)
    arena.fill()
    torch = arena.torch
    with torch.cuda.stream(torch.cuda.Stream()):
        stream = torch.cuda.current_stream()
        for point in shapes():
            if time.monotonic() - start > limit_s - HEADROOM_S:
                break
            marked(torch, stream, make(arena.model, point), arena, point)
            done += 1
    print(f"{done} of {len(shapes())} shapes")


def read(lines: Iterable[str], model: str = "llama-3.1-8b") -> list[dict[str, Any]]:
    """A row a shape out of `ncu --csv --page raw`; a log that was cut short has the first shapes only.

    Raises ValueError if the log has more shapes than there are.
    """
    unit, groups = between_marks(lines)
    points = shapes()
    if len(groups) > len(points):
        raise ValueError(f"{len(groups)} shapes in the log, but there are {len(points)}")
    found = []
    for point, kernels in zip(points, groups, strict=False):
        shape = make(model_shape(model), point)
        columns = {"kind": shape.kind, "label": shape.label, **shape.columns(), "flops": shape.flops}
        origin = {"model": model, "bytes": shape.bytes, "launch": "eager"}
        found.append(rows.row("counters", **{**columns, **origin, **_counted(kernels, unit)}))
    return found


def _counted(kernels: list[dict[str, str]], unit: Mapping[str, str]) -> dict[str, Any]:
    """Seconds of a shape's kernels together, and what was counted in them, shares weighted by time."""

    def column(piece: str) -> str | None:
        return next((name for name in unit if piece in name), None)

    timed = column(TIME.partition(".")[0])
    if timed is None or not kernels:
        return {}
    seconds = [_number(k[timed]) * NANOSECONDS[unit[timed]] / 1e9 for k in kernels]
    found: dict[str, Any] = {"time_s": sum(seconds), "kernel": kernels[0]["Kernel Name"][:80]}
    found["count"] = len(kernels)
    for name, key in (("Grid Size", "grid"), ("Block Size", "block")):
        if name in kernels[0]:
            found[key] = "x".join(part.strip() for part in kernels[0][name].strip("()").split(","))

    def weighted(shares: list[float]) -> float:
        return sum(s * t for s, t in zip(shares, seconds, strict=True)) / sum(seconds)

    for name, piece in SHARES.items():
        if (held := column(piece)) is not None:
            found[name] = weighted([_number(k[held]) / 100.0 for k in kernels])
    elapsed = column(ELAPSED)
    for name, piece in OF_CYCLES.items():
        if elapsed is not None and (held := column(piece)) is not None:
            found[name] = weighted([_number(k[held]) / max(1.0, _number(k[elapsed])) for k in kernels])
    if elapsed is not None:
        found["sm_mhz"] = sum(_number(k[elapsed]) for k in kernels) / sum(seconds) / 1e6
    if (moved := column("lts__t_bytes.sum")) is not None:
        found["l2_bytes"] = sum(_number(k[moved]) for k in kernels) * BYTES.get(unit[moved], 1.0)
    return found


def _number(cell: str) -> float:
    return float(cell.replace(",", "")) if cell else 0.0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        run(*map(float, arguments[1:2]))
        return 0
    if arguments[:1] == ["metrics"]:
        print(",".join(METRICS + MORE_METRICS))
        return 0
    source, target = map(Path, arguments[1:3])
    found = read(source.read_text().splitlines())
    rows.write_table(found, target)
    print(json.dumps({"rows": len(found), "of": len(shapes()), "to": str(target)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

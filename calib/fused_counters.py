"""Hardware counters of mixed attention by variant: waves, occupancy, tensor pipe, HBM, L2, shared memory.

`python -m calib.fused_counters run` starts every shape and variant once between two marks, for `ncu` to profile with
`METRICS`; `read LOG.csv OUT.csv.gz` turns ncu's raw CSV into rows, one a kernel: of a variant of several kernels
(merges of KV splits among them) each has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calib import rows
from calib.counters import NANOSECONDS, between_marks, marked
from calib.kernels import make
from calib.models import model_shape

METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "launch__waves_per_multiprocessor",
    "launch__grid_size",
    "launch__block_size",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
)
# row column: piece of a metric's name, and what its value is multiplied by
SHARES = {
    "sm_active": "sm__cycles_active",
    "occupancy": "sm__warps_active",
    "dram_active": "dram__throughput",
    "tensor_active": "sm__pipe_tensor",  # its full name differs from one version of the profiler to the next
}
COUNTS = {
    "waves": "launch__waves",
    "grid": "launch__grid_size",
    "block": "launch__block_size",
    "registers": "launch__registers",
}
BYTES = {"l2_bytes": "lts__t_bytes.sum", "smem_bytes": "launch__shared_mem_per_block_dynamic"}
SIZES = {"byte": 1, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "kib": 1024, "mib": 1 << 20}
# chunk, history, decode batch, context: balanced, by prefill's tail wave, by long decodes, many short ones, small
MIXES = (
    (1024, 4096, 64, 4096),
    (2048, 8192, 64, 8192),
    (512, 16384, 16, 16384),
    (1024, 0, 128, 1024),
    (300, 1000, 8, 1000),
    (4096, 4096, 32, 16384),
)
VARIANTS = ("serial_fa2", "serial_fa3", "batched", "pod", "batch_pod")


def shapes() -> list[dict[str, Any]]:
    """Every mix by every variant."""
    return [
        {"kind": "fused_attention", "q": [q], "h": [h], "contexts": [context] * batch, "attention": variant}
        for q, h, batch, context in MIXES
        for variant in VARIANTS
    ]


def run(model: str = "llama-3.1-8b") -> None:
    """Start every shape once, warmed, between the profiler's start and stop."""
    from calib.arena import Arena

    arena = Arena(model_shape(model), layers=4, kv_bytes=24 << 30)
    arena.fill()
    torch = arena.torch
    streams = {"queued": torch.cuda.default_stream(), "graph": torch.cuda.Stream()}
    for point in shapes():
        kernel: Any = make(arena.model, point)
        stream = streams[kernel.launch]
        with torch.cuda.stream(stream):
            marked(torch, stream, kernel, arena, point["attention"])
    print(f"{len(shapes())} shapes")


def read(lines: Iterable[str], model: str = "llama-3.1-8b") -> list[dict[str, Any]]:
    """A row a kernel out of `ncu --csv --page raw`; a log that was cut short gives those that it has."""
    unit, groups = between_marks(lines)
    found = []
    for point, kernels in zip(shapes(), groups, strict=False):
        shape = make(model_shape(model), point)
        columns = {"kind": shape.kind, "label": shape.label, **shape.columns(), "flops": shape.flops}
        origin = {"model": model, "bytes": shape.bytes, "launch": "eager"}
        found += [
            rows.row("fused_counters", **columns, **origin, **_columns(kernel, unit)) for kernel in kernels
        ]
    return found


def _columns(kernel: Mapping[str, str], unit: Mapping[str, str]) -> dict[str, Any]:
    def value(piece: str) -> tuple[float, str] | None:
        name = next((name for name in unit if name.startswith(piece)), None)
        if name is None or not kernel[name]:
            return None
        return float(kernel[name].replace(",", "")), unit[name].lower()

    found: dict[str, Any] = {"kernel": kernel["Kernel Name"].split("<")[0][:60], "count": 1}
    if (held := value("gpu__time_duration")) is not None:
        found["time_s"] = held[0] * NANOSECONDS[held[1]] / 1e9
    for column, piece in SHARES.items():
        if (held := value(piece)) is not None:
            found[column] = held[0] / 100.0
    for column, piece in COUNTS.items():
        if (held := value(piece)) is not None:
            found[column] = held[0] if column == "waves" else int(held[0])
    for column, piece in BYTES.items():
        if (held := value(piece)) is not None:
            found[column] = held[0] * SIZES.get(held[1].split("/")[0], 1)
    return found


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        run()
        return 0
    if arguments[:1] == ["metrics"]:
        print(",".join(METRICS))
        return 0
    source, target = map(Path, arguments[1:3])
    found = read(source.read_text().splitlines())
    rows.write_table(found, target)
    print(f"{len(found)} kernels to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A made-up table of collectives in the format of a profile, and a profile folder that holds it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

MIB = 2**20
LATENCY_S, EAGER_S, RATE, HOST_S = 6e-6, 14e-6, 300e9, 11e-6
COPY_S, COPY_RATE = 10e-6, 360e9
SIZES = [2**k for k in range(10, 31, 2)]


def line(latency_s: float, rate: float) -> list[list[float]]:
    """Points of a latency and a bandwidth."""
    return [[size, latency_s + size / rate] for size in SIZES]


def curve(collective: str, launch: str, gpus: int = 2) -> dict[str, Any]:
    latency_s = LATENCY_S if launch == "graph" else EAGER_S
    return {
        "collective": collective,
        "gpus": gpus,
        "launch": launch,
        "points": line(latency_s, RATE),
        "sms": 16,
        "host_s": HOST_S if launch == "eager" else 0.0,
        "sd": 0.03,
        "measured_points": 40,
        "held_out": {"points": 20, "median": 0.01, "p95": 0.05, "bias": 0.0},
    }


def beside(compute: str, overlap: str, compute_factor: float, collective_factor: float) -> dict[str, Any]:
    return {
        "collective": "allreduce",
        "gpus": 2,
        "bytes": 4 * MIB,
        "compute": compute,
        "overlap": overlap,
        "compute_sms": 132 if overlap == "shared" else 112,
        "collective_factor": collective_factor,
        "compute_factor": compute_factor,
        "points": 4,
    }


COPY = {
    "method": "copy",
    "layout": "contiguous",
    "piece_bytes": 0,
    "gpus": 2,
    "points": line(COPY_S, COPY_RATE),
    "sms": 0,
    "sd": 0.02,
    "default": True,
    "measured_points": 20,
    "held_out": {"points": 10, "median": 0.008, "p95": 0.02, "bias": 0.0},
}
TABLE: dict[str, Any] = {
    "curves": [curve(name, way) for name in ("allreduce", "allgather") for way in ("graph", "eager")],
    "beside": [],
    "transfers": [COPY],
    "about": {"nccl": "made up"},
}


def table(**changes: Any) -> dict[str, Any]:
    """A copy of the table with other parts."""
    return {**deepcopy(TABLE), **deepcopy(changes)}


def folder(path: Path, data: dict[str, Any] | None = None, gpu: str = "h200-sxm") -> Path:
    """A profile folder whose one measured part are these collectives, over the spec profile."""
    path.mkdir(exist_ok=True)
    content = {
        "schema_version": 1,
        "name": "two-gpus",
        "gpu": gpu,
        "curves": [
            {"operator": "norm", "form": "roofline", "file": "norm.yaml", "label": "fitted from nothing"}
        ],
        "collectives": {"file": "collectives.json", "label": "measured", "coverage": "2 GPUs to 1 GiB"},
        "about": {"model": "llama-3.1-70b"},
    }
    (path / "profile.yaml").write_text(yaml.safe_dump(content))
    (path / "norm.yaml").write_text("bandwidth_efficiency: 0.7\n")
    (path / "collectives.json").write_text(json.dumps(TABLE if data is None else data))
    return path

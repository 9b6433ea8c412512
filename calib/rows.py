"""The one row schema of all sweeps, and the files that hold rows: a checkpoint while a sweep runs, then csv.gz."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

# A row is one measured time. Lists are joined with ";", absent values stay empty. Seconds, bytes, MHz, watts.
SHAPE = (
    "kind",  # gemm, lm_head, norm, ..., prefill_layer, decode_step, mixed_step, host
    "label",  # linear layer's role, attention back end, library, or the name of a host cost
    "m",  # rows of the linear layers
    "n",
    "k",
    "q_tokens",  # new tokens of each chunk
    "history_tokens",  # tokens of each chunk that are in the cache already
    "decode_batch",
    "context_mean",
    "context_sum",  # each context includes the token being computed
    "context_max",
    "decode_contexts",  # each context, where they differ
    "layers",
    "attention",  # fa2, fa3, sdpa: back end of prefill attention; of mixed attention its variant
    "dtype",  # where it is not bfloat16
    "experts",  # of a grouped GEMM over m tokens; `spread` is the exponent of their popularity
    "routing",  # rows by expert: dealt in proportion (absent) or drawn
    "compute_ctas",  # synthetic CTAs: how many of each kind, loops of each, lognormal sigma of the loops, how many
    "bandwidth_ctas",  # fit an SM
    "compute_work",
    "bandwidth_work",
    "spread",
    "ctas_per_sm",
    "gpus",  # of a group; without it one GPU ran alone
    "message_bytes",  # of one collective or transfer, counted as its module says
    "piece_bytes",  # of a transfer in scattered pieces
    "max_ctas",  # limit of the communicator
    "allreduces",  # 1: layers of a shard with their all-reduces, 0: the same without
    "sms",
    "priority",  # normal, high
)
NEIGHBOUR = tuple(
    f"neighbour_{name}"
    for name in (
        "kind",
        "label",
        "m",
        "q_tokens",
        "history_tokens",
        "decode_batch",
        "context_sum",
        "context_max",
        "gpus",
        "message_bytes",
        "sms",
        "priority",
        "mode",  # disjoint, half, whole (overlapping sets), streams (no partition)
        "start_s",  # span of the neighbour's work relative to the start of this one's
        "end_s",
    )
)
TIMES = (
    "launch",  # graph, eager
    "time_s",  # median
    "p25_s",
    "p75_s",
    "min_s",
    "max_s",
    "sd_s",
    "mean_s",
    "count",
    "alone_s",  # the same work on the same SMs with no neighbour, measured in the same block
    "host_s",  # host time to launch once
    "sm_mhz",
    "power_w",
    "throttled",
    "temperature_c",  # of the GPU
    "elapsed_s",  # since the start of a long run, or of its phase
    "phase",  # of a long run of several kernels in turn
    "gap_s",  # a launch that the GPU idles, waiting for the host
    "flops",
    "bytes",
    "error",  # against float32
    "span_s",  # from the first CTA's start to the last one's end, by the GPU's own clock
    "energy_j",  # of one launch, board and all, out of NVML's energy counter
    "sm_active",  # counters, as shares: SM cycles with a resident warp, tensor pipe, HBM
    "sm_active_max",  # the same of the SM that works longest and of the one that works least
    "sm_active_min",
    "tensor_active",
    "dram_active",
    "occupancy",  # resident warps
    "int_active",
    "fp32_active",
    "fp16_active",
    "l2_bytes",  # that passed through the L2
)
KERNEL = ("kernel", "grid", "block", "smem_bytes", "registers", "waves")  # waves: of CTAs
ORIGIN = ("seed", "unix_s", "card", "point", "skip")  # card: how the GPU's uuid begins
COLUMNS = ("sweep", "model", *SHAPE, *NEIGHBOUR, *TIMES, *KERNEL, *ORIGIN)


def row(sweep: str, **values: Any) -> dict[str, Any]:
    """A row with only schema columns; raises KeyError on another name, drops absent values."""
    unknown = set(values) - set(COLUMNS)
    if unknown:
        raise KeyError(f"not a column: {sorted(unknown)}")
    return {"sweep": sweep, **{name: value for name, value in values.items() if not absent(value)}}


def absent(value: Any) -> bool:
    """None, NaN or an empty string."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def as_neighbour(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The shape columns of one side as `neighbour_*` columns of the other."""
    return {f"neighbour_{k}": v for k, v in shape.items() if f"neighbour_{k}" in NEIGHBOUR}


class Checkpoint:
    """Appends rows to a JSON-lines file; every `append` is on disk when it returns.

    A kill can cut the last line short: opening drops what follows the last whole line.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        if resume and path.exists():
            self.rows, size = read_lines(path)
            os.truncate(path, size)
        elif path.exists():
            path.unlink()
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for item in rows:
            self.rows.append(dict(item))
            self._file.write(json.dumps(item, separators=(",", ":"), default=float) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def done(self) -> set[str]:
        """Keys of the points that have a row."""
        return {item["point"] for item in self.rows if "point" in item}

    def close(self) -> None:
        self._file.close()


def latest(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without those of points that were measured again: of a point, those that share its last row's stamp."""
    held = [dict(item) for item in rows]
    last = {item.get("point"): item.get("unix_s") for item in held}
    return [item for item in held if "point" not in item or item.get("unix_s") == last[item["point"]]]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a checkpoint and the size in bytes of its whole lines."""
    rows, size = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
            size += len(line)
    return rows, size


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table: schema order, columns that no row fills left out."""
    table = pd.DataFrame(list(rows))
    return table[[name for name in COLUMNS if name in table.columns]]


def write_table(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows as gzipped CSV in schema order."""
    write_csv(frame(rows), path)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as gzipped CSV, bytes independent of the clock, replacing `path` in one step."""
    text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    part = path.with_name(path.name + ".part")
    with part.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        packed.write(text.encode())
    part.replace(path)


def read_table(path: Path) -> pd.DataFrame:
    """A table written by `write_table`; list and name columns stay text."""
    text = ("q_tokens", "history_tokens", "neighbour_q_tokens", "neighbour_history_tokens")
    text += ("decode_contexts", "label", "neighbour_label", "card", "point", "skip")
    return pd.read_csv(path, dtype=dict.fromkeys(text, str))

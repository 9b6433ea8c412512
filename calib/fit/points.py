"""Measured rows as arrays, one set of points per operator: what every fit and every fold works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calib.kernels.experts import DEALT, rows_of
from calib.models import EXPERTS, MODELS
from calib.rows import read_table
from sim.cost.gpu import GpuSpec
from sim.cost.measured import FEATURES, Key
from sim.cost.model import ModelSpec, load_model
from sim.cost.operators import PICK_BYTES, effective_longest, linear_operators
from sim.cost.shapes import DecodeAttention, Elementwise, Experts, Gemm, PrefillAttention, Shape
from sim.errors import SimctlError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
KINDS = {
    "gemm": "gemm",
    "lm_head": "gemm",
    "prefill_attention": "prefill",
    "decode_attention": "decode",
    "norm": "elementwise",
    "rope": "elementwise",
    "activation": "elementwise",
    "kv_write": "elementwise",
    "sampling": "elementwise",
    "moe": "experts",
    "gemm_fp8": "gemm",
    "routing": "elementwise",
    "quantise": "elementwise",
}
# sweeps whose points make the curves of operators; those of other models' shapes come on top (`calib.fit.shapes`)
SWEEPS = (*KINDS, "experts", "fp8")
NAMES = {"gemm_fp8": "gemm/fp8"}
DTYPE_BYTES = 2  # all that is timed is of 16 bits where it does not say another type
FP8 = "float8_e4m3"
MOST_EXPERTS = 128  # columns that hold the rows of each expert
# steps around experts that engines run as the same kernels; PyTorch's weighted sum back is several
ROUTING = ("topk", "permute")
# device name (as the driver says it) -> built-in GPU
DEVICES = {
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H20": "h20-sxm",
    "NVIDIA H800": "h800-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-80gb-sxm",
    "NVIDIA A100-SXM4-40GB": "a100-40gb-sxm",
    "NVIDIA A800-SXM4-80GB": "a800-80gb-sxm",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA L40S": "l40s",
}


@dataclass(frozen=True)
class Points:
    """Measured times of one operator. All arrays have one entry a point.

    `kind`: key of `FEATURES`; `keys`: shape constants; `features`: raw values by axis name; `extra`: what a family
    needs beside (`context_max`). `clock`: SM clock over the data sheet's; 1 for points of a few milliseconds, whose
    one NVML reading is of what ran before (correcting by it made held-out errors of GEMMs larger, 4.4 to 4.9 %).
    """

    operator: str
    kind: str
    keys: tuple[Key, ...]
    features: Mapping[str, Floats]
    sms: Floats
    clock: Floats
    seconds: Floats
    spread: Floats
    extra: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, mask: Mask) -> Points:
        """The points of a mask."""
        return replace(
            self,
            keys=tuple(key for key, kept in zip(self.keys, mask, strict=True) if kept),
            features={name: values[mask] for name, values in self.features.items()},
            sms=self.sms[mask],
            clock=self.clock[mask],
            seconds=self.seconds[mask],
            spread=self.spread[mask],
            extra={name: values[mask] for name, values in self.extra.items()},
        )

    def groups(self) -> dict[Key, Mask]:
        """Masks of the points with the same constants."""
        at: dict[Key, Mask] = {}
        for key in sorted(set(self.keys)):
            at[key] = np.array([one == key for one in self.keys], dtype=bool)
        return at

    def coordinates(self) -> list[Floats]:
        """Raw values along the axes of the tables: features, then SMs."""
        return [*(self.features[name] for name in FEATURES[self.kind]), self.sms]

    def shape(self, key: Key) -> Shape:
        """All points as one shape with the constants `key`."""
        f = self.features
        if self.kind == "gemm":
            return Gemm(f["m"].astype(np.int64), key[0], key[1], key[2])
        if self.kind == "experts":
            n, k, experts, chosen, size = key
            dealt = self.extra.get("counts")
            # without the rows of each expert: as many as are expected where all are alike
            counts = None if dealt is None else dealt[:, :experts].astype(np.int64)
            return Experts(f["m"].astype(np.int64), n, k, size, experts, chosen, 0.0, counts)
        if self.kind == "elementwise":
            return Elementwise(f["rows"].astype(np.int64), key[0])
        if self.kind == "prefill":
            q, h = f["q"].astype(np.int64), f["h"].astype(np.int64)
            return PrefillAttention(q, h, key[0], key[1], key[2], key[3], None)
        batch = f["batch"].astype(np.int64)
        total, longest = f["batch"] * f["context"], self.extra.get("context_max")
        return DecodeAttention(batch, total, key[0], key[1], key[2], key[3], None, longest)


def read_rows(folder: Path, sweep: str) -> pd.DataFrame:
    """The rows of one sweep that have a time; empty if the sweep was not run."""
    path = folder / "measurements" / f"{sweep}.csv.gz"
    if not path.is_file():
        return pd.DataFrame()
    table = read_table(path)
    if "time_s" not in table.columns:
        return pd.DataFrame()
    ok = table["time_s"].notna() & (table["time_s"] > 0)
    if "skip" in table.columns:
        ok &= table["skip"].isna()
    return table[ok].reset_index(drop=True)


def gpu_of(device: str) -> str:
    """Built-in name of a device as its driver calls it; SimctlError if there is none."""
    for name, gpu in DEVICES.items():
        if device == name:
            return gpu
    raise SimctlError(f"Device '{device}' is no built-in GPU; say which one it is with --gpu.")


def numbers(cell: Any) -> list[int]:
    """A list cell ("512;2048") as whole numbers; empty for an empty cell."""
    if cell is None or (isinstance(cell, float) and np.isnan(cell)) or cell == "":
        return []
    return [int(float(part)) for part in str(cell).split(";")]


def column(rows: pd.DataFrame, name: str, default: float = np.nan) -> Floats:
    """A numeric column as floats, absent cells as `default`."""
    if name not in rows.columns:
        return np.full(len(rows), default)
    values = pd.to_numeric(rows[name], errors="coerce").to_numpy(dtype=np.float64)
    return np.where(np.isnan(values), default, values)


def operator_points(rows: pd.DataFrame, gpu: GpuSpec) -> dict[str, Points]:
    """Points of every solo operator in the rows, by operator name (`gemm`, `prefill_attention/fa3`, ...).

    Launches of several chunks are left out here (`chunked_rows`), and so is anything that ran beside a neighbour.
    """
    found: dict[str, Points] = {}
    if not len(rows):
        return found
    alone = rows if "neighbour_kind" not in rows.columns else rows[rows["neighbour_kind"].isna()]
    for kind in KINDS:
        of_kind = alone[alone["kind"] == kind]
        if not len(of_kind):
            continue
        for variant, part in _variants(kind, of_kind):
            points = _points(kind, variant, part.reset_index(drop=True), gpu)
            if len(points):
                found[points.operator] = points
    return found


def _variants(kind: str, rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    if kind == "prefill_attention":
        return [(str(name), part) for name, part in rows.groupby("attention")]
    if kind == "sampling":
        return [(str(name), part) for name, part in rows.groupby("label")]
    if kind == "moe":
        # rows dealt out evenly to the last one fill whole tiles, which no router does
        routing = rows["routing"] if "routing" in rows.columns else pd.Series(np.nan, rows.index)
        rows = rows[routing.notna() | (rows["spread"] > 0)]
        return [(name, part) for name, part in rows.groupby(_is_fp8(rows).map({True: "fp8", False: ""}))]
    if kind == "routing":
        steps = rows["label"].str.rpartition("/")[2]
        return [(name, rows[steps == name]) for name in ROUTING if (steps == name).any()]
    if kind == "quantise":
        # one kernel with a given scale: engines fuse what finds the scale, PyTorch does not
        return [("", rows[rows["label"] == "static"])]
    return [("", rows)]


def _is_fp8(rows: pd.DataFrame) -> Any:
    found = rows["dtype"] if "dtype" in rows.columns else pd.Series(None, rows.index, dtype=object)
    return found == FP8


def expert_counts(rows: pd.DataFrame) -> Floats:
    """Rows of each expert, shape (rows, MOST_EXPERTS), as the sweeps dealt or drew them."""
    found = np.zeros((len(rows), MOST_EXPERTS))
    for i, row in enumerate(rows.to_dict("records")):
        shape = EXPERTS[str(row["label"]).split("/")[0]]
        routing = row.get("routing")
        how = routing if isinstance(routing, str) else DEALT
        counts = rows_of(int(row["m"]), shape.experts, shape.chosen, float(row["spread"]), how)
        found[i, : len(counts)] = counts
    return found


def _points(kind: str, variant: str, rows: pd.DataFrame, gpu: GpuSpec) -> Points:
    family = KINDS[kind]
    extra: dict[str, Floats] = {}
    if family == "prefill":
        chunks = [
            (numbers(q), numbers(h)) for q, h in zip(rows["q_tokens"], rows["history_tokens"], strict=True)
        ]
        single = np.array([len(q) == 1 for q, _ in chunks], dtype=bool)
        rows = rows[single].reset_index(drop=True)
        kept = [chunk for chunk, one in zip(chunks, single, strict=True) if one]
        features = {
            "q": np.array([q[0] for q, _ in kept], dtype=np.float64),
            "h": np.array([h[0] for _, h in kept], dtype=np.float64),
        }
    elif family == "decode":
        batch, total = column(rows, "decode_batch"), column(rows, "context_sum")
        features = {"batch": batch, "context": total / batch}
        extra["context_max"] = longest(rows)
    else:
        features = {"rows" if family == "elementwise" else "m": column(rows, "m")}
        if family == "experts":
            extra["counts"] = expert_counts(rows)
    seconds, name = column(rows, "time_s"), NAMES.get(kind, kind)
    return Points(
        operator=f"{name}/{variant}" if variant else name,
        kind=family,
        keys=tuple(_key(kind, row) for row in rows.to_dict("records")),
        features=features,
        sms=column(rows, "sms"),
        clock=np.ones(len(rows)),
        seconds=seconds,
        spread=column(rows, "sd_s", 0.0) / seconds,
        extra=extra,
    )


def longest(rows: pd.DataFrame) -> Floats:
    """The effective longest context of decode batches, which is the mean where all are alike."""
    found = column(rows, "context_max")
    cells = rows["decode_contexts"] if "decode_contexts" in rows.columns else [None] * len(rows)
    for i, cell in enumerate(cells):
        if len(contexts := numbers(cell)) > 1:
            found[i] = effective_longest(contexts)
    return found


def _key(kind: str, row: Mapping[str, Any]) -> Key:
    # shards of tensor-parallel groups are calibration shapes, not models
    shard = MODELS.get(row["model"])
    size = 1 if row.get("dtype") == FP8 else DTYPE_BYTES
    if KINDS[kind] == "gemm":
        return (int(row["n"]), int(row["k"]), size)
    if kind in ("moe", "routing"):
        experts = EXPERTS[str(row["label"]).split("/")[0]]
        if kind == "moe":
            return (int(row["n"]), int(row["k"]), experts.experts, experts.chosen, size)
        rows_bytes = 2 * experts.chosen * experts.hidden * DTYPE_BYTES
        picked = experts.experts * DTYPE_BYTES + PICK_BYTES * experts.chosen
        return (rows_bytes if str(row["label"]).endswith("/permute") else picked,)
    if kind == "quantise":
        return (int(row["k"]) * (DTYPE_BYTES + 1),)
    if KINDS[kind] != "elementwise" and shard is not None:
        return (shard.heads, shard.kv_heads, shard.head_dim, DTYPE_BYTES)
    if shard is not None and kind in ("norm", "activation"):
        widths = {"norm": 4 * shard.hidden, "activation": 3 * shard.intermediate}
        return (widths[kind] * DTYPE_BYTES,)
    model = load_model(row["model"])
    if KINDS[kind] == "elementwise":
        return (bytes_per_row(model, kind),)
    return (model.q_heads, model.kv_heads, model.head_dim, model.dtype_bytes)


def bytes_per_row(model: ModelSpec, family: str) -> int:
    """Bytes per row of an element-wise operator as the cost model counts them."""
    for operator in linear_operators(model):
        if operator.name.split("/")[0] == family:
            return operator.bytes_per_row
    raise SimctlError(f"{model.name} has no operator '{family}'.")


def merged(parts: list[Points]) -> Points:
    """Several sets of points of one operator as one."""
    first = parts[0]
    return replace(
        first,
        keys=tuple(key for part in parts for key in part.keys),
        features={name: np.concatenate([p.features[name] for p in parts]) for name in first.features},
        sms=np.concatenate([p.sms for p in parts]),
        clock=np.concatenate([p.clock for p in parts]),
        seconds=np.concatenate([p.seconds for p in parts]),
        spread=np.concatenate([p.spread for p in parts]),
        extra={name: np.concatenate([p.extra[name] for p in parts]) for name in first.extra},
    )

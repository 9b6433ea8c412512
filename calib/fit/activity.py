"""SM activity by hardware counters: the terms of `sim.cost.activity`, and how far they are off kernel by kernel.

The errors that count are of kernels left out: each is predicted by terms and shares of the others. Tensor pipes are
compared by the FLOPs that a kernel executes, tiles and their padding included, at the clock that the profiler saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from calib.fit.points import KINDS, Floats, operator_points, read_rows
from sim.cost.activity import Activity, Terms, family_of
from sim.cost.gpu import GpuSpec
from sim.cost.measured import MeasuredCurve
from sim.cost.operators import flops
from sim.cost.shapes import DecodeAttention, Gemm, PrefillAttention, Shape, Timing

# 16-bit FLOPs a cycle of an SM's tensor pipes (Hopper tuning guide: 989 TFLOP/s at 1,830 MHz); the warp-wide products
# of FlashInfer's FA2 keep the pipe busy for as long as this share of that says (the counters' own figure, all shapes)
SM_FLOPS, WARP_WIDE = 4096.0, 0.63
TILE_M, TILE_ROWS = 8, 16  # least columns of a product in a linear layer; query rows of a tile in FA2
# terms of each family that counters identify, where the search starts and how far it may go
SEARCH: dict[str, dict[str, tuple[float, float]]] = {
    "elementwise": {"kept": (0.97, 1.0), "launch_s": (2e-6, 5e-6)},
    "decode": {"kept": (0.97, 1.0), "launch_s": (2e-6, 5e-6), "partial": (0.3, 1.0)},
    "prefill": {"kept": (0.97, 1.0), "launch_s": (2e-6, 8e-6), "start_s": (1e-6, 5e-6)},
}
BACKEND = "fa3"  # of prefill attention, whose terms are fitted; FA2's kernels are compared
CLOSE = 0.03


@dataclass(frozen=True)
class Counted:
    """One kernel of the counter sweep: its shape, the curve's timing, and the shares that were counted."""

    what: str
    operator: str
    shape: Shape
    timing: Timing
    sm: float
    row: Mapping[str, Any]

    @property
    def fitted(self) -> bool:
        """Do the terms come from it?"""
        return not isinstance(self.shape, PrefillAttention) or self.operator.endswith(BACKEND)


def read_counted(folder: Path, gpu: GpuSpec, curves: Mapping[str, MeasuredCurve]) -> list[Counted]:
    """Kernels of the counter sweep that a curve covers."""
    rows = read_rows(folder, "counters")
    found: list[Counted] = []
    for at in range(len(rows)):
        row = rows.iloc[at : at + 1].assign(sms=gpu.sms, sd_s=0.0)
        one = row.iloc[0]
        if one["kind"] not in KINDS or not np.isfinite(one.get("sm_active", np.nan)):
            continue
        for operator, points in operator_points(row, gpu).items():
            if operator in curves:
                shape = points.shape(points.keys[0])
                timing = curves[operator].timing(shape, gpu.sms)
                found.append(
                    Counted(_name(one), operator, shape, timing, float(one["sm_active"]), one.to_dict())
                )
    return found


def fit_activity(counted: list[Counted], gpu: GpuSpec) -> Activity | None:
    """Terms and shares out of counted kernels; None where there are too few of a family."""
    families = {}
    for name, searched in SEARCH.items():
        mine = [one for one in counted if family_of(one.shape) == name and one.fitted]
        if len(mine) > len(searched):
            families[name] = _fitted(mine, gpu, name, searched)
    shares: dict[tuple[int, int], dict[int, float]] = {}
    for one in counted:
        if isinstance(one.shape, Gemm):
            shares.setdefault((one.shape.n, one.shape.k), {})[int(one.shape.m[0])] = round(one.sm, 4)
    table = {key: _sorted(shares[key]) for key in sorted(shares) if len(shares[key]) > 1}
    if not families or not table:
        return None
    count = sum(one.fitted for one in counted)
    return Activity(gpu, families, table, f"fitted from hardware counters of {count} kernels")


def with_parts(model: Activity, folder: Path) -> Activity:
    """The same with what linear layers keep of the SMs of a part of the GPU: by GPM over runs of a second or two."""
    found = []
    for sweep in ("power", "power_mix"):
        rows = read_rows(folder, sweep)
        if not len(rows) or "sm_active" not in rows.columns:
            continue
        alone = rows["neighbour_kind"].isna() if "neighbour_kind" in rows.columns else True
        kept = rows[
            (rows["kind"] == "gemm") & (rows["sms"] < model.gpu.sms) & rows["sm_active"].notna() & alone
        ]
        for row in kept.itertuples():
            whole = model.counted.get((int(row.n), int(row.k)))
            if whole is not None:
                held = float(np.interp(np.log2(row.m), np.log2(whole[0]), whole[1])) * model.gpu.sms / row.sms
                found.append(float(row.sm_active) * model.gpu.sms / row.sms / min(held, 1.0))
    return replace(model, parted=round(float(np.median(found)), 4)) if found else model


def _sorted(shares: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    tokens = sorted(shares)
    return tuple(tokens), tuple(shares[m] for m in tokens)


def _fitted(
    mine: list[Counted], gpu: GpuSpec, family: str, searched: Mapping[str, tuple[float, float]]
) -> Terms:
    start = np.array([first for first, _ in searched.values()])
    most = np.array([limit for _, limit in searched.values()])

    def terms(scaled: Floats) -> Terms:
        made = {"kept": 1.0, **dict(zip(searched, (float(v) for v in scaled * start), strict=True))}
        return Terms(**made)

    def off(scaled: Floats) -> Floats:
        model = Activity(gpu, {family: terms(scaled)}, {}, "")
        return np.array([_alone(model, one, gpu) - one.sm for one in mine])

    solved = least_squares(off, np.ones(len(start)), bounds=(0.0, most / start), loss="soft_l1", f_scale=0.02)
    found = terms(solved.x)
    seconds = (round(found.launch_s, 9), round(found.start_s, 9))
    return Terms(round(found.kept, 4), *seconds, round(found.partial, 4))


def _alone(model: Activity, one: Counted, gpu: GpuSpec) -> float:
    return float(model.alone(one.operator, one.shape, one.timing, gpu.sms)[0])


def activity_rows(counted: list[Counted], gpu: GpuSpec) -> list[dict[str, Any]]:
    """One mapping a kernel: shares by the terms of all, by those of the other kernels alone, and by the counters."""
    whole = fit_activity(counted, gpu)
    if whole is None:
        return []
    rows = []
    for i, one in enumerate(counted):
        others = fit_activity([*counted[:i], *counted[i + 1 :]], gpu) if one.fitted else whole
        row = {
            "what": one.what,
            "time_s": float(one.row["time_s"]),
            "sm_ours": _round(_alone(whole, one, gpu)),
            "sm_others": _round(_alone(others or whole, one, gpu)),
            "sm_counted": _round(one.sm),
        }
        if np.isfinite(one.row.get("tensor_active", np.nan)) and np.isfinite(one.row.get("sm_mhz", np.nan)):
            row |= {
                "tensor_ours": _round(tensor_share(one, gpu)),
                "tensor_counted": _round(one.row["tensor_active"]),
            }
        rows.append({**row, "dram_counted": _round(one.row.get("dram_active", np.nan))})
    return rows


def activity_errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of SM activity (points of the peak, as shares): of kernels left out, and of all as shipped."""

    def summary(errors: list[float]) -> dict[str, Any]:
        size = np.abs(errors)
        return {
            "points": len(errors),
            "median": round(float(np.median(size)), 4),
            "p90": round(float(np.percentile(size, 90)), 4),
            "p95": round(float(np.percentile(size, 95)), 4),
            "bias": round(float(np.mean(errors)), 4),
            "close": round(float(np.mean(size <= CLOSE)), 4),
        }

    if not rows:
        return {}
    found = {
        "left out": summary([row["sm_others"] - row["sm_counted"] for row in rows]),
        "as shipped": summary([row["sm_ours"] - row["sm_counted"] for row in rows]),
    }
    tensor = [row["tensor_ours"] - row["tensor_counted"] for row in rows if "tensor_ours" in row]
    return {**found, **({"tensor": summary(tensor)} if tensor else {})}


def tensor_share(one: Counted, gpu: GpuSpec) -> float:
    """Share of cycles that tensor pipes are busy: FLOPs executed over what all SMs do in the kernel's cycles."""
    shape = one.shape
    work, rate = float(np.sum(flops(shape))), SM_FLOPS
    if isinstance(shape, Gemm):
        m = float(np.sum(shape.m))
        work *= np.ceil(m / TILE_M) * TILE_M / max(m, 1.0)
    elif isinstance(shape, DecodeAttention):
        group = shape.q_heads / shape.kv_heads
        work, rate = work * max(1.0, TILE_ROWS / group), SM_FLOPS * WARP_WIDE
    elif isinstance(shape, PrefillAttention) and not one.operator.endswith(BACKEND):
        rate = SM_FLOPS * WARP_WIDE
    cycles = float(one.row["time_s"]) * float(one.row["sm_mhz"]) * 1e6
    return work / (rate * gpu.sms * cycles)


def _name(one: Any) -> str:
    kind = str(one["kind"]).replace("_", " ")
    if one["kind"] == "prefill_attention":
        return f"{kind} {one['attention']}, {one['q_tokens']} on {one['history_tokens']}"
    if one["kind"] == "decode_attention":
        return f"{kind} {one['decode_batch']:.0f} × {one['context_mean']:.0f}"
    label = one.get("label")
    return f"{kind}{f' {label}' if isinstance(label, str) and label != kind else ''}, m {one['m']:.0f}"


def _round(value: Any) -> float:
    return round(float(value), 4)

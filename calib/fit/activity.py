"""SM and tensor activity as the curves have them, beside hardware counters of the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calib.fit.points import KINDS, operator_points, read_rows
from sim.cost.gpu import GpuSpec
from sim.cost.measured import MeasuredCurve
from sim.cost.operators import flops


def activity_rows(folder: Path, gpu: GpuSpec, curves: Mapping[str, MeasuredCurve]) -> list[dict[str, Any]]:
    """One mapping a kernel of the counter sweep that a curve covers: shares by the curve and by the counters."""
    rows = read_rows(folder, "counters")
    found: list[dict[str, Any]] = []
    for at in range(len(rows)):
        row = rows.iloc[at : at + 1].assign(sms=gpu.sms, sd_s=0.0)
        one = row.iloc[0]
        if one["kind"] not in KINDS:
            continue
        for operator, points in operator_points(row, gpu).items():
            if operator not in curves or not np.isfinite(one.get("tensor_active", np.nan)):
                continue
            shape = points.shape(points.keys[0])
            timing = curves[operator].timing(shape, gpu.sms)
            seconds = float(np.sum(timing.seconds))
            found.append(
                {
                    "what": _name(one),
                    "time_s": float(one["time_s"]),
                    "sm_ours": _round(float(np.sum(timing.sm_s)) / (seconds * gpu.sms)),
                    "sm_counted": _round(one["sm_active"]),
                    "tensor_ours": _round(float(np.sum(flops(shape))) / (gpu.peak_flops * seconds)),
                    "tensor_counted": _round(one["tensor_active"]),
                    "dram_counted": _round(one["dram_active"]),
                }
            )
    return found


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

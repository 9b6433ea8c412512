"""The simulator's SM and tensor activity against hardware counters, kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calib.report.data import Profile
from calib.report.text import Section, percent, table, us


def activity(profile: Profile) -> Section | None:
    """Shares by the curves beside shares by counters, as profile.yaml states them."""
    found: list[Mapping[str, Any]] = profile.about.get("activity") or []
    if not found:
        return None
    rows, off = [], {"sm": [], "tensor": []}
    for one in found:
        pairs = []
        for name, errors in off.items():
            ours, counted = one[f"{name}_ours"], one[f"{name}_counted"]
            errors.append(ours - counted)
            pairs += [percent(ours), percent(counted)]
        rows.append((one["what"], us(one["time_s"]), *pairs, percent(one["dram_counted"])))
    parts = [
        f"{words} {percent(float(np.median(np.abs(off[name]))))} (bias {100 * float(np.mean(off[name])):+.0f} %)"
        for name, words in (("sm", "SM activity by"), ("tensor", "tensor activity by"))
    ]
    lead = f"Over {len(rows)} kernels the curves miss the counters' {' and '.join(parts)} of the peak at the median."
    head = (
        "kernel",
        "µs under the profiler",
        "SMs, ours",
        "SMs, counted",
        "tensor, ours",
        "tensor, counted",
        "HBM",
    )
    note = (
        "Counters by Nsight Compute with the clocks left alone: sm__cycles_active, sm__pipe_tensor_cycles_active and "
        "dram__throughput, each as a share of its peak over the kernel; of several kernels weighted by time. Ours is "
        "SM-seconds over SMs × seconds, and FLOPs over the data sheet's peak × seconds, at the curve's own time."
    )
    return Section("SM and tensor activity against counters", lead, [table(head, rows), note])

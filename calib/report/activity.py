"""The simulator's SM and tensor activity against hardware counters, kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calib.report.data import Profile
from calib.report.text import Section, percent, table, us


def activity(profile: Profile) -> Section | None:
    """Shares by the profile beside shares by counters, as profile.yaml states them."""
    found: list[Mapping[str, Any]] = profile.about.get("activity") or []
    errors = (profile.about.get("errors") or {}).get("activity") or {}
    if not found or "as shipped" not in errors:
        return None
    rows = []
    for one in found:
        sm = [percent(one[name]) for name in ("sm_ours", "sm_others", "sm_counted")]
        tensor = [percent(one[name]) if name in one else "–" for name in ("tensor_ours", "tensor_counted")]
        rows.append((one["what"], us(one["time_s"]), *sm, *tensor, percent(one["dram_counted"])))
    ours, others, tensor = (errors.get(name) for name in ("as shipped", "left out", "tensor"))
    lead = (
        f"Of {len(rows)} kernels SM activity is within 3 points of the counters for {percent(ours['close'])} "
        f"(median off {percent(ours['median'], 1)}); told from the other kernels alone, for {percent(others['close'])} "
        f"(median {percent(others['median'], 1)})"
    )
    if tensor:
        lead += f", tensor activity for {percent(tensor['close'])}"
    head = (
        "kernel",
        "µs under the profiler",
        "SMs, ours",
        "by the others",
        "counted",
        "tensor, ours",
        "counted",
        "HBM",
    )
    note = (
        "Counters by Nsight Compute with the clocks left alone: sm__cycles_active, sm__pipe_tensor_cycles_active and "
        "dram__throughput, each as a share of its peak over the kernel; of several kernels weighted by time. Ours: SMs "
        "that CTAs and their waves hold, launch included, since the profiler runs kernels alone; linear layers as "
        "counted at each size (the library changes its kernel between sizes, which the others cannot tell). Tensor "
        "activity: FLOPs that the kernel executes, padding to tiles included, over 4096 a cycle and SM (FA2's "
        "warp-wide products: 63 % of that), at the profiler's clock."
    )
    return Section("SM and tensor activity against counters", f"{lead}.", [table(head, rows), note])

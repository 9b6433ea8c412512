"""Watts, joules and clocks of operators and steps in runs of seconds, and what they do to a kernel's time."""

from __future__ import annotations

import pandas as pd

from calib.report.data import Profile
from calib.report.scaling import described
from calib.report.text import Section, ms, number, percent, ratio, table, tokens

COUNTERS = ("sm_active", "tensor_active", "dram_active")
FUSED = ("serial_fa2", "serial_fa3", "batch_pod")
CAPPED = 0.95  # of the limit: from here on the limit is what holds the clock


def power(profile: Profile) -> Section | None:
    """Each operator rested and then held for seconds."""
    found = profile.timed("power")
    if found.empty or "elapsed_s" not in found or "energy_j" not in found:
        return None
    alone = found[found.neighbour_kind.isna()] if "neighbour_kind" in found else found
    hot = alone[alone.elapsed_s > 0]
    cold = alone[alone.elapsed_s == 0].set_index("point").time_s
    slower = hot.time_s / hot.point.map(cold)
    limit = float(profile.run["gpu"]["power_limit_w"])
    capped = hot[hot.power_w >= CAPPED * limit]
    worst = slower.idxmax()
    lead = (
        f"{len(capped)} of {len(hot)} kernels and steps run at the power limit when held for seconds; the clock falls "
        f"to {tokens(hot.sm_mhz.min())} MHz, and {_name(hot.loc[worst])} takes {ratio(slower.max())} times as long as "
        f"rested ({percent(float((slower < 1.02).mean()))} of them stay within 2 %)."
    )
    rows = []
    for at, one in hot.iterrows():
        work = [percent(one[name]) if name in hot and pd.notna(one[name]) else "–" for name in COUNTERS]
        rows.append(
            (
                _name(one),
                tokens(one.sms),
                ms(one.time_s),
                ratio(slower[at]),
                tokens(one.sm_mhz),
                tokens(one.power_w),
                number(one.energy_j * 1e3),
                *work,
            )
        )
    head = ("what", "SMs", "ms, hot", "hot / rested", "MHz", "W", "mJ", "SMs active", "tensor", "HBM")
    note = (
        f"Held for {number(float(hot.elapsed_s.median()))} s without a pause after a rest of 0.4 s; rested is the "
        "first tens of milliseconds, watts the slope of NVML's energy counter over the later part, mJ watts × time of "
        "one launch, board and memory included. SMs with a resident warp, tensor pipe and HBM bandwidth are NVML's "
        "performance counters (GPM) over the same window."
    )
    body = [table(head, rows), note, *_beside(found), *_fused(hot)]
    return Section("Watts and clock by operator", lead, body)


def _name(one: pd.Series) -> str:
    if one.kind == "fused_attention":
        return (
            f"attention {one.label}, {one.q_tokens} on {one.history_tokens} beside {tokens(one.decode_batch)}"
        )
    text = str(one.kind).replace("_", " ")
    if one.kind in ("gemm", "prefill_attention"):
        text += f" {one.label}"
    return f"{text} {described(pd.DataFrame([one]))}".strip()


def _beside(found: pd.DataFrame) -> list[str]:
    if "neighbour_mode" not in found or found.neighbour_mode.isna().all():
        return []
    rows = []
    pairs = found[found.neighbour_mode.notna()]
    for _, part in pairs.groupby("point", sort=False):
        a, b = part.iloc[0], part.iloc[-1]
        work = [percent(a[name]) if name in part and pd.notna(a[name]) else "–" for name in COUNTERS]
        rows.append(
            (
                f"{a.neighbour_mode} {tokens(a.sms)}/{tokens(b.sms)}",
                ms(a.time_s),
                ratio(a.time_s / a.alone_s),
                ms(b.time_s),
                ratio(b.time_s / b.alone_s),
                tokens(a.sm_mhz),
                tokens(a.power_w),
                *work,
            )
        )
    head = ("mode, SMs", "layer ms", "/ rested alone", "step ms", "/ rested alone (step)", "MHz", "W")
    head += ("SMs active", "tensor", "HBM")
    text = "Side by side for as long: a prefill layer of 2048 tokens beside decode steps of 64 × 2048 tokens."
    return [f"{text}\n\n{table(head, rows)}"]


def _fused(hot: pd.DataFrame) -> list[str]:
    part = hot[(hot.kind == "fused_attention") & hot.label.isin(FUSED)].set_index("label")
    if not set(FUSED) <= set(part.index):
        return []
    joules = {name: float(part.energy_j[name]) for name in FUSED}
    less = {name: 1 - joules["batch_pod"] / joules[name] for name in FUSED[:2]}
    return [
        "Energy of one layer's mixed attention (1024 on 8192 beside 64 × 4096): "
        + ", ".join(f"{name} {number(1e3 * value)} mJ" for name, value in joules.items())
        + f"; BatchPOD takes {percent(less['serial_fa2'])} less than FA2-serial (POD-Attention on an A100: 20.5 % on "
        f"average, 35 % at most) and {percent(-less['serial_fa3'])} more than FA3-serial."
    ]

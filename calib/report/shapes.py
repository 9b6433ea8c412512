"""Other models' shapes: how the curves do on them, experts under routing skew, e4m3 products."""

from __future__ import annotations

import pandas as pd

from calib.report.data import Profile
from calib.report.text import Section, number, percent, ratio, table, tokens, us

SHOWN_M = (16, 128, 1024, 4096)


def others(profile: Profile) -> Section | None:
    """Errors on other models' shapes without and with tables of their own."""
    operators = profile.about.get("errors", {}).get("operators", {})
    rows = []
    for name, entry in operators.items():
        found = entry.get("other_models")
        if found:
            cells = [
                percent(found[fold][key], 1)
                for fold in ("without", "random")
                for key in ("median", "p95", "bias")
            ]
            rows.append((name, found["random"]["points"], *cells))
    measured = profile.timed("shapes")
    if not rows or measured.empty:
        return None
    models = ", ".join(sorted(measured.model.unique()))
    lead = (
        f"What was fitted to {profile.run['model']} alone is {rows[0][2]} off at the median on {rows[0][0]} shapes of "
        f"other models (p95 {rows[0][3]}); with a few points of their own {rows[0][5]} (p95 {rows[0][6]})."
    )
    head = ("operator", "n", "median, unseen", "p95, unseen", "bias, unseen")
    head += ("median, held-out fifth", "p95, held-out fifth", "bias, held-out fifth")
    note = f"Whole GPU; shapes of {models} (a tensor-parallel shard is what one GPU of the group computes)."
    return Section("Shapes of other models", lead, [table(head, rows), note])


def experts(profile: Profile) -> Section | None:
    """Grouped GEMMs against tokens and skew."""
    found = profile.timed("moe")
    if found.empty or "spread" not in found:
        return None
    rows, worst = [], 0.0
    skews = sorted(found.spread.unique())
    for (label, m), part in found.groupby(["label", "m"], sort=True):
        times = part.drop_duplicates("spread").set_index("spread").time_s
        even = float(times.get(0.0, float("nan")))
        slow = times / even
        worst = max(worst, float(slow.max()))
        rate = part[part.spread == 0.0]
        cells = [ratio(float(slow[s])) if s in slow.index else "–" for s in skews[1:]]
        rows.append(
            (label, tokens(m), us(even), number(float((rate.flops / rate.time_s).max() / 1e12)), *cells)
        )
    lead = f"A skewed routing makes the grouped GEMMs of experts up to {ratio(worst)} times as slow as an even one."
    head = (
        "experts / layer",
        "tokens",
        "µs, even",
        "TFLOP/s, even",
        *(f"Zipf {s:g} / even" for s in skews[1:]),
    )
    note = (
        "torch._grouped_mm, 128 experts of which each token picks 8; rows fall to experts by rank to the power of "
        "minus the exponent. Fewer experts are read where the skew leaves some without rows, so a skew can also be "
        "faster."
    )
    return Section("Experts under routing skew", lead, [table(head, rows), note])


def fp8(profile: Profile) -> Section | None:
    """e4m3 against bf16 on the same (n, k)."""
    found, dense = profile.timed("gemm_fp8"), profile.timed("gemm")
    if found.empty or dense.empty:
        return None
    whole = pd.concat([dense[dense.sms == profile.sms], profile.timed("shapes")])
    bf16 = whole[whole.kind == "gemm"].groupby(["n", "k", "m"]).time_s.median()
    rows, gains = [], []
    for (n, k), part in found.groupby(["n", "k"], sort=True):
        at = part.set_index("m").time_s
        cells = []
        for m in SHOWN_M:
            other = bf16.get((n, k, m))
            gain = float(other / at[m]) if other is not None and m in at.index else float("nan")
            gains.append(gain)
            cells.append(ratio(gain))
        rate = float((part.flops / part.time_s).max() / 1e12)
        rows.append((f"{tokens(n)} × {tokens(k)}", number(rate), *cells))
    known = [gain for gain in gains if gain == gain]
    lead = (
        f"e4m3 products are {min(known):.2f} to {max(known):.2f} times as fast as bf16 ones of the same shape (no "
        "scaling of the inputs in the time)."
    )
    head = ("n × k", "best TFLOP/s", *(f"bf16 / e4m3, m {m}" for m in SHOWN_M))
    return Section("e4m3 linear layers", lead, [table(head, rows)])

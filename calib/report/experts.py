"""Mixtures of experts: their grouped GEMMs against tokens, skew and SMs, and what surrounds them."""

from __future__ import annotations

import pandas as pd

from calib.kernels.experts import DRAWN, FP8, dealt
from calib.models import EXPERTS
from calib.report.data import Profile
from calib.report.text import Section, number, percent, ratio, table, tokens, us
from sim.cost.spec import GROUPED_TILE

FULL_M = 2048  # tokens from which on even experts fill a tile
TILE = GROUPED_TILE[0]
SHOWN_M = (1, 8, 32, 128, 512, 2048, 8192)


def experts(profile: Profile) -> Section | None:
    """Grouped GEMMs against tokens and skew, as dealt and as drawn."""
    found = profile.timed("moe")
    if found.empty or "spread" not in found:
        return None
    by_skew, worst = _dealt(found)
    lead = f"A skewed routing makes the grouped GEMMs of experts up to {ratio(worst)} times as slow as an even one."
    note = (
        "torch._grouped_mm; rows are dealt to 128 experts, of which a token takes 8, in proportion to rank to the "
        "power of minus the exponent. Fewer experts are read where the skew leaves some without rows, so that it can "
        "also be faster. Rows dealt out evenly to the last one fill whole tiles of 128 at 2048 tokens, as no router "
        "does; such points are shown here and left out of the fit."
    )
    drawn = profile.timed("experts")
    return Section(
        "Experts under routing skew", lead, [by_skew, note, *_tiles(found), *_drawn(profile, drawn)]
    )


def _dealt(found: pd.DataFrame) -> tuple[str, float]:
    rows, worst = [], 0.0
    skews = sorted(found.spread.unique())
    for (label, m), part in found.groupby(["label", "m"], sort=True):
        times = part.drop_duplicates("spread").set_index("spread").time_s
        even = float(times.get(0.0, float("nan")))
        slow = times / even
        worst = max(worst, float(slow.max()))
        if m not in SHOWN_M and m != 1024:
            continue
        rate = part[part.spread == 0.0]
        cells = [ratio(float(slow[s])) if s in slow.index else "–" for s in skews[1:]]
        rows.append(
            (label, tokens(m), us(even), number(float((rate.flops / rate.time_s).max() / 1e12)), *cells)
        )
    ratios = (f"Zipf {s:g} / even" for s in skews[1:])
    return table(("experts / layer", "tokens", "µs, even", "TFLOP/s, even", *ratios), rows), worst


def _tiles(found: pd.DataFrame) -> list[str]:
    """Is it the hottest expert, or the number of tiles?"""
    most = found[(found.spread == found.spread.max()) & (found.m >= FULL_M)]
    if most.empty:
        return []
    even = found[found.spread == 0.0].set_index(["label", "m"]).time_s
    slow, tiles, hottest = [], [], []
    for label, m, spread, seconds in zip(most.label, most.m, most.spread, most.time_s, strict=True):
        shape = EXPERTS[label.split("/")[0]]
        rows = dealt(int(m) * shape.chosen, shape.experts, float(spread))
        alike = dealt(int(m) * shape.chosen, shape.experts, 0.0)
        slow.append(seconds / even[label, m])
        tiles.append(sum(-(-n // TILE) for n in rows) / sum(-(-n // TILE) for n in alike))
        hottest.append(max(rows) / max(alike))
    return [
        f"At {FULL_M} tokens and more, exponent {found.spread.max():g} gives the most popular expert "
        f"{min(hottest):.0f} times as many rows, makes {ratio(min(tiles))} to {ratio(max(tiles))} times as many tiles "
        f"of {TILE} rows, and takes {ratio(min(slow))} to {ratio(max(slow))} times as long: tiles are shared out among "
        "the SMs, and the most popular expert sets no last wave."
    ]


def _drawn(profile: Profile, found: pd.DataFrame) -> list[str]:
    if found.empty:
        return []
    found = found[found["routing"] == DRAWN]
    fp8 = found["dtype"] == FP8 if "dtype" in found else pd.Series(False, index=found.index)
    whole = found[(found.sms == profile.sms) & ~fp8]
    made = [
        "Rows as tokens draw them (each its own distinct experts, all with the same odds), µs on the whole GPU:",
        _by_tokens(whole[whole.spread == 0.0]),
    ]
    skewed = whole[whole.spread > 0.0]
    if len(skewed):
        at = whole[whole.spread == 0.0].set_index(["label", "m"]).time_s
        slow = skewed.set_index(["label", "m"]).time_s / at
        made.append(
            f"With odds of rank to the power of minus {skewed.spread.max():g} they take {ratio(float(slow.min()))} to "
            f"{ratio(float(slow.max()))} times as long: a small batch touches fewer experts, a chunk makes more tiles."
        )
    made += _on_sets(profile, found[(found.spread == 0.0) & ~fp8]) + _in_fp8(profile, found, fp8)
    return [*made, *_around(profile), _errors(profile)]


def _by_tokens(found: pd.DataFrame) -> str:
    at = found.set_index(["label", "m"]).time_s
    rows = [
        (label, *(us(float(at.get((label, m), float("nan")))) for m in SHOWN_M))
        for label in sorted(found.label.unique())
    ]
    return table(("experts / layer", *(f"m {tokens(m)}" for m in SHOWN_M)), rows)


def _on_sets(profile: Profile, found: pd.DataFrame) -> list[str]:
    sets = sorted(found.sms.unique())[:-1]
    at = found.set_index(["label", "m", "sms"]).time_s
    shown = (
        [(label, m) for label, m in found[found.sms == sets[0]].groupby(["label", "m"]).groups]
        if sets
        else []
    )
    rows = [
        (label, tokens(m), *(ratio(float(at[label, m, sms] / at[label, m, profile.sms])) for sms in sets))
        for label, m in shown
    ]
    if not rows:
        return []
    head = ("experts / layer", "tokens", *(f"{sms} SMs" for sms in sets))
    told = (
        "Time on SM sets over that on the whole GPU. The kernel is launched with as many CTAs as the GPU has SMs, so "
        "that on fewer some SMs have two or more: grouped GEMMs gain more from the last SMs than dense ones."
    )
    return [told, table(head, rows)]


def _in_fp8(profile: Profile, found: pd.DataFrame, fp8: pd.Series) -> list[str]:
    small = found[fp8 & (found.sms == profile.sms)]
    if small.empty:
        return []
    wide = found[~fp8 & (found.sms == profile.sms) & (found.spread == 0.0)].set_index(["label", "m"]).time_s
    gain = wide.reindex(small.set_index(["label", "m"]).index) / small.set_index(["label", "m"]).time_s
    low, high = float(gain.min()), float(gain.max())
    return [
        f"In e4m3 (torch._scaled_grouped_mm) they are {ratio(low)} to {ratio(high)} times as fast as in bf16."
    ]


def _around(profile: Profile) -> list[str]:
    """Choice of experts, rows to them and back."""
    found = profile.timed("routing")
    found = found[(found.kind == "routing") & (found.sms == profile.sms)]
    return ["Around the experts, plain PyTorch, µs:", _by_tokens(found)] if len(found) else []


def _errors(profile: Profile) -> str:
    operators = profile.about.get("errors", {}).get("operators", {})
    told = []
    for name in ("moe", "moe/fp8"):
        held = operators.get(name, {}).get("held_out", {})
        parts = [
            f"{fold} {percent(held[fold]['median'], 1)} / {percent(held[fold]['p95'], 1)}"
            for fold in ("random", "rows", "sms", "shapes")
            if fold in held
        ]
        if parts:
            told.append(f"{name}: {', '.join(parts)}")
    if not told:
        return "No curve was fitted to these."
    return (
        "Fitted form: a fixed cost, and the larger of bytes (weights of the experts that are touched) and tiles of 128 "
        f"rows shared out among the SMs, times a residual. Held out, median / p95: {'; '.join(told)}."
    )

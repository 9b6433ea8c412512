"""Other models' shapes: how the curves do on them, and e4m3 products."""

from __future__ import annotations

from typing import Any

import pandas as pd

from calib.models import MODELS, ROLES
from calib.report.data import Profile
from calib.report.text import Section, number, percent, ratio, table, tokens, us

SHOWN_M = (16, 128, 1024, 4096)


def others(profile: Profile) -> Section | None:
    """Errors on other models' shapes: by what was fitted to the calibrated model, and with residuals of their own."""
    operators = profile.about.get("errors", {}).get("operators", {})
    records = {name: entry["other_models"] for name, entry in operators.items() if entry.get("other_models")}
    if not records:
        return None
    rows = [(name, found["random"]["points"], *_cells(found)) for name, found in records.items()]
    first, found = next(iter(records.items()))
    lead = (
        f"What was fitted to {profile.run['model']} alone is {percent(found['without']['median'], 1)} off at the "
        f"median on {first} shapes of other models (p95 {percent(found['without']['p95'], 1)}); with a few points of "
        f"their own {percent(found['random']['median'], 1)} (p95 {percent(found['random']['p95'], 1)})."
    )
    head = ("operator", "n", "before", "with points of their own", "sizes not seen")
    note = (
        "Median / p95 of what was left out (bias). Before: by the calibrated model's form and residual; with points "
        "of their own: a fifth of the points left out; sizes not seen: whole (n, k) left out, of linear layers, whose "
        "form is fitted to all sizes and whose residual goes over n and k too. The whole GPU and some SM sets; a "
        "tensor-parallel shard is what one GPU of the group computes."
    )
    each = [
        table(
            ("operator", "shape", "models", "before", "with points of their own", "kept"), _each(records), 3
        )
    ]
    told = (
        "Refitted: the shape has a residual of its own and counts as measured. Transfers: the calibrated model's is as "
        "near or nearer, stays, and counts as extrapolated."
    )
    return Section("Shapes of other models", lead, [table(head, rows), note, *each, told])


def _cells(found: dict[str, Any]) -> list[str]:
    return [
        f"{_both(found[fold])} ({percent(found[fold]['bias'], 1)})" if fold in found else "–"
        for fold in ("without", "random", "unseen")
    ]


def _both(summary: dict[str, Any]) -> str:
    return f"{percent(summary['median'], 1)} / {percent(summary['p95'], 1)}"


def _each(records: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for operator, found in records.items():
        refitted = found.get("refitted")
        for name, one in found["each"].items():
            cells = [" / ".join(percent(value, 1) for value in one[fold]) for fold in ("without", "random")]
            kept = "refitted" if refitted is None or name in refitted else "transfers"
            rows.append((operator, name.replace("x", " × "), _models(operator, name), *cells, kept))
    return rows


def _models(operator: str, name: str) -> str:
    """The calibration shapes that have these widths or heads."""
    family = operator.split("/")[0]
    if name.endswith(" B"):
        return ""
    key = tuple(int(part) for part in name.split("x"))
    roles = {"gemm": ROLES[:4], "lm_head": ROLES[4:]}.get(family)
    found = []
    for shape in MODELS.values():
        own = [(shape.heads, shape.kv_heads)] if roles is None else [shape.linear(role) for role in roles]
        found += [shape.name] if key in own else []
    return ", ".join(found) or "router"


def fp8(profile: Profile) -> Section | None:
    """e4m3 against bf16 on the same (n, k), on SM sets, and what casting the inputs takes."""
    found, dense = profile.timed("gemm_fp8"), profile.timed("gemm")
    if found.empty or dense.empty:
        return None
    found = pd.concat([found, profile.timed("fp8")])
    every = pd.concat([dense, profile.timed("shapes"), profile.timed("shards")])
    every = every[every.kind == "gemm"]
    bf16 = every[every.sms == profile.sms].groupby(["n", "k", "m"]).time_s.median()
    rows, gains = [], []
    for (n, k), part in found[found.sms == profile.sms].groupby(["n", "k"], sort=True):
        at = part.groupby("m").time_s.median()
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
        f"e4m3 products are {min(known):.2f} to {max(known):.2f} times as fast as bf16 ones of the same shape, before "
        "their inputs are cast."
    )
    head = ("n × k", "best TFLOP/s", *(f"bf16 / e4m3, m {m}" for m in SHOWN_M))
    return Section("e4m3 linear layers", lead, [table(head, rows), *_casts(profile)])


def _casts(profile: Profile) -> list[str]:
    """Times of casting inputs, by width and rows."""
    found = profile.timed("routing")
    found = found[found.kind == "quantise"]
    if found.empty:
        return []
    at = found.set_index(["label", "k", "m"]).time_s
    sizes = [m for m in (1, 128, 1024, 4096, 8192) if m in set(found.m)]
    rows = [
        (label, tokens(k), *(us(float(at.get((label, k, m), float("nan")))) for m in sizes))
        for label in ("static", "dynamic")
        for k in sorted(found.k.unique())
    ]
    head = ("scale", "width", *(f"m {tokens(m)}, µs" for m in sizes))
    note = (
        "Casting bf16 inputs to e4m3: with a given scale (one kernel, as engines fuse it and as it is priced), and in "
        "plain PyTorch with a scale a row that has to be found first (three kernels)."
    )
    return [table(head, rows), note]

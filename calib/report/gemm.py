"""The staircase of the linear layers: time against tokens on the whole GPU."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from calib.report.data import Profile
from calib.report.svg import Axis, Series, chart
from calib.report.text import Section, number, percent, ratio, table, us

ROLES = ("qkv", "o", "gate_up", "down")
FINE = 2048  # rows up to which m is sampled finely
DROP = 0.95  # more tokens in less time than this share is called a drop
SHOWN_DROPS = 8


def staircase(profile: Profile) -> Section | None:
    """Time at both sides of tile edges, and where more tokens take less time."""
    found = profile.timed("gemm")
    found = found[found.sms == profile.sms].sort_values("m")
    roles = [(role, found[found.label == role].drop_duplicates("m")) for role in ROLES]
    roles = [(role, rows) for role, rows in roles if len(rows) > 2]
    if not roles:
        return None
    drops = [drop for role, rows in roles for drop in _drops(role, rows)]
    pairs = sum(len(rows) - 1 for _, rows in roles)
    lead = (
        f"GEMM time rises in steps and is not monotone in tokens: in {len(drops)} of {pairs} neighbouring pairs "
        f"of m the larger m is at least {percent(1 - DROP)} faster (the library picks its kernel by shape)."
    )
    body = ["![GEMM rate against tokens](IMG/gemm.svg)"]
    if edges := _edges(roles):
        body += ["Time of m + 1 over time of m at tile edges (n = 1 pair a cell):", edges]
    if drops:
        drops.sort(key=lambda d: -d[5])
        rows = [
            (role, m, us(t), after, us(u), ratio(fall), n)
            for role, m, t, after, u, fall, n in drops[:SHOWN_DROPS]
        ]
        head = ("layer", "m", "µs", "next m", "µs", "ratio", "samples")
        body += [f"The {len(rows)} largest drops:", table(head, rows)]
    body += ["Best rates on the whole GPU:", _rates(roles)]
    lines = [
        Series(role, [(float(r.m), r.flops / r.time_s / 1e12) for r in rows.itertuples() if r.m <= FINE])
        for role, rows in roles
    ]
    picture = chart(
        f"Linear layers on {profile.sms} SMs: rate against tokens",
        Axis("tokens m", low=0, high=float(FINE)),
        Axis("TFLOP/s", low=0),
        lines,
    )
    return Section("The GEMM staircase", lead, body, {"gemm": picture})


def _drops(role: str, rows: pd.DataFrame) -> list[tuple[str, int, float, int, float, float, int]]:
    made = []
    for a, b in pairwise(rows.itertuples()):
        if b.time_s < DROP * a.time_s:
            fall = a.time_s / b.time_s
            made.append((role, int(a.m), a.time_s, int(b.m), b.time_s, fall, int(a.count)))
    return made


def _edges(roles: list[tuple[str, pd.DataFrame]]) -> str:
    times = {role: dict(zip(rows.m.astype(int), rows.time_s, strict=True)) for role, rows in roles}
    every = sorted({m for of in times.values() for m in of})
    edges = [m for m in every if m % 64 == 0 and m + 1 in every]
    if not edges:
        return ""
    rows = [
        (role, *(ratio(of[m + 1] / of[m]) if m in of and m + 1 in of else "–" for m in edges))
        for role, of in times.items()
    ]
    return table(("layer", *(f"{m} → {m + 1}" for m in edges)), rows)


def _rates(roles: list[tuple[str, pd.DataFrame]]) -> str:
    rows = []
    for role, of in roles:
        rate, moved = of.flops / of.time_s / 1e12, of.bytes / of.time_s / 1e12
        top, wide = rate.idxmax(), moved[of.m <= 64]
        cells = (number(rate[top]), f"{of.m[top]:.0f}")
        low = (number(wide.max()), f"{of.m[wide.idxmax()]:.0f}") if len(wide) else ("–", "–")
        rows.append((role, f"{of.n.iloc[0]:.0f} × {of.k.iloc[0]:.0f}", *cells, *low, len(of)))
    return table(("layer", "n × k", "best TFLOP/s", "at m", "best TB/s, m ≤ 64", "at m", "sizes of m"), rows)

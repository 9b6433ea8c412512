"""Single operators beside each other, and neighbours that come late and leave early."""

from __future__ import annotations

import pandas as pd

from calib.report.corun import slowdowns
from calib.report.data import Profile
from calib.report.text import Section, percent, ratio, spread_of, table


def pairs(profile: Profile) -> Section | None:
    """Single operators beside each other on disjoint SMs."""
    found = slowdowns(profile, "pairs")
    apart = found[found.neighbour_mode == "disjoint"] if len(found) else found
    if apart.empty:
        return None
    name, other = _named(apart, ""), _named(apart, "neighbour_")
    apart = apart.assign(name=name, other=other)
    worst = apart.loc[apart.slow.idxmax()]
    lead = (
        f"What two operators do to each other depends on both: on disjoint SMs from {ratio(apart.slow.min())} to "
        f"{ratio(worst.slow)} times ({worst['name']} beside {worst.other}, {worst.sms:.0f} SMs; n = {len(apart)} "
        "rows)."
    )
    rows = [(a, b, *spread_of(of.slow)) for (a, b), of in apart.groupby(["name", "other"])]
    rows.sort(key=lambda row: -float(row[5]))
    head = ("operator", "beside", "n", "median", "p95", "max")
    note = "n counts splits (one shape of each operator and pair, 16 to 116 SMs), so each row is thin."
    return Section("Operators beside operators", lead, [table(head, rows), note])


def _named(rows: pd.DataFrame, prefix: str) -> pd.Series:
    def of(row: pd.Series) -> str:
        kind = str(row[f"{prefix}kind"]).replace("_", " ")
        if kind == "gemm":
            return f"GEMM {row[f'{prefix}label']} m {row[f'{prefix}m']:.0f}"
        if kind == "prefill attention":
            return f"{kind} {row[f'{prefix}q_tokens']} on {row[f'{prefix}history_tokens']}"
        if kind == "decode attention":
            batch = row[f"{prefix}decode_batch"]
            return f"{kind} {batch:.0f} × {row[f'{prefix}context_sum'] / batch:.0f}"
        return kind

    return rows.apply(of, axis=1)


def stagger(profile: Profile) -> Section | None:
    """Partial overlap: a burst of decode steps that starts late and ends early."""
    found = slowdowns(profile, "stagger")
    if found.empty or "neighbour_start_s" not in found:
        return None
    start, end = found.neighbour_start_s, found.neighbour_end_s
    overlap = pd.concat([end, found.time_s], axis=1).min(axis=1) - start
    found = found.assign(overlap=overlap, extra=found.time_s - found.alone_s)
    found["steady"] = found.overlap / (found.overlap - found.extra)
    few = found[found.sms < profile.sms / 2]
    lead = (
        f"The slowdown follows the overlap ({len(found)} staggered starts of {found.layers.iloc[0]:.0f} prefill "
        "layers, 3 repeats each, so thin)"
    )
    if len(few):
        same = few.groupby(["sms", "m", "neighbour_decode_batch"]).steady
        apart = float((same.max() - same.min()).max())
        lead += (
            f": while both ran, prefill on {few.sms.min():.0f} SMs was {ratio(few.steady.min())} to "
            f"{ratio(few.steady.max())} times slower, early and late bursts of the same pair within {ratio(apart)}"
        )
    rows = [
        (
            f"{r.sms:.0f} / {r.neighbour_sms:.0f}",
            f"{r.m:.0f}",
            f"{r.neighbour_decode_batch:.0f}",
            percent(r.neighbour_start_s / r.alone_s),
            percent(r.overlap / r.alone_s),
            ratio(r.slow),
            f"{(r.max_s - r.min_s) / r.time_s * 100:.1f} %",
            ratio(r.steady),
        )
        for r in found.sort_values(["sms", "m", "neighbour_decode_batch", "neighbour_start_s"]).itertuples()
    ]
    head = ("SMs", "chunk", "batch beside", "burst starts at", "overlap", "prefill, over alone")
    head += ("max − min", "while both ran")
    note = (
        "Starts and overlap are shares of the prefill's time alone. *While both ran* is the overlap over the same "
        "work's time alone, if nothing was lost outside the overlap; values below 1 are the noise of three repeats "
        "(clock and repeats differ by a few per cent)."
    )
    return Section("Staggered starts", f"{lead}.", [table(head, rows), note])

"""When and on which SM each CTA ran, by scheduling rule: drawn a row an SM, and summed up."""

from __future__ import annotations

from html import escape

import numpy as np
import pandas as pd

from calib.report.data import Profile
from calib.report.svg import COLOURS, Axis, frame
from calib.report.text import Section, number, percent, table, tokens
from calib.timeline import BANDWIDTH, BOTH, COMPUTE

NAMES = {
    "proportional": "SM-aware, tickets in proportion",
    "half": "SM-aware, tickets 50:50",
    "cta_parallel": "CTA-parallel: kind by block index",
    "intra_thread": "intra-thread: both kinds in every thread",
    "horizontal": "HFuse-like: both kinds in halves of a CTA",
}
POD = "pod "  # what names of FlashInfer's own kernel begin with
KINDS = {COMPUTE: "compute", BANDWIDTH: "bandwidth", BOTH: "both"}
POD_KINDS = {COMPUTE: "prefill", BANDWIDTH: "decode"}
INKS = {COMPUTE: COLOURS[0], BANDWIDTH: COLOURS[1], BOTH: COLOURS[3]}
ROW = 4.0  # pixels of an SM


def timelines(profile: Profile) -> Section | None:
    """One picture a rule and, where its CTAs were logged, of POD; how much of the SMs' time each leaves empty."""
    found = profile.tables.get("cta_timeline", pd.DataFrame())
    if found.empty:
        return None
    rules = [rule for rule in dict.fromkeys(found.rule) if rule in NAMES]
    pods = [rule for rule in dict.fromkeys(found.rule) if rule.startswith(POD)]
    order = sorted(rules, key=list(NAMES).index) + pods
    end = max(found[found.rule == rule].end_ns.max() for rule in rules) / 1e3
    pictures, rows = {}, []
    for rule in order:
        part = found[found.rule == rule]
        name = f"ctas-{'-'.join(rule.split()).replace(',', '').replace('_', '-')}"
        kinds = POD_KINDS if rule in pods else KINDS
        pictures[name] = picture(_title(rule), part, kinds, end if rule in rules else None)
        rows.append((_title(rule), *summary(part, profile.sms)))
    shares = [_shares(found[found.rule == rule], profile.sms) for rule in pods]
    best = min(
        (row for row, rule in zip(rows, order, strict=True) if rule in rules), key=lambda r: float(r[2])
    )
    lead = f"Of the same {tokens(_jobs(found, rules[0]))} jobs '{best[0]}' is through first, in {best[2]} µs."
    if shares:
        ranges = [f"{percent(min(one))} to {percent(max(one))}" for one in zip(*shares, strict=True)]
        lead += (
            f" FlashInfer's POD leaves {ranges[0]} of the SMs' time without a CTA and has both kinds on an SM for "
            f"{ranges[1]} of it: prefill and decode seldom end together."
        )
    head = (
        "what",
        "CTAs",
        "makespan, µs",
        "SM time empty",
        "SM time with both kinds",
        "last of each kind, µs",
    )
    note = (
        "Each CTA wrote its SM and the GPU's clock (a tick of 32 ns) at its start and end; a row of a picture is an "
        "SM, its two CTAs one above the other. Synthetic CTAs: two an SM, 420 compute and 560 bandwidth jobs, all of "
        "a kind alike. POD: FlashInfer's kernel with a few more lines that write the log, 32 query and 8 KV heads; "
        "chunk on history, decodes × context. All CTAs of the first wave start within 0.2 µs, in pairs of SMs (a "
        "TPC), the SMs of a small cluster twice before others once; job numbers are drawn in no order."
    )
    shown = [f"![{name}](IMG/{name}.svg)" for name in pictures]
    return Section("Where and when CTAs ran", lead, [table(head, rows), *shown, note], pictures)


def _title(rule: str) -> str:
    return NAMES.get(rule, rule.replace(POD, "POD, ").replace(" x ", " × "))


def _jobs(found: pd.DataFrame, rule: str) -> float:
    return float((found.rule == rule).sum())


def summary(ctas: pd.DataFrame, sms: int) -> tuple[str, str, str, str, str]:
    """CTAs, makespan, shares of SM time with none and with both kinds, when the last of each kind ended."""
    empty, both = _shares(ctas, sms)
    last = " / ".join(
        number(float(ctas[ctas.kind.isin([one, BOTH])].end_ns.max()) / 1e3) for one in (COMPUTE, BANDWIDTH)
    )
    return tokens(len(ctas)), number(float(ctas.end_ns.max()) / 1e3), percent(empty), percent(both), last


def _shares(ctas: pd.DataFrame, sms: int) -> tuple[float, float]:
    """Shares of the SMs' time to the last end with no CTA, and with both kinds."""
    end = float(ctas.end_ns.max())
    busy = both = 0.0
    for _, part in ctas.groupby("sm"):
        edges = np.unique(np.concatenate([part.start_ns, part.end_ns]))
        middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        inside = (part.start_ns.to_numpy()[:, None] <= middle) & (part.end_ns.to_numpy()[:, None] > middle)
        kind = part.kind.to_numpy()[:, None]
        has = [(inside & ((kind == one) | (kind == BOTH))).any(axis=0) for one in (COMPUTE, BANDWIDTH)]
        both += float(width[has[0] & has[1]].sum())
        busy += float(width[inside.any(axis=0)].sum())
    return 1.0 - busy / (sms * end), both / (sms * end)


def picture(title: str, ctas: pd.DataFrame, kinds: dict[int, str], end_us: float | None) -> str:
    """An SVG with a row an SM and a bar a CTA, colour by kind, on a time axis to `end_us` (or the last end)."""
    end = end_us or float(ctas.end_ns.max()) / 1e3
    sms = int(ctas.sm.max()) + 1
    used = [kind for kind in kinds if (ctas.kind == kind).any()]
    axis = Axis("µs since the first CTA's start", low=0.0, high=end)
    across, top, head, tail = frame(
        title, axis, "SM", round(ROW * sms), [(kinds[kind], INKS[kind]) for kind in used]
    )
    lanes = _lanes(ctas)
    height = ROW / (max(lanes) + 1) if lanes else ROW
    bars = []
    for kind in used:
        path = "".join(
            f"M{across(one.start_ns / 1e3):.1f} {top + ROW * one.sm + height * (lane + 0.5):.1f}"
            f"H{across(one.end_ns / 1e3) - 0.3:.1f}"
            for one, lane in zip(ctas.itertuples(), lanes, strict=True)
            if one.kind == kind
        )
        bars.append(f'<path d="{path}" stroke="{INKS[kind]}" stroke-width="{height:.2f}" fill="none"/>')
    return "\n".join([*head, f"<desc>{escape(title)}: {len(ctas)} CTAs</desc>", *bars, *tail]) + "\n"


def _lanes(ctas: pd.DataFrame) -> list[int]:
    """Which of its SM's lanes each CTA is drawn in: the first that is free at its start."""
    free: dict[int, list[float]] = {}
    lane_of = {}
    for at, one in sorted(enumerate(ctas.itertuples()), key=lambda pair: (pair[1].start_ns, pair[1].cta)):
        lanes = free.setdefault(int(one.sm), [])
        lane = next((i for i, until in enumerate(lanes) if until <= one.start_ns), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
        lanes[lane] = float(one.end_ns)
        lane_of[at] = lane
    return [lane_of[at] for at in range(len(ctas))]

"""Attention alone: FA2 against FA3 for prefill, the step when SMs are missing, decode bandwidth and skew."""

from __future__ import annotations

import pandas as pd

from calib.models import MODELS
from calib.report.data import Profile, looked_up, single_chunks
from calib.report.scaling import even
from calib.report.svg import Axis, Level, Series, chart
from calib.report.text import Section, number, percent, ratio, table, us

DRAWN = (1, 8, 32, 64, 128, 256)  # batches in the picture
BOTH = ("fa2", "fa3")
LARGE = 512
SHOWN_H = (0, 2048, 8192, 32768)
NEAR = 0.01  # a skewed batch is compared with an even one whose mean context differs by no more
TILE = 128  # query rows that one block of FA3 works on


def prefill(profile: Profile) -> Section | None:
    """FA3 over FA2 on the whole GPU by chunk and history."""
    found = single_chunks(profile.timed("prefill_attention"))
    whole = found[found.sms == profile.sms]
    wide = whole.pivot_table(index=["q", "h"], columns="attention", values="time_s")
    if not set(BOTH) <= set(wide.columns) or (both := wide.dropna(subset=list(BOTH))).empty:
        return None
    faster = both.fa3 / both.fa2
    large = faster[faster.index.get_level_values("q") >= LARGE]
    slower = faster[faster > 1.0]
    lead = (
        f"FA3 is the faster prefill attention from {LARGE}-token chunks on (FA3 / FA2 {ratio(large.min())} to "
        f"{ratio(large.max())}, n = {len(large)} shapes) and up to {ratio(faster.max())} times slower for few "
        f"tokens on a long history ({len(slower)} of {len(faster)} shapes)."
        if len(large) and large.max() < 1.0
        else f"FA3 takes {ratio(faster.min())} to {ratio(faster.max())} of FA2's time (n = {len(faster)})."
    )
    chunks = sorted({q for q, _ in both.index})
    rows = []
    for q in chunks:
        cells = [ratio(float(faster[(q, h)])) if (q, h) in faster.index else "–" for h in SHOWN_H]
        times = [us(float(both.loc[(q, 0), name])) if (q, 0) in both.index else "–" for name in BOTH]
        rows.append((q, *cells, *times))
    head = ("chunk", *(f"FA3 / FA2, history {h}" for h in SHOWN_H), "FA2 µs, history 0", "FA3 µs, history 0")
    fa3 = whole[whole.attention == "fa3"]
    rate = (fa3.flops / fa3.time_s).max() / 1e12
    note = f"Whole GPU, one chunk, n = 1 row a cell. FA3's best rate is {number(rate)} TFLOP/s."
    note += _merges(profile)
    return Section("Prefill attention: FA2 against FA3", lead, [table(head, rows), note])


def _merges(profile: Profile) -> str:
    """Whether the recorded launches merge partial results of a split history, by back end."""
    found = profile.tables.get("kernels", pd.DataFrame())
    if "kernel" not in found or "attention" not in found:
        return ""
    merging = set(found.attention[found.kernel.str.contains("Merge", na=False)])
    if merging != {"fa2"} or "fa3" not in set(found.attention):
        return ""
    return (
        " Some of FA2's recorded launches end with a kernel that merges partial results, so it spreads a history "
        "over blocks; none of FA3's do, which fits its slow few-token chunks."
    )


def missing_sms(profile: Profile) -> Section | None:
    """The step between the whole GPU and the next smaller partition."""
    found = single_chunks(profile.timed("prefill_attention"))
    total = profile.sms
    smaller = found.sms[found.sms < total]
    if smaller.empty:
        return None
    near = int(smaller.max())
    wide = found[found.sms.isin([near, total])].pivot_table(
        index=["attention", "q", "h"], columns="sms", values="time_s"
    )
    if not {near, total} <= set(wide.columns) or (both := wide.dropna()).empty:
        return None
    step = both[near] / both[total]
    rows, lines, long = [], [], {}
    for name in BOTH:
        if name not in step.index.get_level_values("attention"):
            continue
        mine = step[name]
        long[name] = mine[mine.index.get_level_values("q") >= 768]
        points = []
        for q, cases in mine.groupby(level="q"):
            rows.append(
                (name.upper(), q, ratio(cases.median()), ratio(cases.min()), ratio(cases.max()), len(cases))
            )
            points += [(float(q), float(value)) for value in cases]
        lines.append(Series(name.upper(), points, joined=False))
    parts = [
        f"{name.upper()} {ratio(values.median())} times as long (range {ratio(values.min())}–"
        f"{ratio(values.max())}, n = {len(values)})"
        for name, values in long.items()
        if len(values)
    ]
    lead = (
        f"With {near} instead of {total} SMs ({percent(near / total)} of them) prefill attention of chunks of 768 "
        f"tokens and more takes: {', '.join(parts)}; in proportion it would be {ratio(total / near)}."
        if parts
        else f"Prefill attention on {near} SMs over {total} SMs; in proportion it would be {ratio(total / near)}."
    )
    body = ["![The step at missing SMs](IMG/fa3-step.svg)"]
    body += [
        table(("back end", "chunk", f"time on {near} / on {total}", "least", "most", "n histories"), rows)
    ]
    body += _grids(profile, near)
    picture = chart(
        f"Prefill attention on {near} SMs over {total} SMs",
        Axis("chunk, tokens", 2),
        Axis("time ratio", low=0.8, high=2.0),
        lines,
        [Level(total / near, "in proportion")],
    )
    return Section(
        f"Prefill attention when {total - near} SMs are missing", lead, body, {"fa3-step": picture}
    )


def _grids(profile: Profile, near: int) -> list[str]:
    found = profile.tables.get("kernels", pd.DataFrame())
    if "grid" not in found or "attention" not in found:
        return []
    fa3 = found[(found.kind == "prefill_attention") & (found.attention == "fa3")]
    if fa3.empty:
        return []
    same = fa3[fa3.grid == f"{profile.sms}x1x1"]
    if len(same) < len(fa3):
        return []
    heads = MODELS[str(profile.run.get("model"))].heads if profile.run.get("model") in MODELS else 0
    fits = (
        f" Chunks of up to {near * TILE // heads} tokens make at most {near} tiles of {TILE} rows and one of "
        f"{heads} heads, so {near} SMs hold every block with work: that is where the step begins in the table."
        if heads
        else ""
    )
    return [
        f"In all {len(fa3)} shapes whose launch was recorded FA3 starts a grid of {profile.sms} persistent blocks, "
        f"one an SM of the device ({fa3.smem_bytes.max() / 1024:.0f} KiB of shared memory each, so two do not fit "
        "on an SM): its plan deals equal work to as many blocks as the device has SMs. On a smaller partition the "
        "blocks that found no SM start when the first are done, a second wave with the rest of the card idle. "
        f"FA2's grid follows the work.{fits}"
    ]


def decode(profile: Profile) -> Section | None:
    """Bandwidth against tokens in the cache, and the price of one long context."""
    found = profile.timed("decode_attention")
    whole = found[found.sms == profile.sms]
    balanced = even(whole)
    if balanced.empty:
        return None
    balanced = balanced.assign(rate=balanced.bytes / balanced.time_s / 1e12)
    peak = float(balanced.rate.max())
    near = balanced[balanced.rate >= 0.9 * peak]
    lead = (
        f"Decode attention reads up to {number(peak)} TB/s and 90 % of that from "
        f"{near.context_sum.min() / 1024:.0f}k tokens in the batch on (n = {len(balanced)} even batches)"
    )
    skew, worst = _skew(whole)
    lead += f"; one context that is longer than the mean makes the batch {worst}." if worst else "."
    batches = sorted(balanced.decode_batch.unique())
    contexts = sorted(balanced.context_mean.unique())
    rates = {(r.decode_batch, r.context_mean): float(r.rate) for r in balanced.itertuples()}
    cells = [
        (f"{b:.0f}", *(number(rates[(b, c)]) if (b, c) in rates else "–" for c in contexts)) for b in batches
    ]
    body = ["![Decode attention bandwidth](IMG/decode-attention.svg)"]
    body += ["TB/s by batch (rows) and context (columns), n = 1 row a cell:"]
    body += [table(("batch", *(f"{c:.0f}" for c in contexts)), cells), *skew]
    picture = chart(
        f"Decode attention on {profile.sms} SMs",
        Axis("tokens in the batch's cache", 2),
        Axis("TB/s", low=0),
        [
            Series(
                f"batch {b:.0f}",
                [
                    (float(r.context_sum), float(r.rate))
                    for r in balanced[balanced.decode_batch == b].sort_values("context_sum").itertuples()
                ],
            )
            for b in [b for b in batches if b in DRAWN] or batches[: len(DRAWN)]
        ],
    )
    return Section("Decode attention: bandwidth and skew", lead, body, {"decode-attention": picture})


def _skew(whole: pd.DataFrame) -> tuple[list[str], str]:
    """(blocks, the largest effect in words) of batches with one long context."""
    times = looked_up(even(whole), ("decode_batch", "context_mean"))
    cells: dict[tuple[int, int], dict[int, float]] = {}
    for r in whole[whole.decode_contexts.notna()].itertuples():
        match = [
            (mean, time)
            for (batch, mean), time in times.items()
            if batch == r.decode_batch and abs(mean / r.context_mean - 1) <= NEAR
        ]
        if match:
            mean, time = match[0]
            skew = round(r.context_max / mean)
            cells.setdefault((int(r.decode_batch), int(mean)), {})[skew] = r.time_s / time
    if not cells:
        return [], ""
    skews = sorted({s for of in cells.values() for s in of})
    rows = [
        (f"{b} × {mean}", us(times[(b, mean)]), *(ratio(of[s]) if s in of else "–" for s in skews))
        for (b, mean), of in sorted(cells.items())
    ]
    value, s, (b, mean) = max((of[s], s, key) for key, of in cells.items() for s in of)
    worst = f"up to {ratio(value)} times slower ({b} × {mean} tokens, longest {s} × the mean)"
    blocks = [
        "One context longer than the mean, the others shorter, same total: time over that of the even batch "
        "(n = 1 row a cell).",
        table(("batch × mean context", "even, µs", *(f"longest {s} × mean" for s in skews)), rows),
    ]
    return blocks, worst

"""Two things at a time: how much each phase slows, by split, size and mode, against what two papers report."""

from __future__ import annotations

from itertools import product

import pandas as pd

from calib.report.data import Profile
from calib.report.svg import Axis, Level, Series, chart
from calib.report.text import Section, counted, percent, ratio, spread_of, table

PREFILL, DECODE = "prefill_layer", "decode_step"
# Bullet, Fig. 10: on an A100 a GEMM beside a memcpy loses less than this while it holds more than this share
BULLET, BULLET_SHARE = 1.08, 0.60
# MuxWise, Fig. 11: decode beside prefill loses at most 30 % on an H100 (20 % on an A100)
MUXWISE, MUXWISE_SMS = 1.30, (20, 100)
MODES = ("disjoint", "half", "whole", "streams")
MEANING = {
    "disjoint": "disjoint sets",
    "half": "decode also on half of prefill's SMs",
    "whole": "decode on all SMs, prefill on a part",
    "streams": "two streams, no partition",
}
SPLITS_SHOWN = 3


def slowdowns(profile: Profile, sweep: str = "corun") -> pd.DataFrame:
    """Rows of a co-run sweep with `slow`: time beside the neighbour over time alone on the same SMs."""
    found = profile.timed(sweep)
    needed = {"alone_s", "neighbour_mode", "neighbour_kind", "neighbour_sms"}
    if not needed <= set(found.columns):
        return found.iloc[:0]
    for name in ("priority", "neighbour_priority"):
        found[name] = found[name].fillna("normal") if name in found else "normal"
    return found.assign(slow=found.time_s / found.alone_s)


def side_by_side(profile: Profile) -> Section | None:
    """The largest slowdowns on disjoint SMs, against the papers."""
    found = slowdowns(profile)
    apart = found[found.neighbour_mode == "disjoint"] if len(found) else found
    prefill, decode = apart[apart.kind == PREFILL], apart[apart.kind == DECODE]
    if prefill.empty or decode.empty:
        return None
    wide = prefill[prefill.sms > BULLET_SHARE * profile.sms]
    lead = (
        f"On disjoint SMs prefill slows by at most {percent(prefill.slow.max() - 1)} and decode by at most "
        f"{percent(decode.slow.max() - 1)} (n = {len(prefill)} pairs of a whole prefill layer and a whole decode "
        f"step); {_verdicts(wide, decode)}."
    )
    body = [
        "![Slowdown on disjoint SMs](IMG/side-by-side.svg)",
        _bands(wide, decode),
        _worst(prefill, decode),
        _caveat(apart),
    ]
    body += ["By split:", _by_split(prefill, decode)]
    body += _by_size(prefill, decode)
    picture = chart(
        "Slowdown on disjoint SMs against the same partition alone",
        Axis("SMs of the side itself", low=0, high=float(profile.sms)),
        Axis("time beside / time alone", low=0.9),
        [
            Series("prefill layer", _dots(prefill), joined=False),
            Series("decode step", _dots(decode), joined=False),
        ],
        [
            Level(BULLET, "Bullet: prefill above 60 % of the SMs stays below"),
            Level(MUXWISE, "MuxWise: decode stays below"),
        ],
    )
    return Section("Side by side on disjoint SMs", lead, body, {"side-by-side": picture})


def _dots(rows: pd.DataFrame) -> list[tuple[float, float]]:
    return [(float(r.sms), float(r.slow)) for r in rows.itertuples()]


def _verdicts(wide: pd.DataFrame, decode: pd.DataFrame) -> str:
    parts = []
    if len(wide):
        held = "inside" if wide.slow.max() < BULLET else "outside"
        parts.append(
            f"{held} Bullet's band for prefill (< 8 % above 60 % of the SMs; here up to "
            f"{percent(wide.slow.max() - 1)})"
        )
    held = "inside" if decode.slow.max() <= MUXWISE else "outside"
    parts.append(
        f"{held} MuxWise's for decode (≤ 30 %; {percent((decode.slow <= MUXWISE).mean())} of pairs hold it)"
    )
    return " and ".join(parts)


def _bands(wide: pd.DataFrame, decode: pd.DataFrame) -> str:
    rows = []
    measured = decode[decode.sms.between(*MUXWISE_SMS)]
    low, high = MUXWISE_SMS
    for claim, values, inside in (
        ("Bullet: prefill < 8 % while it holds > 60 % of the SMs", wide.slow, wide.slow < BULLET),
        (
            f"MuxWise: decode ≤ 30 % with {low} to {high} SMs (H100)",
            measured.slow,
            measured.slow <= MUXWISE,
        ),
        ("the same with any number of SMs", decode.slow, decode.slow <= MUXWISE),
    ):
        if len(values):
            verdict = "inside" if inside.all() else "**outside**"
            rows.append((claim, *spread_of(values), percent(inside.mean()), verdict))
    head = ("claim", "n", "median", "p95", "max", "pairs inside", "the largest is")
    return table(head, rows)


def _worst(prefill: pd.DataFrame, decode: pd.DataFrame) -> str:
    rows = []
    for name, of in (("prefill", prefill), ("decode", decode)):
        for r in of.nlargest(3, "slow").itertuples():
            chunk, batch = (r, "neighbour_") if name == "prefill" else (r, "")
            mine = "" if name == "prefill" else "neighbour_"
            rows.append(
                (
                    name,
                    ratio(r.slow),
                    f"{getattr(chunk, f'{mine}q_tokens')} on {getattr(chunk, f'{mine}history_tokens')}",
                    f"{getattr(r, f'{batch}decode_batch'):.0f} × {getattr(r, f'{batch}context_max'):.0f}",
                    f"{getattr(r, f'{mine}sms'):.0f} / {getattr(r, f'{batch}sms'):.0f}",
                    f"{r.count:.0f}",
                    percent((r.p75_s - r.p25_s) / r.time_s, 1),
                )
            )
    head = ("largest of", "slowdown", "chunk on history", "batch × context", "prefill / decode SMs")
    return table((*head, "iterations", "spread"), rows)


def _caveat(apart: pd.DataFrame) -> str:
    throttled = apart.throttled.dropna()
    text = (
        "The claims are of other set-ups: Bullet's of one GEMM beside a memcpy on an A100, MuxWise's of whole "
        "models on an H100 with 20 to 100 SMs for decode. Here both sides are whole layers of the same model, "
        "alone means a short run on the same partition in the same block, and what the shared power limit takes "
        "from both sides is part of the slowdown"
    )
    if len(throttled):
        text += f" ({percent(throttled.mean())} of rows were throttled when read)"
    repeats = repeatability(apart)
    if len(repeats):
        text += (
            f". The same work alone on the same SMs, measured again in other blocks, differs from its median by "
            f"{percent(repeats.median(), 1)} (median) and {percent(repeats.quantile(0.95), 1)} (p95, n = "
            f"{len(repeats)}), so differences of a few per cent are real"
        )
    return text + "."


def repeatability(rows: pd.DataFrame) -> pd.Series:
    """|time alone / median of its repeats − 1| of every work that was timed alone more than once."""
    keys = ["kind", "m", "q_tokens", "history_tokens", "decode_batch", "context_sum", "sms"]
    of = rows.groupby(keys, dropna=False).alone_s
    return (rows.alone_s / of.transform("median") - 1).abs()[of.transform("count") > 1]


def _by_split(prefill: pd.DataFrame, decode: pd.DataFrame) -> str:
    rows = []
    for sms, of in prefill.groupby("sms"):
        other = decode[decode.neighbour_sms == sms]
        p, d = spread_of(of.slow), spread_of(other.slow)
        rows.append((f"{sms:.0f} / {of.neighbour_sms.iloc[0]:.0f}", p[0], *p[1:], *d[1:]))
    head = ("prefill / decode SMs", "n", "prefill, median", "p95", "max", "decode, median", "p95", "max")
    return table(head, rows)


def _by_size(prefill: pd.DataFrame, decode: pd.DataFrame) -> list[str]:
    """Slowdown by chunk and by batch at the splits with the most pairs, so that like stands beside like."""
    shown = prefill.sms.value_counts().sort_index(ascending=False).nlargest(SPLITS_SHOWN, keep="first")
    splits = sorted(shown.index)
    head_splits = [f"{s:.0f} prefill SMs" for s in splits]
    blocks = []
    for title, rows, of, by, split in (
        ("Prefill by its chunk", prefill, "chunk", "m", "sms"),
        ("Prefill by the batch beside it", prefill, "batch", "neighbour_decode_batch", "sms"),
        ("Decode by its batch", decode, "batch", "decode_batch", "neighbour_sms"),
        ("Decode by its context", decode, "context", "context_mean", "neighbour_sms"),
        ("Decode by the chunk beside it", decode, "chunk", "neighbour_m", "neighbour_sms"),
    ):
        if by not in rows or rows[by].dropna().empty:
            continue
        cells = [
            (f"{v:.0f}", *(counted(rows[(rows[by] == v) & (rows[split] == s)].slow) for s in splits))
            for v in sorted(rows[by].dropna().unique())
        ]
        blocks += [
            f"{title}, median slowdown at the splits with the most pairs:",
            table((of, *head_splits), cells),
        ]
    return blocks


def modes(profile: Profile) -> Section | None:
    """Slowdowns when the sets overlap, by mode and priority."""
    found = slowdowns(profile)
    if found.empty:
        return None
    decode = found[found.kind == DECODE]
    rows = []
    for mode, priority in product(MODES, ("normal", "high")):
        d = decode[(decode.neighbour_mode == mode) & (decode.priority == priority)]
        p = found[(found.kind == PREFILL) & (found.neighbour_mode == mode)]
        p = p[p.neighbour_priority == priority]
        if len(d) and len(p):
            prefill, own = spread_of(p.slow), spread_of(d.slow)
            rows.append((MEANING[mode], priority, own[0], *prefill[1:], *own[1:]))
    if not rows:
        return None
    streams = decode[decode.neighbour_mode == "streams"]
    if streams.empty:
        return None
    normal, high = streams[streams.priority == "normal"], streams[streams.priority == "high"]
    lead = (
        f"With no partition, decode beside prefill on a plain stream slows {ratio(normal.slow.median())} times in "
        f"the median and {ratio(normal.slow.max())} times at most (n = {len(normal)})"
    )
    if len(high):
        lead += (
            f", on a high-priority stream {ratio(high.slow.median())} and at most "
            f"{ratio(high.slow.max())} times (n = {len(high)})"
        )
    head = ("sets", "decode's priority", "n", "prefill, median", "p95", "max", "decode, median", "p95", "max")
    body = [table(head, rows)]
    body.append(
        "Shapes and splits differ from row to row (drawn at random over the same space), so rows are compared by "
        "their spread, not pair by pair. In the whole and half modes the slowdown counts against the same set "
        "alone, which is larger than in the disjoint mode."
    )
    if "neighbour_m" in streams:
        body += ["Decode on two streams, by the chunk beside it:", _starved(streams)]
    picture = chart(
        "Decode beside prefill on two streams, no partition",
        Axis("prefill chunk, tokens", 2),
        Axis("time beside / time alone", 2),
        [
            Series(
                f"{name} priority", [(float(r.neighbour_m), float(r.slow)) for r in of.itertuples()], False
            )
            for name, of in (("normal", normal), ("high", high))
        ],
    )
    pictures = {"streams": picture} if "neighbour_m" in streams else {}
    shown = ["![Decode on two streams](IMG/streams.svg)"] if pictures else []
    return Section(
        "Overlapping sets, priorities and two-stream starvation", f"{lead}.", shown + body, pictures
    )


def _starved(streams: pd.DataFrame) -> str:
    rows = []
    for chunk, of in streams.groupby("neighbour_m"):
        split = [of[of.priority == p].slow for p in ("normal", "high")]
        cells = [cell for s in split for cell in (str(len(s)), ratio(s.median()), ratio(s.max()))]
        rows.append((f"{chunk:.0f}", *cells))
    head = ("chunk", "n, normal", "median", "max", "n, high", "median", "max")
    return table(head, rows)

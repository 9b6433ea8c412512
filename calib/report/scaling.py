"""Time against SMs of every operator alone, and where memory-bound operators reach the card's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from calib.report.data import Profile, best_covered, by_shape
from calib.report.svg import Axis, Series, chart
from calib.report.text import Section, interquartile, number, percent, ratio, size, table, tokens, us

REACHED = 0.95  # of the bandwidth on the whole GPU
SHOWN_SIZES = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)
DECODE_ROWS = 64
PREFILL_ROWS = 1024
KNEE_SIZES = 8  # fewer sizes place no knee
KNEE_BYTES = 64 << 20  # smaller work stays in L2 or ends before the memory is busy


@dataclass(frozen=True)
class Subject:
    """One operator at one shape on several sizes."""

    name: str
    rows: pd.DataFrame

    def against(self, whole: int) -> dict[int, float]:
        """SMs -> time over the time on the whole GPU."""
        alone = float(self.rows.loc[self.rows.sms == whole, "time_s"].iloc[0])
        return {int(r.sms): float(r.time_s) / alone for r in self.rows.itertuples()}


def subjects(profile: Profile) -> list[Subject]:
    """The best covered large shape of each operator."""
    gemm = profile.timed("gemm")
    attention = profile.timed("prefill_attention")
    long = attention[attention.m >= PREFILL_ROWS]
    gate = gemm[gemm.label == "gate_up"]
    candidates = [
        ("GEMM gate_up", gate[gate.m >= PREFILL_ROWS]),
        ("decode GEMM gate_up", gate[gate.m <= DECODE_ROWS]),
        ("LM head", profile.timed("lm_head")),
        ("prefill attention FA3", long[long.attention == "fa3"]),
        ("prefill attention FA2", long[long.attention == "fa2"]),
        ("decode attention", even(profile.timed("decode_attention"))),
        ("streaming read", profile.timed("stream_read")),
        *((name, profile.timed(name)) for name in ("norm", "rope", "activation", "kv_write")),
        ("prefill layer", profile.timed("prefill_layer")),
        ("decode step", profile.timed("decode_step")),
    ]
    chosen = [(name, best_covered(rows, profile.sms)) for name, rows in candidates]
    return [Subject(f"{name}, {described(rows)}", rows) for name, rows in chosen if len(rows)]


def even(table_: pd.DataFrame) -> pd.DataFrame:
    """Decode rows whose contexts are all equal."""
    return table_[table_.decode_contexts.isna()]


def described(rows: pd.DataFrame) -> str:
    """The shape of rows that share one."""
    first = rows.iloc[0]
    if pd.notna(first.decode_batch):
        return f"{first.decode_batch:.0f} × {first.context_sum / first.decode_batch:.0f} tokens"
    if pd.notna(first.q_tokens):
        return f"{first.q_tokens} on {first.history_tokens}"
    return f"m {first.m:.0f}" if pd.notna(first.m) else size(float(first.bytes))


def scaling(profile: Profile) -> Section | None:
    """Time on each size over the time on the whole GPU."""
    found = subjects(profile)
    if not found:
        return None
    total = profile.sms
    against = [(s, s.against(total)) for s in found]
    half, at_half = _at_half(against, total)
    lead = (
        f"With {half} of {total} SMs an operator takes between {ratio(min(at_half.values()))} and "
        f"{ratio(max(at_half.values()))} times as long (in proportion: {ratio(total / half)}): "
        f"{', '.join(f'{name} {ratio(value)}' for name, value in sorted(at_half.items(), key=lambda i: i[1]))}."
    )
    sizes = [n for n in SHOWN_SIZES if n < total]
    rows = [
        (
            s.name,
            us(float(s.rows.loc[s.rows.sms == total, "time_s"].iloc[0])),
            *(ratio(times[n]) if n in times else "–" for n in sizes),
            len(s.rows),
            percent(interquartile(s.rows), 1),
        )
        for s, times in against
    ]
    rows.append(("*all SMs / SMs*", "", *(ratio(total / n) for n in sizes), "", ""))
    head = ("operator", f"µs on {total}", *map(str, sizes), "sizes", "spread")
    drawn = [s for s in against if not s[0].name.startswith(("norm", "rope", "kv_write", "LM", "activation"))]
    picture = chart(
        f"Time on some SMs over time on all {total}",
        Axis("SMs", 2, low=4, high=float(total)),
        Axis("time / time on all SMs", 2),
        [Series(s.name, [(float(n), t) for n, t in sorted(times.items()) if n >= 4]) for s, times in drawn]
        + [Series("in proportion", [(4.0, total / 4), (float(total), 1.0)], colour="#bbb")],
    )
    note = (
        "One shape an operator: the largest of those that were measured on (nearly) the most partition sizes, "
        "10 to 40 replays each, each point alone, for some tens of milliseconds."
    )
    return Section(
        "Time against SMs",
        lead,
        ["![Time against SMs](IMG/sms.svg)", table(head, rows), note],
        {"sms": picture},
    )


def _at_half(against: list[tuple[Subject, dict[int, float]]], total: int) -> tuple[int, dict[str, float]]:
    """The size that most operators have nearest to half of the SMs, and their times on it."""
    sizes = [n for _, times in against for n in times if n < total]
    half = min(set(sizes), key=lambda n: (-sizes.count(n), abs(n - total / 2), n))
    return half, {s.name.split(",")[0]: times[half] for s, times in against if half in times}


def knee_of(rows: pd.DataFrame, whole: int) -> tuple[float, float, float]:
    """(smallest measured size that reaches 95 % of the bandwidth on the whole GPU, smallest from which every
    measured size does, least share of that bandwidth from the first on); rows of one shape."""
    ordered = rows.sort_values("sms")
    best = float(ordered.loc[ordered.sms == whole, "time_s"].iloc[0])
    reached = ordered.time_s <= best / REACHED
    first = float(ordered.sms[reached].min())
    short = ordered.sms[~reached]
    after = ordered.sms[ordered.sms > (short.max() if len(short) else -1)]
    return first, float(after.min()), float((best / ordered.time_s[ordered.sms >= first]).min())


def knee(profile: Profile) -> Section | None:
    """SMs from which a memory-bound operator has the bandwidth of the whole GPU."""
    total = profile.sms
    gemm = profile.timed("gemm")
    kinds = [
        ("streaming read", profile.timed("stream_read")),
        ("decode attention", even(profile.timed("decode_attention"))),
        *(
            (f"decode GEMM {role}", gemm[(gemm.label == role) & (gemm.m <= DECODE_ROWS)])
            for role in ("gate_up", "down", "qkv", "o")
        ),
    ]
    rows, lines, firsts = [], [], []
    for name, measured in kinds:
        shapes = [
            r
            for r in by_shape(measured[measured.bytes >= KNEE_BYTES])
            if total in set(r.sms) and len(r) >= KNEE_SIZES
        ]
        for shape in sorted(shapes, key=lambda r: -float(r.bytes.iloc[0]))[:5]:
            first, steady, dip = knee_of(shape, total)
            best = float((shape.bytes / shape.time_s).max())
            at_all = float((shape.bytes / shape.time_s)[shape.sms == total].iloc[0])
            rows.append(
                (
                    f"{name}, {described(shape)}",
                    number(at_all / 1e12),
                    number(best / 1e12),
                    tokens(first),
                    percent(first / total),
                    tokens(steady),
                    percent(dip),
                    len(shape),
                )
            )
            firsts.append((name, first))
        if shapes and name in ("streaming read", "decode attention", "decode GEMM gate_up"):
            shape = max(shapes, key=lambda r: (len(r), float(r.bytes.iloc[0])))
            points = [(float(r.sms), float(r.bytes) / float(r.time_s) / 1e12) for r in shape.itertuples()]
            lines.append(Series(f"{name}, {described(shape)}", points))
    if not rows:
        return None
    spans = []
    for name in dict.fromkeys(n for n, _ in firsts):
        values = [f for n, f in firsts if n == name]
        low, high = min(values), max(values)
        spans.append(f"{name} at {low:.0f}" + (f"–{high:.0f}" if high > low else ""))
    lead = (
        f"95 % of the whole GPU's bandwidth is first reached with this many of {total} SMs: "
        f"{'; '.join(spans)} (A100 memcpy in Bullet's Fig. 8: about 30 of 108, 28 %)."
    )
    head = (
        "operator",
        f"TB/s on {total}",
        "best TB/s",
        "first at SMs",
        "share",
        "held from SMs",
        "least between",
        "sizes",
    )
    note = (
        "Bytes are what the operator must move at least (weights or keys and values once, plus inputs and outputs); "
        "only shapes of 64 MiB and more, which cannot stay in L2. The curve is not monotone, so two sizes are given: "
        "the first that reaches 95 %, and the one from which every larger measured size does; *least between* is the "
        "least share of the whole GPU's bandwidth at any measured size from the first on. Decode attention and GEMMs "
        "are planned for the whole GPU also on a partition, so uneven waves are part of their curves; the sizes that "
        "were measured (last column) limit how finely a knee is placed."
    )
    picture = chart(
        "Bandwidth against SMs",
        Axis("SMs", low=0, high=float(total)),
        Axis("TB/s", low=0),
        lines,
    )
    return Section(
        "Where the bandwidth knee is",
        lead,
        ["![Bandwidth against SMs](IMG/bandwidth.svg)", table(head, rows), note],
        {"bandwidth": picture},
    )

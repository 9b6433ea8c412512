"""Synthetic CTAs: what each rule that says which CTA does what makes of the same mixes of work."""

from __future__ import annotations

import pandas as pd

from calib.fit.tickets import fit_tickets, mix_errors
from calib.kernels.tickets import ALONE, RULES
from calib.report.data import Profile
from calib.report.text import Section, number, percent, ratio, table, tokens, us
from calib.sweeps.power import BESIDE_SEED

MIX = ["compute_ctas", "bandwidth_ctas", "compute_work", "bandwidth_work", "spread", "ctas_per_sm", "seed"]
# mean speed-up over serial that POD-Attention (section 4.1, figure 7) found for kinds of fusion on an A100
PUBLISHED = {"cta_parallel": 1.03, "intra_thread": 1.13}


def rules(profile: Profile) -> Section | None:
    """Speed-up over one kind after the other, by rule."""
    found = profile.timed("tickets")
    if found.empty or "span_s" not in found:
        return None
    whole = found[found.sms == profile.sms]
    spans = whole[whole.label.isin(RULES)].pivot_table(index=MIX, columns="label", values="span_s")
    alone = {}
    for kind, other in zip(ALONE, ("bandwidth", "compute"), strict=True):
        same = [name for name in MIX if not name.startswith(other)]
        part = whole[(whole.label == kind) & whole[f"{other}_ctas"].eq(0)]
        alone[kind] = part.drop_duplicates(same).set_index(same).span_s
    serial = pd.Series(
        [sum(_look(alone[kind], key, spans.index.names) for kind in ALONE) for key in spans.index],
        index=spans.index,
    )
    serial = serial.dropna()
    if serial.empty:
        return None
    rows = []
    for rule in RULES:
        speed = (serial / spans[rule]).dropna()
        published = f"{PUBLISHED[rule]:.2f}" if rule in PUBLISHED else "–"
        cells = [ratio(speed.quantile(q)) for q in (0.05, 0.5, 0.95)]
        rows.append(
            (rule, len(speed), ratio(speed.mean()), *cells, percent(float((speed > 1).mean())), published)
        )
    best = max(rows, key=lambda row: float(row[2]))
    lead = (
        f"Of {len(RULES)} ways to put compute and bandwidth CTAs in one grid, '{best[0]}' gains most over one kind "
        f"after the other ({best[2]}× on average over {best[1]} random mixes)."
    )
    head = ("rule", "mixes", "mean", "p5", "median", "p95", "faster in", "published mean")
    stress = found[found.sms != profile.sms]
    sizes = ", ".join(tokens(s) for s in sorted(stress.sms.unique()))
    note = (
        "A compute CTA runs chains of multiply-adds, a bandwidth CTA streams its own memory (128 threads, 16 KiB a "
        "loop); times are from the first CTA's start to the last one's end by the GPU's clock. Rules: POD's "
        "proportional and 50:50 tickets an SM, kinds fixed by block index, both kinds in each thread, both kinds in "
        f"halves of a CTA. In each of {len(found)} runs, {len(stress)} of them on {sizes} SMs with work spread over "
        "more than a decade, every job ran exactly once."
    )
    body = [table(head, rows), *_base(whole), *_predicted(whole), note]
    return Section("Synthetic CTAs by scheduling rule", lead, body)


def _predicted(whole: pd.DataFrame) -> list[str]:
    """The list schedule's makespans of the random mixes, with terms from other rows."""
    terms, rows = fit_tickets(whole), []
    for rule, parts in mix_errors(whole, terms).items():
        for name, one in parts.items():
            if one["points"]:
                cells = (percent(one[key], 1) for key in ("median", "p90", "p95", "max", "bias"))
                rows.append((rule, name, one["points"], *cells))
    if not rows:
        return []
    return [
        "What the list schedule (`sim.cost.cta_events`) makes of these mixes, with terms fitted to CTAs of one kind, "
        f"all alike, and to {int((whole.seed >= BESIDE_SEED).sum())} mixes of their own: a bandwidth CTA keeps "
        f"{percent(terms.decode_beside)} of its rate beside a compute CTA, which loses next to nothing. Of jobs that "
        "differ an SM gets any, so their makespan is a draw; the prediction is the median over nine orders.\n\n"
        + table(("rule", "jobs", "mixes", "median", "p90", "p95", "max", "bias"), rows, words=2)
    ]


def _look(spans: pd.Series, key: tuple[float, ...], names: list[str]) -> float:
    at = dict(zip(names, key, strict=True))
    wanted = tuple(at[name] for name in spans.index.names)
    return float(spans.get(wanted, float("nan")))


def _base(whole: pd.DataFrame) -> list[str]:
    """How CTAs of one kind stretch when they share an SM or the memory."""
    rows = []
    for kind, column in zip(ALONE, ("compute_ctas", "bandwidth_ctas"), strict=True):
        part = whole[
            (whole.label == kind) & (whole.spread == 0) & (whole.seed == 0) & (whole.compute_work == 120)
        ]
        lone = part[part[column] == 1]
        if lone.empty:
            continue
        base = float(lone.span_s.median())
        for k, same in part.groupby("ctas_per_sm"):
            counts = {int(one[column]): float(one.span_s) for _, one in same.iterrows()}
            full = counts.get(int(132 * k))
            if full:
                rows.append(
                    (
                        kind.split("_")[0],
                        tokens(k),
                        us(base),
                        us(full),
                        ratio(full / base),
                        number(k * base / full),
                    )
                )
    if not rows:
        return []
    head = ("kind", "CTAs an SM", "one CTA alone, µs", "all slots full, µs", "stretch", "gain over one an SM")
    return ["CTAs of one kind:\n\n" + table(head, rows)]

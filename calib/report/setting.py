"""What was measured on what: the card and its libraries, the protocol, points per sweep, and the SM-id proof."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from calib.report.data import Profile
from calib.report.text import Section, interquartile, number, percent, size, table, us

LONGEST_REASON = 110  # characters of a skip reason that are shown


def measured(profile: Profile) -> Section:
    """The card, the protocol and how far each sweep came."""
    run, gpu = profile.run, profile.run["gpu"]
    sweeps = run.get("sweeps", {})
    points = sum(s["points"] for s in sweeps.values())
    done = sum(s["measured"] for s in sweeps.values())
    rows = sum(len(t) for t in profile.tables.values())
    lead = (
        f"{rows} rows of {run['model']} shapes on one {gpu['name']}: {done} of {points} planned points, "
        "coarse grids first, so the whole space is covered thinly where a sweep was cut short."
    )
    return Section("What was measured", lead, [_facts(profile), _sweeps(profile), *_skipped(profile)])


def _facts(profile: Profile) -> str:
    run, gpu, bench = profile.run, profile.run["gpu"], profile.run.get("bench", {})
    protocol = run.get("protocol", {})
    libraries = ", ".join(f"{name} {version}" for name, version in gpu.get("libraries", {}).items())
    facts = [
        (
            "GPU",
            f"{gpu['name']}, {gpu['sms']} SMs, {size(gpu['memory_bytes'])}, L2 {size(gpu['l2_bytes'])}, "
            f"SM clock to {gpu['max_sm_mhz']} MHz, power limit {gpu['power_limit_w']:.0f} W",
        ),
        ("Driver, CUDA", f"{gpu['driver']}, {gpu['cuda']}"),
        ("Libraries", libraries),
        ("Date, seed", f"{run['date']}, {run['seed']}"),
        (
            "Protocol",
            f"{protocol.get('name')}: CUDA graphs of at least {us(protocol.get('replay_s', 0))} µs, "
            f"{protocol.get('warm_s', 0) * 1e3:.3g} ms warm-up, "
            f"{protocol.get('least')} to {protocol.get('most')} replays in about "
            f"{protocol.get('window_s', 0) * 1e3:.3g} ms a point; side by side "
            f"{protocol.get('corun_s', 0) * 1e3:.3g} ms, whole overlapping iterations only",
        ),
        (
            "Partitions",
            f"{bench.get('mechanism')} contexts, smallest {bench.get('minimum_sms')} SMs, steps of "
            f"{bench.get('alignment_sms')}; libraries plan for the {bench.get('library_sm_count')}",
        ),
    ]
    return table(("", "as found"), facts, words=2)


def _sweeps(profile: Profile) -> str:
    rows = []
    for name, state in profile.run.get("sweeps", {}).items():
        found = profile.timed(name)
        throttled = found.throttled.dropna()
        rows.append(
            (
                name,
                f"{state['measured']} / {state['points']}",
                state["rows"],
                state["skipped"],
                f"{found['count'].median():.0f}" if found["count"].notna().any() else "–",
                percent(interquartile(found), 1) if len(found) else "–",
                percent(throttled.mean()) if len(throttled) else "–",
            )
        )
    head = ("sweep", "points of plan", "rows", "skipped", "samples a row", "spread", "throttled")
    note = (
        "Samples a row and spread are medians over rows; the spread is the interquartile range over the median. "
        "A row counts as throttled if NVML named a reason (power limit) when it was read once, during the point. "
        "Rows of points that a later plan no longer holds are kept, so a sweep can have more rows than planned points."
    )
    return f"{table(head, rows)}\n\n{note}{_cards(profile)}"


def _cards(profile: Profile) -> str:
    """Which sweeps another card of the same kind was measured in."""
    own = str(profile.run["gpu"].get("uuid", ""))
    others: dict[str, list[str]] = {}
    for name, state in profile.run.get("sweeps", {}).items():
        card = str(state.get("card", ""))
        if card and not own.startswith(card):
            others.setdefault(card, []).append(name)
    if not others:
        return ""
    parts = [f"{', '.join(names)} on one ({card})" for card, names in others.items()]
    return f" Other cards of the same kind, by the start of their uuid, were used for {'; '.join(parts)}."


def _skipped(profile: Profile) -> list[str]:
    rows = []
    for name, found in profile.tables.items():
        if "skip" not in found:
            continue
        refused = found[found.skip.notna()]
        for reason, cases in refused.groupby("skip"):
            where = ", ".join(f"{sms:.0f}" for sms in sorted(cases.sms.unique()))
            short = str(reason) if len(str(reason)) <= LONGEST_REASON else f"{str(reason)[:LONGEST_REASON]}…"
            rows.append((f"`{short.replace('`', '')}`".replace("|", "/"), name, where, len(cases)))
    if not rows:
        return []
    return ["Points that gave no time:", table(("reason", "sweep", "on SMs", "points"), rows, words=3)]


def errors(profile: Profile) -> Section | None:
    """Each kernel against float32."""
    found = profile.tables.get("errors", pd.DataFrame())
    if "error" not in found or found.error.dropna().empty:
        return None
    found = found[found.error.notna()].assign(
        label=lambda t: t.label.fillna("") if "label" in t else "",
    )
    worst = float(found.error.max())
    lead = (
        f"The largest relative error of a timed kernel against float32 is {number(worst * 100, 2)} % "
        f"(n = {len(found)} kernels on small random inputs)."
    )
    head = ("kernel", "variants", "largest error")
    rows = [
        (kind, ", ".join(sorted(filter(None, cases.label.unique()))) or "–", f"{cases.error.max():.1e}")
        for kind, cases in found.groupby("kind")
    ]
    return Section("Numbers the kernels compute", lead, [table(head, rows, words=2)])


def partitions(profile: Profile) -> Section | None:
    """The proof by SM ids that partitions are what they claim to be."""
    proofs = [p for p in profile.run.get("partitions", []) if "seen" in p]
    if not proofs:
        return None
    total = profile.sms
    exact = [p for p in proofs if len(set(p["seen"])) == p["sms"]]
    shared = sum(p["shared"] for p in proofs)
    lead = (
        f"{len(exact)} of {len(proofs)} splits ran on exactly the SMs they were promised, and the two sides of "
        f"a split shared {shared} SMs."
    )
    rows = [
        (p["partition"], _ranges(p["seen"]), p["sms"], len(set(p["seen"])), total - p["sms"], p["shared"])
        for p in proofs
    ]
    head = (
        "split",
        "ids that a kernel on side A saw (%smid)",
        "promised",
        "seen",
        "left to side B",
        "shared",
    )
    nested = all(set(a["seen"]) <= set(b["seen"]) for a, b in pairwise(proofs))
    whole = next((p for p in profile.run["partitions"] if p.get("partition") == "all"), None)
    note = [
        "A kernel with many blocks records `%smid` of every block; a split is used only if its two sets are "
        "disjoint and complete."
    ]
    if whole:
        note.append(f"Without a partition a kernel saw all {whole['sms']} SMs (`%nsmid` {whole['nsmid']}).")
    if nested:
        note.append("Each larger side A holds the smaller ones.")
    skipped = [p for p in profile.run["partitions"] if "skip" in p]
    if skipped:
        note.append(f"Refused by the driver: {', '.join(p['partition'] for p in skipped)}.")
    return Section("Proof of the partitions by SM ids", lead, [table(head, rows, words=2), " ".join(note)])


def _ranges(ids: list[int]) -> str:
    """Sorted ids as ranges: 0–3, 7."""
    parts: list[list[int]] = []
    for value in sorted(ids):
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in parts)

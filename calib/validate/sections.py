"""Tables of the fidelity page, for one study each: steps, requests, aims, order of the policies, worst launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from calib.validate.compare import Group, ranking

WORST = 8
# what is aimed at: replay's median and p95; p50 and p90 of TTFT and TPOT, the latter wider where queues are long
REPLAY_AIM = (0.03, 0.10)
P50_AIM, P90_AIM, P90_AIM_CROWDED = 0.05, 0.10, 0.15
REQUESTS = (
    *("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s", "itl_p99_s", "e2el_p50_s"),
    *("request_throughput", "energy_j"),
)
AIMED = tuple(f"{metric}_{p}_s" for metric in ("ttft", "tpot") for p in ("p50", "p90"))
COMPARED = ("step_s", "step_s_p95", *AIMED)
Rows = Sequence[dict[str, Any]]


def load_of(group: Group) -> str:
    """The load, and what becomes of it."""
    return f"{group.load:g}" + (", then 1.5 x and back" if group.mode == "load_step" else "")


def percent(value: Any) -> str:
    """A share with one decimal."""
    return f"{100 * float(value):.1f} %"


def off(simulated: Any, real: Any) -> tuple[float, float]:
    """Median and p95 of the relative error without its sign."""
    size = np.abs(np.asarray(simulated) / np.asarray(real) - 1.0)
    return float(np.median(size)), float(np.percentile(size, 95))


def steps(groups: Sequence[Group]) -> list[str]:
    """Errors of replayed launches, and of their GPU seconds by themselves."""
    lines = [
        "| policy | load | launches | median error | p95 error | of the GPU's seconds, median | p95 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for group in groups:
        cells = " | ".join(map(percent, off(group.step_simulated_s, group.step_real_s)))
        gpu = (
            map(percent, off(group.gpu_simulated_s, group.gpu_real_s))
            if len(group.gpu_real_s)
            else ("-", "-")
        )
        cells += " | " + " | ".join(gpu)
        lines.append(f"| {group.policy} | {load_of(group)} | {len(group.step_real_s):,} | {cells} |")
    return lines


def requests(groups: Sequence[Group], rows: Rows) -> list[str]:
    """Errors of the distributions."""
    heads = [metric.removesuffix("_s").replace("_", " ") for metric in REQUESTS]
    lines = [
        "Error, with the real runs' own spread in brackets.",
        "",
        "| policy | load | requests/s | runs | " + " | ".join(heads) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(heads),
    ]
    for group in groups:
        cells = [_cell(find(rows, group, metric)) for metric in REQUESTS]
        runs = f"{len(group.names)}" + (f" on {group.cards} GPUs" if group.cards > 1 else "")
        cells = [group.policy, load_of(group), f"{group.rate:.1f}", runs, *cells]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def find(rows: Rows, group: Group, metric: str) -> dict[str, Any] | None:
    """The row of a group's metric."""
    where = (group.study, group.policy, group.load, group.mode, metric)
    for row in rows:
        if (row["study"], row["policy"], row["load"], row["mode"], row["metric"]) == where:
            return row
    return None


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    spread = "" if row["real_spread"] is None else f" ({percent(row['real_spread'])})"
    return f"{100 * row['error']:+.1f} %{spread}"


def missed_steps(group: Group) -> list[str]:
    """Aims of the replay that the group misses."""
    values = off(group.step_simulated_s, group.step_real_s)
    named = zip(("median", "p95"), values, REPLAY_AIM, strict=True)
    return [name for name, value, aim in named if value > aim]


def missed_requests(group: Group, rows: Rows) -> list[str]:
    """Metrics that are further off than aimed at and than the real runs among themselves."""
    crowded = group.mode == "load_step" or group.load > 1.0
    missed = []
    for metric in AIMED:
        row = find(rows, group, metric)
        aim = P50_AIM if "p50" in metric else P90_AIM_CROWDED if crowded else P90_AIM
        if row is not None and abs(row["error"]) > max(aim, row["real_spread"] or 0.0):
            missed.append(metric.removesuffix("_s").replace("_", " "))
    return missed


def aims(groups: Sequence[Group], rows: Rows) -> list[str]:
    """What each policy keeps to and what it misses."""
    lines = [
        f"Replay: median at most {percent(REPLAY_AIM[0])}, p95 at most {percent(REPLAY_AIM[1])}. Requests: p50 of TTFT "
        f"and TPOT within {percent(P50_AIM)}; p90 within {percent(P90_AIM)}, or {percent(P90_AIM_CROWDED)} beyond "
        "saturation and where the load steps; or within the real runs' own spread.",
        "",
        "| policy | load | replay | requests |",
        "| --- | --- | --- | --- |",
    ]
    for group in groups:
        cells = (_verdict(missed_steps(group)), _verdict(missed_requests(group, rows)))
        lines.append(f"| {group.policy} | {load_of(group)} | " + " | ".join(cells) + " |")
    return lines


def _verdict(missed: Sequence[str]) -> str:
    return "missed: " + ", ".join(missed) if missed else "met"


def own_host(held: Rows) -> list[str]:
    """Errors with host terms fitted to each run itself, the mean over the repeats."""
    lines = [
        "Host terms fitted to each run itself: no prediction, but what the GPU's and the schedulers' models leave.",
        "",
        "| policy | load | runs | replay, median | p95 | ttft p50 | ttft p90 | tpot p50 | tpot p90 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    table = pd.DataFrame(held)
    for (policy, mode, load), rows in table.groupby(["policy", "mode", "load"], sort=False):
        where = f"{load:g}" + (", then 1.5 x and back" if mode == "load_step" else "")
        cells = [percent(rows[metric].mean()) for metric in COMPARED[:2]]
        cells += [f"{100 * rows[metric].mean():+.1f} %" for metric in AIMED]
        lines.append(f"| {policy} | {where} | {len(rows)} | " + " | ".join(cells) + " |")
    return lines


def order(groups: Sequence[Group]) -> list[str]:
    """The policies from best to worst on both sides."""
    lines = ["| load | metric | real, best first | simulated |", "| --- | --- | --- | --- |"]
    for row in ranking(list(groups)):
        if len(row["real"]) < 2:
            continue
        same = "the same" if row["real"] == row["simulated"] else ", ".join(row["simulated"])
        mode = " (step)" if row["mode"] == "load_step" else ""
        lines.append(f"| {row['load']:g}{mode} | {row['metric']} | {', '.join(row['real'])} | {same} |")
    return lines if len(lines) > 2 else ["One policy was measured."]


def worst(groups: Sequence[Group]) -> list[str]:
    """The launches that are furthest off: one of a millisecond too long matters less than one of fifty."""
    parts = [
        group.steps.assign(
            policy=group.policy,
            load=group.load,
            real_ms=1e3 * group.step_real_s,
            simulated_ms=1e3 * group.step_simulated_s,
        )
        for group in groups
    ]
    if not parts:
        return []
    every = pd.concat(parts, ignore_index=True)
    every["off_ms"] = (every["simulated_ms"] - every["real_ms"]).abs()
    lines = [
        "| policy | load | SMs | new tokens | decodes | measured, ms | simulated, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in every.nlargest(WORST, "off_ms").itertuples(index=False):
        new = sum(int(q) for q in row.q_tokens.split(";")) if row.q_tokens else 0
        lines.append(
            f"| {row.policy} | {row.load:g} | {row.sms} | {new} | {row.decode_batch} | {row.real_ms:.1f} | "
            f"{row.simulated_ms:.1f} |"
        )
    return lines

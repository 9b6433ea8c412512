"""`fidelity.json` and `fidelity.md` with its pictures, from the cases of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.report.svg import Axis, Series, chart
from calib.validate.compare import Group, groups_of, ranking, rows_of
from calib.validate.files import finished, read_case
from calib.validate.hosts import FILE as HOST_FILE
from sim.config.load import load_experiment
from sim.config.schema import Experiment
from sim.cost import load_cost
from sim.cost.profiled import ProfiledCost
from sim.metrics.definitions import latencies

EXPERIMENT = "_experiment.yaml"
WORST = 8
CURVE_POINTS = 100
# what is aimed at: replay's median and p95; p50 and p90 of TTFT and TPOT, the latter wider where queues are long
REPLAY_AIM = (0.03, 0.10)
P50_AIM, P90_AIM, P90_AIM_CROWDED = 0.05, 0.10, 0.15


def write_pages(folder: Path, out: Path) -> list[dict[str, Any]]:
    """Write fidelity.json, fidelity.md and fidelity/*.svg under `out` from the cases in `folder`; returns the rows."""
    e, cost = opened(folder)
    groups = sorted(groups_of(e, folder, cost), key=lambda g: (g.policy, g.mode != "open", g.load))
    rows = rows_of(groups)
    pictures = {f"steps-{_slug(g)}.svg": _scatter(g) for g in groups} | {
        f"cdf-{_slug(g)}.svg": _overlay(g) for g in groups
    }
    images = out / "fidelity-img"
    images.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (images / name).write_text(text, encoding="utf-8")
    body = {"schema_version": 1, "rows": rows, "ranking": ranking(groups)}
    (out / "fidelity.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (out / "fidelity.md").write_text(_page(folder, e, groups, rows), encoding="utf-8")
    return rows


def opened(folder: Path) -> tuple[Experiment, ProfiledCost]:
    """The experiment of a folder of cases, and its prices with the profile's own host terms."""
    e, _ = load_experiment(folder / EXPERIMENT)
    return e, load_cost(e.model, e.gpu, e.profile, kernels={"launch": e.kernels.launch})


def _slug(group: Group) -> str:
    return f"{group.policy}-{group.mode}-{group.load:g}"


def _scatter(group: Group) -> str:
    """Simulated against real seconds of every launch, by what it held."""
    kinds = {
        "decodes": group.steps["q_tokens"] == "",
        "prompts": (group.steps["q_tokens"] != "") & (group.steps["decode_batch"] == 0),
        "both": (group.steps["q_tokens"] != "") & (group.steps["decode_batch"] > 0),
    }
    real, ours = 1e3 * group.step_real_s, 1e3 * group.step_simulated_s
    series = []
    for name, mask in kinds.items():
        at = np.flatnonzero(mask.to_numpy())
        at = at[:: max(1, len(at) // 400)]
        if len(at):
            series.append(Series(name, [(float(real[i]), float(ours[i])) for i in at], joined=False))
    low, high = float(min(real.min(), ours.min())), float(max(real.max(), ours.max()))
    series.append(Series("equal", [(low, low), (high, high)], colour="#222"))
    title = f"{group.policy} at {group.load:g} x capacity: each launch"
    return chart(title, Axis("measured, ms", log=10), Axis("simulated, ms", log=10), series)


def _overlay(group: Group) -> str:
    """Distribution functions of TTFT and TPOT, real (first repeat) and simulated."""
    series = []
    for name in ("ttft", "tpot"):
        for side, table in (("real", group.real_requests), ("simulated", group.simulated_requests)):
            values = np.sort(latencies(table)[f"{name}_s"].dropna().to_numpy() * 1e3)
            if not len(values):
                continue
            at = np.unique(np.linspace(0, len(values) - 1, CURVE_POINTS).astype(int))
            points = [(float(max(values[k], 0.1)), 100.0 * (k + 1) / len(values)) for k in at]
            series.append(Series(f"{name.upper()}, {side}", points))
    title = f"{group.policy} at {group.load:g} x capacity: requests"
    return chart(title, Axis("ms", log=10), Axis("share of requests, %", low=0, high=100), series)


def _page(folder: Path, e: Any, groups: Sequence[Group], rows: list[dict[str, Any]]) -> str:
    facts, _, _ = read_case(folder, finished(folder)[0])
    gpu = facts["gpu"]
    requests = len(groups[0].real_requests) if groups else 0
    lines = [
        "# Fidelity: the same scheduler code on a real GPU and in the simulator",
        "",
        f"{e.model} on {gpu['name']}"
        + (f" (driver {gpu['driver']}, CUDA {gpu['cuda']})" if gpu.get("driver") else "")
        + f", {requests} requests a run, measured {facts['date']}; made by `python -m calib.validate` from "
        f"`{folder.name}/`, which holds every launch and every request.",
        "",
        "*Replay*: the simulator prices the launches that the GPU ran, one by one. *Open*: each side schedules by its",
        "own clock. *Load step*: the rate is 1.5 times as high for a quarter of the span. The load is a fraction of",
        "the throughput that the simulator predicts past saturation. Errors are simulated / real - 1; the spread is",
        "that of the real repeats (largest - smallest over their mean).",
        "",
        _host_note(folder),
        "",
        "## Steps (replay)",
        "",
        "| policy | load | launches | median error | p95 error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for group in groups:
        off = np.abs(group.step_simulated_s / group.step_real_s - 1.0)
        lines.append(
            f"| {group.policy} | {_load(group)} | {len(off):,} | {_pct(np.median(off))} | "
            f"{_pct(np.percentile(off, 95))} |"
        )
    lines += ["", "## Requests (open and load step)", ""]
    metrics = ["ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s", "itl_p99_s", "e2el_p50_s"]
    metrics += ["request_throughput", "energy_j"]
    lines += [
        "Error, with the real runs' own spread in brackets.",
        "",
        "| policy | load | " + " | ".join(m.removesuffix("_s").replace("_", " ") for m in metrics) + " |",
        "| --- | --- |" + " --- |" * len(metrics),
    ]
    for group in groups:
        cells = [_cell(rows, group, metric) for metric in metrics]
        lines.append(f"| {group.policy} | {_load(group)} | " + " | ".join(cells) + " |")
    lines += ["", "## Aims", "", *_aims(groups, rows)]
    lines += [
        "",
        "## Order of the policies",
        "",
        *_order(groups),
        "",
        "## Worst launches",
        "",
        *_worst(groups),
    ]
    lines += ["", "## Pictures", ""]
    for group in groups:
        lines.append(
            f"![launches](fidelity-img/steps-{_slug(group)}.svg) ![requests](fidelity-img/cdf-{_slug(group)}.svg)"
        )
    notes = folder / "_notes.md"
    if notes.exists():
        lines += ["", "## What is missed, and why", "", notes.read_text(encoding="utf-8").strip()]
    return "\n".join(lines) + "\n"


def _host_note(folder: Path) -> str:
    if (folder / HOST_FILE).exists():
        return (
            "Host terms (planning, launching, reading tokens back) are fitted from runs set apart "
            f"(`hosts/cases`; the terms are in `{folder.name}/{HOST_FILE}`); nothing is fitted to the runs below."
        )
    return "Host terms are the profile's own."


def _load(group: Group) -> str:
    return f"{group.load:g}" + (", then 1.5 x and back" if group.mode == "load_step" else "")


def _pct(value: Any) -> str:
    return f"{100 * float(value):.1f} %"


def _cell(rows: list[dict[str, Any]], group: Group, metric: str) -> str:
    for row in rows:
        if (row["policy"], row["load"], row["mode"], row["metric"]) == (
            group.policy,
            group.load,
            group.mode,
            metric,
        ):
            spread = "" if row["real_spread"] is None else f" ({_pct(row['real_spread'])})"
            return f"{100 * row['error']:+.1f} %{spread}"
    return "-"


def _aims(groups: Sequence[Group], rows: list[dict[str, Any]]) -> list[str]:
    """What each policy keeps to and what it misses."""
    lines = [
        f"Replay: median at most {_pct(REPLAY_AIM[0])}, p95 at most {_pct(REPLAY_AIM[1])}. Requests: p50 of TTFT "
        f"and TPOT within {_pct(P50_AIM)}; p90 within {_pct(P90_AIM)}, or {_pct(P90_AIM_CROWDED)} beyond saturation "
        "and where the load steps.",
        "",
        "| policy | load | replay | requests |",
        "| --- | --- | --- | --- |",
    ]
    for group in groups:
        off = np.abs(group.step_simulated_s / group.step_real_s - 1.0)
        crowded = group.mode == "load_step" or group.load > 1.0
        wide = P90_AIM_CROWDED if crowded else P90_AIM
        replay = [
            name
            for name, value, aim in (
                ("median", float(np.median(off)), REPLAY_AIM[0]),
                ("p95", float(np.percentile(off, 95)), REPLAY_AIM[1]),
            )
            if value > aim
        ]
        aims = {
            f"{m}_{p}_s": P50_AIM if p == "p50" else wide for m in ("ttft", "tpot") for p in ("p50", "p90")
        }
        errors = {metric: _error(rows, group, metric) for metric in aims}
        missed = [m for m, aim in aims.items() if (error := errors[m]) is not None and abs(error) > aim]
        cells = [_verdict(replay), _verdict([m.removesuffix("_s").replace("_", " ") for m in missed])]
        lines.append(f"| {group.policy} | {_load(group)} | " + " | ".join(cells) + " |")
    return lines


def _verdict(missed: list[str]) -> str:
    return "missed: " + ", ".join(missed) if missed else "met"


def _error(rows: list[dict[str, Any]], group: Group, metric: str) -> float | None:
    where = (group.policy, group.load, group.mode, metric)
    found = [row for row in rows if (row["policy"], row["load"], row["mode"], row["metric"]) == where]
    return float(found[0]["error"]) if found else None


def _order(groups: Sequence[Group]) -> list[str]:
    lines = ["| load | metric | real, best first | simulated |", "| --- | --- | --- | --- |"]
    for row in ranking(list(groups)):
        if len(row["real"]) < 2:
            continue
        same = "the same" if row["real"] == row["simulated"] else ", ".join(row["simulated"])
        mode = " (step)" if row["mode"] == "load_step" else ""
        lines.append(f"| {row['load']:g}{mode} | {row['metric']} | {', '.join(row['real'])} | {same} |")
    return lines if len(lines) > 2 else ["One policy was measured."]


def _worst(groups: Sequence[Group]) -> list[str]:
    parts = []
    for group in groups:
        table = group.steps.assign(
            policy=group.policy,
            load=group.load,
            real_ms=1e3 * group.step_real_s,
            simulated_ms=1e3 * group.step_simulated_s,
        )
        parts.append(table)
    if not parts:
        return []
    every = pd.concat(parts, ignore_index=True)
    # a launch of a millisecond too long matters less than one of fifty
    every["off_ms"] = (every["simulated_ms"] - every["real_ms"]).abs()
    worst = every.nlargest(WORST, "off_ms")
    lines = [
        "| policy | load | SMs | new tokens | decodes | measured, ms | simulated, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in worst.itertuples(index=False):
        new = sum(int(q) for q in row.q_tokens.split(";")) if row.q_tokens else 0
        lines.append(
            f"| {row.policy} | {row.load:g} | {row.sms} | {new} | {row.decode_batch} | {row.real_ms:.1f} | "
            f"{row.simulated_ms:.1f} |"
        )
    return lines

"""From measured rows of several GPUs to the profile's `collectives.json` (`sim.cost.collectives_file` reads it).

A curve is the table of medians at the doublings and half-doublings of message sizes, read linearly between; its errors
are those on token counts drawn at random, which are in no table, and on runs of their own under `heldout/`. Factors of
what runs side by side are time over time alone on the same SMs, as measured in one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.collectives.factors import beside, beside_elsewhere, held_sms, sms_given
from calib.collectives.joins import host_in_step, in_step
from calib.collectives.knots import elsewhere, fitted, tables
from calib.collectives.moves import transfers
from calib.collectives.sizes import COLLECTIVES, grid_sizes

HOST_BOUND = 1.15  # an eager call this much longer than a captured one waits for the host


def fit_collectives(folder: Path, run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(content of `collectives.json`, errors by curve) of a calibration's folder; None where no collective was
    measured. `run`: its `run.yaml`."""
    held = tables(folder)
    others = {path.name: tables(path) for path in sorted((folder / "heldout").glob("*"))}
    whole = int(run["gpu"]["sms"])
    made = [one for name in COLLECTIVES if name in held for one in _curves(name, held, others, whole)]
    if not made:
        return None
    moved, of_moved = transfers(held, others)
    factors = beside(held)
    of_factors = {
        f"beside, run {run}": found
        for run, seen in others.items()
        if (found := beside_elsewhere(factors, beside(seen)))
    }
    data = {
        "curves": [curve for curve, _ in made],
        "beside": factors,
        "transfers": moved,
        "about": dict(run.get("group") or {}),
    }
    return data, {**{_name(curve): found for curve, found in made}, **of_moved, **of_factors}


def _name(curve: Mapping[str, Any]) -> str:
    return f"{curve['collective']}/{curve['launch']}-{curve['gpus']}"


def on_grid(sizes: pd.Series, grid: set[int]) -> pd.Series:
    """Which sizes the tables hold."""
    return sizes.astype("int64").isin(grid)


def _curves(
    name: str, held: Mapping[str, pd.DataFrame], others: Mapping[str, Mapping[str, pd.DataFrame]], whole: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(curve, its errors) of a collective, one a number of GPUs and launch."""
    grid, made = {size for size, _ in grid_sizes()}, []
    for (gpus, launch), rows in held[name].groupby(["gpus", "launch"]):
        inside = on_grid(rows.message_bytes, grid)
        knots = rows[inside].groupby("message_bytes").time_s.median()
        if launch == "eager":
            captured = held[name][(held[name].launch == "graph") & (held[name].gpus == gpus)]
            knots = host_bound(knots, captured.groupby("message_bytes").time_s.median())
        if len(knots) < 2:
            continue
        curve = {
            "collective": name,
            "gpus": int(gpus),
            "launch": str(launch),
            **fitted(knots, rows[~inside], captured=launch == "graph"),
        }
        found = curve.pop("errors")
        for run, seen in others.items():
            same = seen.get(name, rows.iloc[:0])
            found |= elsewhere(knots, same[(same.gpus == gpus) & (same.launch == launch)], run)
        if launch == "eager" and rows.host_s.notna().any():
            # passes are what a simulator prices: there the host pays more than for the same call again and again
            passes = host_in_step(held, int(gpus)) if name == "allreduce" else None
            curve["host_s"] = float(f"{passes or rows.host_s.median():.4g}")
        curve |= held_sms(name, held)
        if name == "allreduce" and launch == "graph":
            seconds, record = in_step(held, knots, int(gpus))
            found |= record
            if seconds:
                curve["in_step_s"] = float(f"{seconds:.3g}")
        if name == "allreduce":
            given = sms_given(held, knots, int(gpus), whole)
            if given:
                curve["sms_given"] = given
        made.append((curve, found))
    return made


def host_bound(eager: pd.Series, graph: pd.Series) -> pd.Series:
    """Eager seconds as the longer of one cost a call on the host and what a graph takes: where the host is what is
    waited for, its scatter says nothing about the size."""
    both = graph.reindex(eager.index).fillna(0.0)
    waits = eager > HOST_BOUND * both
    floor = float(eager[waits].median()) if waits.any() else 0.0
    return np.maximum(both.where(both > 0, eager), floor)


def coverage(data: Mapping[str, Any]) -> str:
    """What was measured, as a sentence."""
    curves = data["curves"]
    names = ", ".join(dict.fromkeys(curve["collective"] for curve in curves))
    gpus = ", ".join(sorted({str(curve["gpus"]) for curve in curves}))
    low = min(curve["points"][0][0] for curve in curves)
    high = max(curve["points"][-1][0] for curve in curves)
    moved = ", ".join(dict.fromkeys(f"{way['method']} {way['layout']}" for way in data["transfers"]))
    text = f"{names} of {gpus} GPUs, {low / 1024:g} KiB to {high / 2**20:g} MiB, graph and eager"
    return f"{text}; KV transfers: {moved}" if moved else text

"""The executor's host terms, fitted from the step logs of runs set apart and used for all others.

The executor is a bare single-threaded server: it plans, launches and reads tokens back between steps, with nothing
overlapped. A production engine has other terms; these describe the system that is compared here. A thread that serves
two lanes answers each of them later, so there are terms for one lane and for two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sim.cost.base import HostTerms
from sim.cost.profiled import ProfiledCost

FILE = "_host.yaml"
ROUNDS = 25  # of reweighting: least absolute deviations
LEAST_S = 1e-6


def fit_hosts(steps: pd.DataFrame, terms: HostTerms, layers: int, source: str) -> HostTerms:
    """Terms from a log: what neither the GPU nor launching beside it accounts for is the gap of a step.

    The gap of a step has a part of its kind of launch and one for each sequence (least absolute deviations), and that
    of a group of layers a constant (median). Terms that the log does not show keep those of `terms`.
    """
    if "ahead" in steps.columns:  # what is queued behind a step that runs costs no host time of its own
        steps = steps[steps["ahead"] == 0]
    taken_s = steps["end_s"] - steps["start_s"]
    share = (steps["last_layer"] - steps["first_layer"]) / layers
    gap_s = taken_s - np.maximum(steps["gpu_s"], steps["launch_s"])
    steps = steps.assign(gap_s=gap_s, share=share, sequences=_sequences(steps))
    whole = steps[share == 1.0]
    graph, eager = (whole[whole["launch"] == kind] for kind in ("graph", "piecewise"))
    found: dict[str, Any] = {}
    if len(graph) + len(eager):
        found |= _gaps(graph, eager) | {"per_sequence_s": 0.0, "label": source}
    if len(graph):
        found["graph_base_s"] = _short(graph["launch_s"].median())
    pieces = steps[steps["launch"] == "piecewise"]
    if len(pieces):
        layer_s = (pieces["launch_s"] / pieces["share"]).median() / layers
        found |= {"piecewise_base_s": 0.0, "piecewise_layer_s": _short(layer_s)}
    groups = steps[share < 1.0]
    if len(groups):
        eager_s = found.get("gap_eager_s", terms.gap_eager_s)
        each = found.get("gap_per_sequence_s", terms.gap_per_sequence_s)
        over = groups["gap_s"] - groups["share"] * (eager_s + each * groups["sequences"])
        found["gap_group_s"] = _short(max(0.0, over.median()))
    return replace(terms, **found)


def _sequences(steps: pd.DataFrame) -> Any:
    chunks = [len(cell.split(";")) if cell else 0 for cell in steps["q_tokens"]]
    return steps["decode_batch"] + np.array(chunks, dtype=np.int64)


def _gaps(graph: pd.DataFrame, eager: pd.DataFrame) -> dict[str, float]:
    """Gap of either kind of launch, and what a sequence adds to both."""
    kinds = {name: rows for name, rows in (("gap_graph_s", graph), ("gap_eager_s", eager)) if len(rows)}
    rows = pd.concat(kinds.values())
    own = [
        np.concatenate([np.full(len(r), float(r is one)) for r in kinds.values()]) for one in kinds.values()
    ]
    columns = np.column_stack([*own, rows["sequences"].to_numpy(float)])
    measured, weight = rows["gap_s"].to_numpy(float), np.ones(len(rows))
    for _ in range(ROUNDS):
        root = np.sqrt(weight)
        answer, *_ = np.linalg.lstsq(columns * root[:, None], measured * root, rcond=None)
        weight = 1.0 / np.maximum(np.abs(measured - columns @ answer), LEAST_S)
    return dict(zip([*kinds, "gap_per_sequence_s"], (_short(max(0.0, x)) for x in answer), strict=True))


def _short(value: float) -> float:
    return float(f"{float(value):.4g}")


def write_hosts(folder: Path, terms: Mapping[int, HostTerms]) -> None:
    """Keep the terms, by number of lanes, beside the cases."""
    text = yaml.safe_dump({lanes: dict(vars(one)) for lanes, one in terms.items()}, sort_keys=False)
    (folder / FILE).write_text(text, encoding="utf-8")


def with_hosts(cost: ProfiledCost, folder: Path, lanes: int = 1) -> ProfiledCost:
    """`cost` with the host terms that lie beside the cases, for so many lanes or else those at hand; as it is if there
    are none."""
    path = folder / FILE
    if not path.exists():
        return cost
    held = yaml.safe_load(path.read_text(encoding="utf-8"))
    terms = HostTerms(**held.get(lanes, next(iter(held.values()))))
    return replace(cost, launching=replace(cost.launching, terms=terms))

"""The executor's host terms, fitted from the step log of one calibration run and used for all others.

The executor is a bare single-threaded server: it plans, launches and reads tokens back between steps, with nothing
overlapped. A production engine has other terms; these describe the system that is compared here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sim.cost.base import HostTerms
from sim.cost.profiled import ProfiledCost

FILE = "_host.yaml"


def fit_hosts(steps: pd.DataFrame, terms: HostTerms, layers: int, source: str) -> HostTerms:
    """Terms from a log: what neither the GPU nor launching beside it accounts for is the gap of a step.

    Medians; terms that the log does not show keep those of `terms`.
    """
    taken_s = steps["end_s"] - steps["start_s"]
    steps = steps.assign(gap_s=taken_s - np.maximum(steps["gpu_s"], steps["launch_s"]))
    graph, pieces = steps[steps["launch"] == "graph"], steps[steps["launch"] == "piecewise"]
    found: dict[str, Any] = {}
    if len(graph):
        found |= {"gap_graph_s": _median(graph["gap_s"]), "graph_base_s": _median(graph["launch_s"])}
    if len(pieces):
        share = (pieces["last_layer"] - pieces["first_layer"]) / layers
        whole = pieces["launch_s"] / share
        found |= {
            "gap_eager_s": _median(pieces["gap_s"]),
            "piecewise_base_s": 0.0,
            "piecewise_layer_s": _median(whole) / layers,
        }
    if found:
        found |= {"per_sequence_s": 0.0, "label": source}
    return replace(terms, **found)


def _median(values: pd.Series) -> float:
    return float(f"{float(np.median(values)):.4g}")


def write_hosts(folder: Path, terms: HostTerms) -> None:
    """Keep the terms beside the cases."""
    text = yaml.safe_dump(dict(vars(terms)), sort_keys=False)
    (folder / FILE).write_text(text, encoding="utf-8")


def with_hosts(cost: ProfiledCost, folder: Path) -> ProfiledCost:
    """`cost` with the host terms that lie beside the cases; as it is if there are none."""
    path = folder / FILE
    if not path.exists():
        return cost
    terms = HostTerms(**yaml.safe_load(path.read_text(encoding="utf-8")))
    return replace(cost, launching=replace(cost.launching, terms=terms))

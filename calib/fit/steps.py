"""Whole layers and steps as launches: rows of the step sweeps, and what the sum of their operators says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.fit.points import Floats, column, numbers, read_rows
from sim.cost.operators import effective_longest
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Launch

SWEEPS = ("prefill_layer", "decode_step", "steps")
OWN_SWEEPS = ("decode_sizes", "layer_sizes")  # every size of the measured model's launches
ALONE = "corun"  # whose sides were timed alone, too, on sets that no other sweep has
LINEAR = ("embedding", "norm", "gemm", "rope", "kv_write", "activation")  # by the rows of a pass
ARRAYS = ("sms", "seconds", "host_s", "summed_s", "linear_s")
KINDS = ("prefill_layer", "prefill_step", "mixed_layer", "mixed_step", "decode_layer", "decode_step")


@dataclass(frozen=True)
class Steps:
    """Measured layers and steps. `summed_s`: what their operators alone add up to; `linear_s`: linear layers and what
    goes with their rows, of that."""

    kind: tuple[str, ...]
    launch: tuple[Launch, ...]
    attention: tuple[str, ...]
    mode: tuple[str, ...]  # graph, eager
    sms: Floats
    seconds: Floats
    host_s: Floats
    summed_s: Floats
    linear_s: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, mask: Any) -> Steps:
        """The steps of a mask."""

        def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(v for v, kept in zip(values, mask, strict=True) if kept)

        arrays = {name: getattr(self, name)[mask] for name in ARRAYS}
        return Steps(of(self.kind), of(self.launch), of(self.attention), of(self.mode), **arrays)

    @property
    def tokens(self) -> Floats:
        """Rows of the linear layers."""
        return np.array([float(one.tokens) for one in self.launch])

    @property
    def decoding(self) -> Any:
        """Mask of the decode-only ones."""
        return np.array([not one.chunks for one in self.launch], dtype=bool)


def both(first: Steps, second: Steps) -> Steps:
    """The steps of both, in order."""
    arrays = {n: np.concatenate([getattr(first, n), getattr(second, n)]) for n in ARRAYS}
    texts = {n: getattr(first, n) + getattr(second, n) for n in ("kind", "launch", "attention", "mode")}
    return Steps(**texts, **arrays)


def launch_of(row: Mapping[str, Any], layers: int, prefix: str = "") -> Launch:
    """The launch of a row: its chunks and decodes, and its range of layers (bare layers come without head)."""
    chunks = tuple(
        zip(numbers(row.get(f"{prefix}q_tokens")), numbers(row.get(f"{prefix}history_tokens")), strict=True)
    )
    batch, total, most = (
        _whole(row, f"{prefix}{name}") for name in ("decode_batch", "context_sum", "context_max")
    )
    if len(contexts := numbers(row.get("decode_contexts") if not prefix else None)) > 1:
        most = round(effective_longest(contexts))
    bare = str(row[f"{prefix}kind"]).endswith("_layer")
    count = _whole(row, "layers") if not prefix else 1
    # layers in the middle of the model: neither embedding nor head
    span = (1, 1 + min(max(count, 1), layers - 2)) if bare else None
    return Launch(chunks, batch, total, most, span)


def _whole(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    return 0 if value is None or (isinstance(value, float) and np.isnan(value)) else int(value)


def read_steps(run: Path, costs: Mapping[str, ProfiledCost], sweeps: tuple[str, ...] = SWEEPS) -> Steps:
    """Steps of a run that ran alone; `costs`: by back end of prefill attention, "" for any other.

    Of co-runs the solo times of both sides.
    """
    parts = [alone_rows(run) if sweep == ALONE else read_rows(run, sweep) for sweep in sweeps]
    rows = pd.concat([part for part in parts if len(part)]) if any(len(p) for p in parts) else pd.DataFrame()
    if len(rows):
        rows = rows[rows["kind"].isin(KINDS)]
        if "neighbour_kind" in rows.columns:
            rows = rows[rows["neighbour_kind"].isna()]
    return steps_of(rows.reset_index(drop=True), costs)


def alone_rows(run: Path) -> pd.DataFrame:
    """Solo times of the sides of co-runs, the median of the blocks that timed the same."""
    rows = read_rows(run, ALONE)
    if not len(rows):
        return rows
    same = ["model", "kind", "attention", "q_tokens", "history_tokens", "layers", "sms"]
    same += ["decode_batch", "context_sum", "context_max"]
    alone = rows.groupby(same, dropna=False, sort=False)["alone_s"].median().reset_index()
    return alone.rename(columns={"alone_s": "time_s"}).assign(launch="graph")


def steps_of(rows: pd.DataFrame, costs: Mapping[str, ProfiledCost]) -> Steps:
    """The rows as steps, each with the sum of its operators on its SMs."""
    records = rows.to_dict("records")
    launches, summed, linear = [], [], []
    for row in records:
        cost = costs.get(str(row.get("attention")), costs[""])
        launch = launch_of(row, cost.model.layers)
        launches.append(launch)
        found = cost.solo(launch, int(row["sms"]))
        summed.append(found.gpu_s)
        linear.append(sum(p.seconds for p in found.by_operator if p.name.split("/")[0] in LINEAR))
    return Steps(
        tuple(str(row["kind"]) for row in records),
        tuple(launches),
        tuple(str(row.get("attention", "")) for row in records),
        tuple(str(row.get("launch", "graph")) for row in records),
        column(rows, "sms"),
        column(rows, "time_s"),
        column(rows, "host_s"),
        np.array(summed),
        np.array(linear),
    )

"""Measured co-runs of a prefill layer and a decode step as arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calib.fit.points import Floats, Mask, column, numbers, read_rows
from sim.cost import load_cost
from sim.cost.gpu import GpuSpec
from sim.cost.loads import Loads, launch_loads
from sim.cost.shapes import Launch
from sim.cost.warming import Warming
from sim.errors import SimctlError

Texts = NDArray[np.str_]


@dataclass(frozen=True)
class Corun:
    """Co-runs, one array element each. `prefill` and `decode` carry the measured solo seconds on the same SMs;
    `slow`, shape (n, 2): time beside the other over time alone, of prefill and decode."""

    prefill: Loads
    decode: Loads
    prefill_sms: Floats
    decode_sms: Floats
    mode: Texts
    priority: Texts
    slow: Floats

    def __len__(self) -> int:
        return len(self.slow)

    def take(self, kept: Mask) -> Corun:
        """The co-runs of a mask."""
        return Corun(
            self.prefill.take(kept),
            self.decode.take(kept),
            *(x[kept] for x in (self.prefill_sms, self.decode_sms, self.mode, self.priority, self.slow)),
        )

    @property
    def sms(self) -> tuple[Floats, Floats]:
        """SMs of prefill and decode."""
        return self.prefill_sms, self.decode_sms

    @property
    def overlap(self) -> Floats:
        """SMs that both may use."""
        return np.maximum(0.0, self.prefill_sms + self.decode_sms - self.prefill.gpu.sms)

    @property
    def regime(self) -> Texts:
        """Entry of `REGIMES`: half and whole are amounts of overlap."""
        return np.where(np.isin(self.mode, ("half", "whole")), "overlapped", self.mode)


def read_corun(folder: Path, gpu: GpuSpec, sweep: str = "corun", warming: Warming | None = None) -> Corun:
    """Co-runs of a run's or profile's folder; SimctlError if there are none.

    A layer alone on the whole GPU was timed at the top clock, and prices are those of the settled one, which a co-run
    has as well: with `warming` slowdowns are against the latter.
    """
    rows = read_rows(folder, sweep)
    if not len(rows):
        raise SimctlError(f"{folder}: no co-runs in measurements/{sweep}.csv.gz.")
    both = (("prefill_layer", "decode_step"), ("decode_step", "prefill_layer"))
    first, second = (
        rows[(rows["kind"] == kind) & (rows["neighbour_kind"] == other)].set_index("point")
        for kind, other in both
    )
    points = first.index.intersection(second.index, sort=False)
    if not len(points):
        raise SimctlError(f"{folder}: no prefill layer was measured beside a decode step in '{sweep}'.")
    return _corun(first.loc[points], second.loc[points], gpu, warming)


def _corun(first: pd.DataFrame, second: pd.DataFrame, gpu: GpuSpec, warming: Warming | None) -> Corun:
    alone = [column(side, "alone_s") for side in (first, second)]
    if warming is not None:
        tokens = np.array([float(sum(numbers(q))) for q in first["q_tokens"]])
        alone[0] = np.where(column(first, "sms") == gpu.sms, alone[0] * warming.settled(tokens), alone[0])
    # means, since rates are what is wanted: where two kernels lock into two patterns, the median is one of them
    slow = np.stack(
        [
            column(side, "mean_s" if "mean_s" in side.columns else "time_s") / solo
            for side, solo in zip((first, second), alone, strict=True)
        ],
        axis=1,
    )
    # solo times are those measured in the same block; bytes and FLOPs are counted as the cost model does
    loads = row_loads(first, gpu), row_loads(second, gpu)
    return Corun(
        replace(loads[0], seconds=alone[0]),
        replace(loads[1], seconds=alone[1]),
        column(first, "sms"),
        column(second, "sms"),
        first["neighbour_mode"].to_numpy(dtype=str),
        second["priority"].to_numpy(dtype=str),
        slow,
    )


def row_loads(rows: pd.DataFrame, gpu: GpuSpec) -> Loads:
    """Bytes, FLOPs and sizes of measured prefill layers or decode steps, seconds by the spec profile."""
    cost = load_cost(str(rows["model"].iloc[0]), gpu.name, profile="spec")
    launches = []
    for row in rows.to_dict("records"):
        if row["kind"] == "prefill_layer":
            chunks = tuple(zip(numbers(row["q_tokens"]), numbers(row["history_tokens"]), strict=True))
            # layers that have neither embedding nor LM head
            launches.append(Launch(chunks=chunks, layers=(1, 1 + int(row["layers"]))))
        else:
            sizes = (int(row["decode_batch"]), int(row["context_sum"]), int(row["context_max"]))
            launches.append(Launch((), *sizes, graph=True))
    return launch_loads(cost, launches, gpu.sms)


def groups(corun: Corun) -> list[tuple[str, str]]:
    """(regime, priority) of the co-runs, most frequent first."""
    found, counts = np.unique(np.stack([corun.regime, corun.priority]), axis=1, return_counts=True)
    return [(str(found[0, i]), str(found[1, i])) for i in np.argsort(-counts, kind="stable")]


def coverage_of(corun: Corun) -> str:
    """What was measured, as a sentence."""
    p, d = corun.prefill, corun.decode
    ranges = [
        f"{name} {_number(values.min())}-{_number(values.max())}"
        for name, values in (
            ("prefill SMs", corun.prefill_sms),
            ("new tokens", p.q),
            ("history", p.h),
            ("batch", d.batch),
            ("mean context", d.context),
        )
    ]
    return f"{len(corun)} co-runs: {', '.join(ranges)}"


def _number(value: float) -> str:
    return f"{value:.0f}"

"""What NCCL's kernels hold of a GPU, and what collectives and compute do to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from calib.fit.folds import errors

COMPUTE = {
    "gemm": "gemm",
    "prefill_attention": "prefill_attention",
    "decode_attention": "decode_attention",
    "stream_read": "elementwise",
}
GIVEN_BYTES = 2 << 20  # messages from this size on say what a stream with few SMs costs


def ctas(grid: str) -> int:
    """CTAs of a grid written as 24x1x1."""
    return int(np.prod([int(part) for part in str(grid).split("x") if part]))


def held_sms(name: str, held: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """SMs that NCCL's kernel holds: its CTAs, one an SM, by message size."""
    if "collective_kernels" not in held:
        return {}
    rows = held["collective_kernels"]
    rows = rows[(rows.kind == name) & rows.max_ctas.isna() & rows.kernel.str.contains("nccl", case=False)]
    if rows.empty:
        return {}
    found = rows.assign(ctas=rows.grid.map(ctas)).groupby("message_bytes").ctas.max()
    steps = [[int(size), int(count)] for size, count in found.items()]
    return {
        "sms": int(np.median(found)),
        "sms_by_bytes": [s for i, s in enumerate(steps) if not i or s[1] != steps[i - 1][1]],
    }


def sms_given(held: Mapping[str, pd.DataFrame], knots: pd.Series, gpus: int, whole: int) -> list[list[float]]:
    """(SMs that the stream owns, factor on the seconds), the whole GPU last."""
    if "collective_limits" not in held:
        return []
    rows = held["collective_limits"]
    rows = rows[rows.sms.notna() & (rows.gpus == gpus) & (rows.message_bytes >= GIVEN_BYTES)]
    unlimited = knots.reindex(rows.message_bytes).to_numpy()
    rows = rows.assign(factor=rows.time_s.to_numpy() / unlimited)
    rows = rows[np.isfinite(rows.factor)]
    if rows.empty:
        return []
    factors = rows.groupby("sms").factor.median()
    return [[int(sms), round(float(factor), 4)] for sms, factor in factors.items()] + [[whole, 1.0]]


def slowed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with their `factor` on the time alone: of the mean, since iterations beside others come in two kinds, those
    that wait for SMs and those that have them, and only the mean says how much gets done."""
    return rows.assign(factor=rows.mean_s / rows.alone_s)


def beside(held: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Factors of a collective and of single operators beside each other."""
    if "collective_corun" not in held:
        return []
    rows = held["collective_corun"]
    few = set(rows.point[rows.max_ctas.notna()])
    rows = slowed(rows[~rows.point.isin(few)])
    mine = rows[rows.kind.isin(COMPUTE)]
    made = []
    keys = ["kind", "gpus", "neighbour_kind", "neighbour_message_bytes", "sms", "neighbour_mode"]
    for (kind, gpus, other, size, sms, mode), part in mine.groupby(keys):
        theirs = rows[
            (rows.kind == other)
            & (rows.neighbour_kind == kind)
            & (rows.message_bytes == size)
            & (rows.neighbour_sms == sms)
            & (rows.neighbour_mode == mode)
        ]
        if theirs.empty:
            continue
        factors = [max(1.0, float(one.factor.median())) for one in (theirs, part)]
        made.append(
            {
                "collective": other,
                "gpus": int(gpus),
                "bytes": int(size),
                "compute": COMPUTE[kind],
                "overlap": "shared" if mode == "streams" else "disjoint",
                "compute_sms": int(sms),
                "collective_factor": round(factors[0], 4),
                "compute_factor": round(factors[1], 4),
                "points": len(part),
                "spread": round(float(((part.p75_s - part.p25_s) / part.time_s).median()), 4),
            }
        )
    return made


def beside_elsewhere(made: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the factors on those of another run, of the compute and of the collective."""
    keys = ("collective", "gpus", "bytes", "compute", "overlap", "compute_sms")
    ours = {tuple(one[key] for key in keys): one for one in made}
    both = [(ours[key], one) for one in others if (key := tuple(one[key] for key in keys)) in ours]
    if not both:
        return {}
    return {
        side: errors(
            *(np.array([one[f"{side}_factor"] for one in column]) for column in zip(*both, strict=True))
        )
        for side in ("compute", "collective")
    }

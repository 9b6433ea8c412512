"""Host time of a bare serving loop, and board power, clock and energy of long runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.fit.points import column, read_rows
from sim.cost.gpu import GpuSpec

SETTLED_S = 2.0  # of a long run: NVML's power is a mean over about a second


def fit_host(run: Path, layers: int) -> dict[str, Any]:
    """Terms of `sim.cost.base.HostTerms` that the host sweep and the eager steps identify.

    The loop plans attention, replays or launches, and reads the tokens back. It has no scheduler: what an engine's
    own code adds is not in it.
    """
    rows = read_rows(run, "host")
    if not len(rows):
        return {}
    batch, seconds = column(rows, "decode_batch"), column(rows, "time_s")
    label = rows["label"].to_numpy()

    def at(name: str) -> tuple[Any, Any]:
        mine = label == name
        order = np.argsort(batch[mine])
        return batch[mine][order], seconds[mine][order]

    def middle(name: str) -> float:
        return float(np.median(at(name)[1])) if len(at(name)[1]) else 0.0

    sizes, plan = at("plan_decode")
    slope, base = np.polyfit(sizes, plan, 1) if len(sizes) > 1 else (0.0, middle("plan_decode"))
    found = {
        "graph_base_s": max(float(base), float(np.min(plan)) if len(plan) else 0.0) + middle("graph_replay"),
        "piecewise_base_s": middle("plan_prefill"),
        "piecewise_layer_s": middle("launch") + middle("graph_replay"),
        "per_sequence_s": max(0.0, float(slope)),
        "gap_graph_s": middle("read_tokens") + middle("launch"),
        "gap_eager_s": middle("read_tokens") + middle("launch"),
    }
    if (eager := eager_layer_s(run, layers)) is not None:
        found |= {"eager_base_s": middle("plan_prefill"), "eager_layer_s": eager}
    rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
    return {
        **rounded,
        "label": "fitted from the host sweep of a bare loop; an engine's scheduler is not in it",
    }


def eager_layer_s(run: Path, layers: int) -> float | None:
    """Seconds a layer that the host needs to launch it: from the steps during which the GPU waits for the host."""
    rows = read_rows(run, "steps")
    if not len(rows) or "host_s" not in rows.columns:
        return None
    eager = rows[rows["launch"] == "eager"]
    # where the launch queue fills up, the host waits for the GPU: the quickest steps are the host's own pace
    host = np.sort(column(eager, "host_s"))
    return float(np.median(host[: max(3, len(host) // 10)]) / layers) if len(host) else None


def hot_runs(run: Path) -> list[dict[str, Any]]:
    """Long runs once settled: kind, tokens, time, clock, power, work; and the first sample of each beside it."""
    rows = read_rows(run, "hot")
    found = []
    if not len(rows):
        return found
    for _, part in rows.groupby("point", sort=False):
        settled = part[column(part, "elapsed_s") >= SETTLED_S]
        if len(settled) < 3:
            continue
        first = part.iloc[0]
        found.append(
            {
                "kind": str(first["kind"]),
                "tokens": int(first["m"]),
                "decode_batch": _number(first, "decode_batch"),
                "context_mean": _number(first, "context_mean"),
                "seconds": float(f"{settled['time_s'].median():.5g}"),
                "first_seconds": float(f"{first['time_s']:.5g}"),
                "sm_mhz": float(round(settled["sm_mhz"].mean())),
                "power_w": float(round(settled["power_w"].mean(), 1)),
                "spread": float(f"{settled['time_s'].std() / settled['time_s'].median():.3g}"),
                "samples": len(settled),
                "flops": float(first["flops"]),
                "bytes": float(first["bytes"]),
                "settle_s": settle_s(part),
            }
        )
    return found


def power_runs(run: Path) -> list[dict[str, Any]]:
    """Whole steps of the power sweep, held for a second or two: time, watts by the energy counter, work."""
    rows = read_rows(run, "power")
    if not len(rows) or "energy_j" not in rows.columns:
        return []
    kept = rows[rows["energy_j"].notna() & rows["kind"].str.endswith("_step")]
    return [
        {"seconds": one.time_s, "power_w": one.power_w, "flops": one.flops, "bytes": one.bytes}
        for one in kept.itertuples()
    ]


def _number(row: pd.Series, name: str) -> int:
    value = row.get(name)
    return 0 if value is None or pd.isna(value) else int(value)


def settle_s(part: pd.DataFrame) -> float:
    """Seconds from the start until the clock is within 2 % of its settled mean for good (sample resolution)."""
    clock, at = column(part, "sm_mhz"), column(part, "elapsed_s")
    goal = float(np.mean(clock[at >= SETTLED_S]))
    away = np.abs(clock / goal - 1.0) > 0.02
    last = int(np.max(np.nonzero(away)[0])) if away[at < SETTLED_S].any() else -1
    return float(round(at[min(last + 1, len(at) - 1)], 2)) if last >= 0 and at[last] < SETTLED_S else 0.0


def fit_energy(hot: list[dict[str, Any]], gpu: GpuSpec) -> dict[str, Any]:
    """Joules per FLOP and per byte above idle power (the data table's), from settled long runs; at least two."""
    if len(hot) < 2:
        return {}
    work = np.array([[one["flops"] / one["seconds"], one["bytes"] / one["seconds"]] for one in hot])
    watts = np.array([one["power_w"] for one in hot]) - gpu.idle_w
    scale = work.max(axis=0)
    best, least = np.zeros(2), np.inf
    # two non-negative coefficients: both free, or one of them zero
    for used in ([0, 1], [0], [1]):
        a = work[:, used] / scale[used]
        solved, *_ = np.linalg.lstsq(a, watts, rcond=None)
        loss = float(np.sum((a @ solved - watts) ** 2))
        if (solved >= 0).all() and loss < least - 1e-9:
            least, best = loss, np.zeros(2)
            best[used] = solved / scale[used]
    error = np.abs(work @ best / watts - 1.0)
    return {
        "j_per_flop": float(f"{best[0]:.5g}"),
        "j_per_byte": float(f"{best[1]:.5g}"),
        "label": f"fitted from {len(hot)} long runs, largest error {100 * error.max():.0f} % above idle",
    }

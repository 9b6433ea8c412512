"""Measured times of messages as knots, and how far off they are on sizes that they do not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.collectives.sizes import COLLECTIVES
from calib.fit.folds import errors
from calib.rows import read_table
from sim.cost.collectives import Knots

LARGE_BYTES = 64 << 10  # above it the rate counts more than the latency
RANDOM = "random sizes"
ABOVE, DEVICE_BOUND = "random sizes above 64 KiB", "random sizes that wait for the GPUs"
EVERY_OTHER = "every other size"


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Timed rows (and rows of kernels) of the sweeps of several GPUs in `folder/measurements`, by sweep."""
    found = {}
    others = ("kv_transfer", "collective_limits", "collective_corun", "kv_corun", "tp_steps")
    for name in (*COLLECTIVES, *others):
        table = _table(folder, name)
        if "time_s" in table:
            found[name] = table[table.time_s.notna()].reset_index(drop=True)
    kernels = _table(folder, "collective_kernels")
    if "grid" in kernels:
        found["collective_kernels"] = kernels[kernels.grid.notna()].reset_index(drop=True)
    return found


def _table(folder: Path, name: str) -> pd.DataFrame:
    path = folder / "measurements" / f"{name}.csv.gz"
    if not path.is_file():
        return pd.DataFrame()
    table = read_table(path)
    for column in ("max_ctas", "sms", "piece_bytes", "host_s", "layers", "gpus", "allreduces"):
        if column not in table:
            table[column] = np.nan
    return table


def curve_of(knots: pd.Series) -> Knots:
    """Seconds by bytes as the simulator reads them."""
    return Knots(tuple(map(float, knots.index)), tuple(map(float, knots)))


def fitted(knots: pd.Series, others: pd.DataFrame, captured: bool = True) -> dict[str, Any]:
    """Knots, standard error and held-out errors; `errors` also of large messages only, and of eager calls (not
    `captured`) that wait for the GPUs rather than for the host."""
    curve = curve_of(knots)
    record: dict[str, Any] = {}
    if len(others):
        predicted = curve.at(others.message_bytes.to_numpy())
        record[RANDOM] = errors(predicted, others.time_s.to_numpy())
        large = others.message_bytes.to_numpy() > LARGE_BYTES
        waits = predicted > 1.01 * knots.min()
        for name, mask in (
            (ABOVE, large),
            (DEVICE_BOUND, waits if not captured else np.zeros(0, dtype=bool)),
        ):
            if mask.any():
                record[name] = errors(predicted[mask], others.time_s.to_numpy()[mask])
    skipped = _every_other(knots) if captured else {}
    if skipped:
        record[EVERY_OTHER] = skipped
    main = record.get(RANDOM) or record.get(EVERY_OTHER) or {}
    return {
        "points": [[int(size), float(f"{seconds:.5g}")] for size, seconds in knots.items()],
        "sd": round(max(0.005, 1.4826 * float(main.get("median", 0.0))), 4),
        "measured_points": int(len(knots) + len(others)),
        "held_out": {
            "points": int(main.get("points", 0)),
            **{key: main[key] for key in ("median", "p95", "bias") if key in main},
        },
        "errors": record,
    }


def _every_other(knots: pd.Series) -> dict[str, Any]:
    """Errors at every second size, read from the others."""
    kept, left = knots.iloc[::2], knots.iloc[1::2]
    left = left[left.index <= kept.index.max()]
    if len(kept) < 2 or left.empty:
        return {}
    return errors(curve_of(kept).at(left.index.to_numpy(float)), left.to_numpy())


def elsewhere(knots: pd.Series, rows: pd.DataFrame, run: str) -> dict[str, Any]:
    """Errors on everything that another run measured."""
    if rows.empty:
        return {}
    size, seconds = rows.message_bytes.to_numpy(float), rows.time_s.to_numpy(float)
    predicted, large = curve_of(knots).at(size), size > LARGE_BYTES
    found = {f"run {run}": errors(predicted, seconds)}
    if large.any():
        found[f"run {run}, above 64 KiB"] = errors(predicted[large], seconds[large])
    return found

"""What a run with pools adds to its summary: each pool, the links, and what handing over took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sim.engine.records import RunRecords
from sim.metrics.definitions import statistics
from sim.metrics.utilisation import figures_of, parts_of
from sim.metrics.window import requests_in

SHOWN = ("busy_pct", "sm_active_pct", "sm_time_pct", "kv_util_pct", "energy_j", "mean_power_w", "iterations")


def pool_figures(records: RunRecords, cost: Any, pool_costs: Mapping[str, Any]) -> dict[str, Any]:
    """`{mean,median,p99}_transfer_ms` and `_pull_wait_ms` over the window's requests (as `RunRecords.requests` has
    them; None without pools); with pools `pools` (a row each) and `link`."""
    window = requests_in(records)
    made: dict[str, Any] = {}
    for name in ("transfer", "pull_wait"):
        values = statistics(window[f"{name}_s"].to_numpy(np.float64)) if records.pools else {}
        for stat in ("mean", "median", "p99"):
            made[f"{stat}_{name}_ms"] = 1e3 * values[stat] if values else None
    if not records.pools:
        return made
    parts = parts_of(records, cost, pool_costs)
    made["pools"] = [
        {
            "name": pool.name,
            "gpu": pool.gpu,
            "replicas": pool.replicas,
            "tp": pool.tp,
            "num_gpus": pool.replicas * pool.tp,
            "kv_blocks": pool.num_blocks,
            **{key: value for key, value in figures_of(parts[pool.name]).items() if key in SHOWN},
        }
        for pool in records.pools
    ]
    return made | {"link": records.link}

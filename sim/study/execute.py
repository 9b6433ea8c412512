"""One run of a study, from its seed to its rows; needs nothing but the setting and the run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from sim.engine import RunRecords
from sim.engine.cluster import open_cluster
from sim.errors import SimctlError
from sim.metrics import summarise
from sim.metrics.conservation import check_conservation
from sim.metrics.definitions import Slo, latencies, verdicts
from sim.study.hardware import link_for, pools_for
from sim.study.plan import Run, Setting


@dataclass
class Outcome:
    """What one run leaves: its row of `summary.json`, a row a request, a row a launch if asked for.

    `timing`: `iterations`, `decisions`, `startup_s` (workload, price tables, machine code), `loop_s` (the
    simulation and its records).
    """

    index: int
    summary: dict[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame | None
    timing: dict[str, float]


def execute(setting: Setting, run: Run, record_steps: bool = False, compiled: bool = False) -> Outcome:
    """Simulate one run. Raises SimctlError, PlanError or StalledError with the run named in front."""
    e = setting.experiment
    began = perf_counter()
    cost = setting.cost()
    workload = setting.workload(run.request_rate, run.seed)
    # an object is copied, so that what it remembers of one run does not reach the next
    policy = setting.policy(run.policy) if isinstance(run.policy, str | Mapping) else deepcopy(run.policy)
    pools = pools_for(e, policy)
    cluster = open_cluster(
        workload,
        policy,
        cost,
        replicas=e.replicas,
        router=e.router,
        gpu_memory_utilization=e.memory.gpu_memory_utilization,
        num_gpu_blocks=e.memory.num_gpu_blocks,
        block_size=e.memory.block_size,
        seed=run.seed,
        jitter=e.jitter,
        warmup_s=e.measure.warmup_s,
        horizon_s=e.measure.horizon_s,
        drain=e.measure.drain,
        record_steps=record_steps,
        estimator=e.belief(),
        mechanism=e.mechanism,
        contention=e.contention,
        targets=setting.targets(workload.slo_classes),
        compiled=compiled,
        pools=pools,
        link=link_for(e, pools),
    )
    ready = perf_counter()
    records = cluster.close(cluster.run())
    del cluster  # its state is as large as the records
    done = perf_counter()
    check_conservation(records)
    flagged = int(records.totals["flagged"])
    if e.strict and flagged:
        raise SimctlError(
            f"strict: {flagged} steps of {title(run)} lie outside what the profile covers; "
            "use another profile, or `strict: false` to flag them"
        )
    slo = setting.slo()
    summary = summarise(
        records,
        slo=slo,
        cost=cost,
        pool_costs={pool.name: pool.cost for pool in pools or []},
        policy_label=run.label,
        request_rate=run.request_rate,
        seed=run.seed,
        num_gpus=setting.num_gpus(policy),
        closed_loop=workload.max_concurrency is not None,
        rejected_overlength=workload.rejected_overlength,
    )
    if run.rate_per_gpu is not None:
        summary["request_rate_per_gpu"] = run.rate_per_gpu
    summary["notes"] = [*workload.notes, *summary["notes"]]
    timing = {
        "iterations": int(records.totals["iterations"]),
        "decisions": int(records.totals["decisions"]),
        "startup_s": ready - began,
        "loop_s": done - ready,
    }
    steps = None if records.steps is None else _led_by(run, records.steps)
    table = request_table(records, slo, run, e.measure.request_rows)
    if len(table) < len(records.requests):
        summary["notes"].append(
            f"requests.parquet holds {len(table):,} of {len(records.requests):,} requests"
        )
    return Outcome(run.index, {"run": run.index, **summary}, table, steps, timing)


def request_table(records: RunRecords, slo: Slo, run: Run, rows: int | None = None) -> pd.DataFrame:
    """A row a request: the records, its latencies in ms, `in_window`, and `good` (met every SLO limit).

    With `rows`, that many requests, evenly spaced in the workload.
    """
    requests = records.requests
    if rows is not None and rows < len(requests):
        requests = requests.iloc[np.arange(rows) * len(requests) // max(1, rows)].reset_index(drop=True)
    values = latencies(requests)
    start, end = records.window_s
    table = requests.assign(
        ttft_ms=1e3 * values["ttft_s"],
        tpot_ms=1e3 * values["tpot_s"],
        e2el_ms=1e3 * values["e2el_s"],
        max_itl_ms=1e3 * requests["max_itl_s"],
        in_window=requests["arrival_s"].between(start, end),
    )
    met = verdicts(requests, values, slo)
    if met:
        table["good"] = met["all"]
    return _led_by(run, table)


def title(run: Run) -> str:
    """A run in words, for messages."""
    rate = "" if run.request_rate is None else f" at {run.request_rate:g} req/s"
    return f"{run.label}{rate}, seed {run.seed}"


def _led_by(run: Run, table: pd.DataFrame) -> pd.DataFrame:
    rate = np.nan if run.request_rate is None else run.request_rate
    lead: dict[str, Any] = {
        "run": run.index,
        "policy": run.label,
        "request_rate": float(rate),
        "seed": run.seed,
    }
    for at, (name, value) in enumerate(lead.items()):
        table.insert(at, name, value)
    return table

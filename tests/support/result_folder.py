"""Small result folders from real runs of the engine, for tests of what is drawn from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from stub_cost import real_cost

from sim.engine import RunRecords, simulate
from sim.metrics import Slo, summarise
from sim.policies import make_policy
from sim.workload.build import build_workload

SLO = Slo(ttft_ms=1000, tpot_ms=30, attainment=0.9)


def run_once(
    policy: str,
    rate: float | None,
    *,
    seed: int = 0,
    requests: int = 60,
    slo: Slo = SLO,
    **options: Any,
) -> tuple[dict[str, Any], RunRecords]:
    """Summary and records of the bundled sample under a policy; with classes in `slo`, requests take turns."""
    spec = {"trace": "sample-conv", "max_requests": requests}
    load = build_workload(spec, seed=seed, request_rate=rate, context_limit=None, base_dirs=[])
    records = simulate(load, make_policy(policy), real_cost(), seed=seed, **options)
    records = replace(records, notes=list(load.notes))
    if slo.classes:
        names = [*slo.classes] * len(records.requests)
        records.requests["slo_class"] = names[: len(records.requests)]
    row = summarise(records, slo=slo, cost=real_cost(), policy_label=policy, request_rate=rate, seed=seed)
    return row, records


def write_folder(
    folder: Path,
    policies: list[str],
    rates: list[float | None],
    *,
    seeds: tuple[int, ...] = (0,),
    slo: Slo = SLO,
    **options: Any,
) -> Path:
    """Run every policy at every rate and write the files that reports read."""
    runs, frames = [], []
    for policy in policies:
        for rate in rates:
            for seed in seeds:
                row, records = run_once(policy, rate, seed=seed, slo=slo, **options)
                runs.append(row)
                frame = records.requests.copy()
                frame.insert(0, "policy", policy)
                frame.insert(1, "request_rate", float("nan") if rate is None else rate)
                frame.insert(2, "seed", seed)
                frames.append(frame)
    classes = {name: limits.limits() for name, limits in slo.classes.items()}
    experiment = {
        "name": "sample-on-h200",
        "workload": {"trace": "sample-conv", "max_requests": options.get("requests", 60)},
        "model": "llama-3.1-8b",
        "gpu": "h200-sxm",
        "profile": "auto",
        "policies": policies,
        "slo": slo.limits() | {"attainment": slo.attainment} | ({"classes": classes} if classes else {}),
        "resolved": {
            "versions": {"lanesim": "0.1.0"},
            "profile_sha256": "ab" * 32,
            "trace_sha256": "cd" * 32,
        },
    }
    if rates != [None]:
        experiment["sweep"] = {"request_rate": rates}
    cost = real_cost()
    profile = {"name": cost.profile.name, "sha256": cost.profile_hash, "provenance": dict(cost.provenance())}
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"schema_version": 1, "experiment": experiment, "profile": profile, "runs": runs}
    (folder / "summary.json").write_text(json.dumps(summary, allow_nan=False))
    pd.concat(frames, ignore_index=True).to_parquet(folder / "requests.parquet")
    return folder

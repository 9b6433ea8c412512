"""Run cases on the GPU, one after the other, each written as soon as it is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from calib.executor.dry import DryDevice
from calib.executor.serve import Trail, serve
from calib.validate.bench import Bench
from calib.validate.cases import Case, workload_of
from calib.validate.files import finished, write_case
from sim.engine.cluster import open_cluster
from sim.engine.deploying import largest_step
from sim.metrics import summarise
from sim.policies import make_policy
from sim.study.plan import Setting
from sim.workload.workload import Workload

WARM_REQUESTS = 24
MARGIN_S = 15.0  # a case is not begun with less time left than its span and this


def open_for(setting: Setting, entry: Any, workload: Workload, num_blocks: int) -> tuple[Any, Any, Any]:
    """(cluster, policy, cost): one replica with exactly `num_blocks` KV blocks, ready to be driven by hand."""
    e, cost, policy = setting.experiment, setting.cost(), make_policy(entry)
    cluster = open_cluster(
        workload,
        policy,
        cost,
        num_gpu_blocks=num_blocks,
        block_size=16,
        seed=e.seed,
        jitter=False,
        bursts=False,
        estimator=e.estimator if isinstance(e.estimator, str) else e.estimator.model_dump(),
        mechanism=e.mechanism,
        targets=setting.targets(workload.slo_classes),
    )
    return cluster, policy, cost


def dry_run(setting: Setting, entry: Any, workload: Workload, num_blocks: int) -> Trail:
    """What the price tables expect the device to be asked for."""
    cluster, policy, _ = open_for(setting, entry, workload, num_blocks)
    return serve(cluster.replicas[0], DryDevice(), policy.lanes, workload.arrival_s)


def measure(
    setting: Setting,
    cases: Sequence[Case],
    folder: Path,
    bench: Bench,
    time_limit_s: float,
    say: Callable[[str], None],
) -> int:
    """Measure what `folder` does not hold yet, as far as the time goes; returns the number of cases still to do."""
    began = time.monotonic()
    done = set(finished(folder))
    todo = [case for case in cases if case.name not in done]
    for n, case in enumerate(todo):
        workload = workload_of(setting, case)
        span = float(workload.arrival_s[-1])
        if time.monotonic() - began + span + MARGIN_S > time_limit_s:
            return len(todo) - n
        facts, steps, requests = run_case(setting, case, workload, bench)
        write_case(folder, case.name, facts, steps, requests)
        say(f"{case.name}: {len(steps)} launches in {steps['end_s'].max():.1f} s")
    return 0


def run_case(
    setting: Setting, case: Case, workload: Workload, bench: Bench
) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """(facts, a row a launch, a row a request) of one run on the bench."""
    blocks = bench.num_blocks
    expected = dry_run(setting, case.entry, workload, blocks)
    cluster, policy, cost = open_for(setting, case.entry, workload, blocks)
    tokens, seqs = largest_step(policy, cluster.groups[0].deployment)
    device = bench.device(policy.lanes, tokens, seqs)
    captured = device.prepare(expected.works)
    _warm(setting, case, device, blocks)
    energy_j = bench.energy_j()
    trail = serve(cluster.replicas[0], device, policy.lanes, workload.arrival_s)
    energy_j = bench.energy_j() - energy_j
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    summary = summarise(
        records,
        slo=setting.slo(),
        cost=cost,
        policy_label=case.policy,
        request_rate=case.rate,
        seed=case.seed,
    )
    facts = {
        **_facts(case),
        **bench.facts(),
        **captured,
        "num_gpu_blocks": blocks,
        "energy_j": energy_j if math.isfinite(energy_j) else None,
        "summary": summary,
    }
    return facts, pd.DataFrame(trail.rows), records.requests


def _warm(setting: Setting, case: Case, device: Any, num_blocks: int) -> None:
    """A few requests at once, so that lazily loaded kernels and a cold chip stay out of what is measured."""
    workload = setting.workload(1000.0, case.seed)
    first = {name: getattr(workload, name)[:WARM_REQUESTS] for name in _COLUMNS}
    few = Workload(name="warm-up", slo_classes=workload.slo_classes, **first)
    cluster, policy, _ = open_for(setting, case.entry, few, num_blocks)
    serve(cluster.replicas[0], device, policy.lanes, few.arrival_s)
    device.forget()


_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "max_new_tokens", "slo_class", "priority")


def _facts(case: Case) -> dict[str, Any]:
    return {
        "policy": case.policy,
        "entry": case.entry,
        "load": case.load,
        "mode": case.mode,
        "request_rate": case.rate,
        "repeat": case.repeat,
        "seed": case.seed,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }

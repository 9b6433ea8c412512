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
from sim.cost.profiled import ProfiledCost
from sim.engine.cluster import open_cluster
from sim.engine.deploying import largest_step
from sim.metrics import summarise
from sim.policies import make_policy
from sim.study.plan import Setting
from sim.workload.workload import Workload

WARM_REQUESTS = 24
MARGIN_S = 15.0  # a case is not begun with less time left than its span and this
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "max_new_tokens", "slo_class", "priority")


class Session:
    """Cases of one experiment on one bench; `cost` prices what policies believe and what graphs will be needed."""

    def __init__(self, setting: Setting, cost: ProfiledCost, bench: Bench) -> None:
        self._setting, self._cost, self._bench = setting, cost, bench
        self._policy = ""  # whose graphs the device holds
        self._device: Any = None
        self._captured: dict[str, Any] = {}

    def open(self, entry: Any, workload: Workload) -> tuple[Any, Any]:
        """(cluster, policy): one replica with exactly the bench's KV blocks, ready to be driven by hand."""
        e, policy = self._setting.experiment, make_policy(entry)
        cluster = open_cluster(
            workload,
            policy,
            self._cost,
            num_gpu_blocks=self._bench.num_blocks,
            block_size=16,
            seed=e.seed,
            jitter=False,
            bursts=False,
            estimator=e.belief(),
            mechanism=e.mechanism,
            targets=self._setting.targets(workload.slo_classes),
        )
        return cluster, policy

    def dry_run(self, entry: Any, workload: Workload) -> Trail:
        """What the price tables expect the device to be asked for."""
        cluster, policy = self.open(entry, workload)
        return serve(cluster.replicas[0], DryDevice(), policy.lanes, workload.arrival_s)

    def prepare(self, cases: Sequence[Case]) -> None:
        """Make a device for the policy of `cases`, with the graphs of the heaviest of them, and warm it up."""
        heaviest = max(cases, key=lambda case: (case.rate, case.mode))
        workload = workload_of(self._setting, heaviest)
        expected = self.dry_run(heaviest.entry, workload)
        cluster, policy = self.open(heaviest.entry, workload)
        self._device = self._bench.device(policy.lanes, *largest_step(policy, cluster.groups[0].deployment))
        self._captured = self._device.prepare(expected.works)
        self._policy = heaviest.policy
        # a few requests at once, so that lazily loaded kernels and a cold chip stay out of what is measured
        crowd = self._setting.workload(1000.0, heaviest.seed)
        first = {name: getattr(crowd, name)[:WARM_REQUESTS] for name in COLUMNS}
        self._serve(heaviest.entry, Workload(name="warm-up", slo_classes=crowd.slo_classes, **first))

    def _serve(self, entry: Any, workload: Workload) -> tuple[Any, Trail]:
        cluster, policy = self.open(entry, workload)
        trail = serve(cluster.replicas[0], self._device, policy.lanes, workload.arrival_s)
        self._device.forget()
        return cluster, trail

    def run(self, case: Case) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
        """(facts, a row a launch, a row a request) of one case; its policy must be the prepared one."""
        assert case.policy == self._policy
        before_j = self._bench.energy_j()
        cluster, trail = self._serve(case.entry, workload_of(self._setting, case))
        spent_j = self._bench.energy_j() - before_j
        records = cluster.close(max(row["end_s"] for row in trail.rows))
        summary = summarise(
            records,
            slo=self._setting.slo(),
            cost=self._cost,
            policy_label=case.policy,
            request_rate=case.rate,
            seed=case.seed,
        )
        facts = {
            **_facts(case),
            **self._bench.facts(),
            **self._captured,
            "num_gpu_blocks": self._bench.num_blocks,
            "energy_j": spent_j if math.isfinite(spent_j) else None,
            "summary": summary,
        }
        return facts, pd.DataFrame(trail.rows), records.requests


def measure(
    setting: Setting,
    cost: ProfiledCost,
    cases: Sequence[Case],
    folder: Path,
    bench: Bench,
    time_limit_s: float,
    say: Callable[[str], None],
) -> int:
    """Measure what `folder` does not hold yet, as far as the time goes; returns the number of cases still to do.

    All policies once before any is repeated, so that a run that is cut short has something of each.
    """
    began = time.monotonic()
    done = set(finished(folder))
    todo = [case for case in cases if case.name not in done]
    session, left = Session(setting, cost, bench), len(todo)
    rounds = dict.fromkeys((case.repeat, case.policy) for case in sorted(todo, key=lambda case: case.repeat))
    for repeat, policy in rounds:
        mine = [case for case in todo if (case.repeat, case.policy) == (repeat, policy)]
        for n, case in enumerate(mine):
            span_s = float(workload_of(setting, case).arrival_s[-1])
            if time.monotonic() - began + span_s + MARGIN_S > time_limit_s:
                return left
            if n == 0:
                session.prepare(mine)
            facts, steps, requests = session.run(case)
            write_case(folder, case.name, facts, steps, requests)
            left -= 1
            say(f"{case.name}: {len(steps)} launches in {steps['end_s'].max():.1f} s")
    return left


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

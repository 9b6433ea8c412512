"""Run cases on the GPU, one after the other, each written as soon as it is done."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.executor.dry import DryDevice
from calib.executor.modes import fused_kernel
from calib.executor.serve import Trail, serve
from calib.validate.bench import Bench
from calib.validate.cases import Case, workload_of
from calib.validate.files import finished, write_case
from calib.validate.hosts import with_hosts
from sim.cost.profiled import ProfiledCost
from sim.engine.cluster import open_cluster
from sim.engine.deploying import largest_step
from sim.errors import SimctlError
from sim.metrics import summarise
from sim.policies import make_policy
from sim.study.plan import Setting
from sim.workload.workload import Workload

# requests, output tokens of each, prompt tokens in all
WARM_REQUESTS, WARM_TOKENS, WARM_PROMPTS = 24, 24, 40_000
WARM_FOR_S = 20.0  # a chip that has served until so lately is warm
MARGIN_S = 10.0  # a case is not begun with less time left than its span and this
# cases that ended in an error, and the one that runs: if the process dies it is skipped
BROKEN = "_broken.json"
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "max_new_tokens", "slo_class", "priority")


class Session:
    """Cases of one experiment on one bench; `cost` prices what policies believe and what graphs will be needed, with
    the host terms that lie in `folder`."""

    def __init__(
        self, setting: Setting, cost: ProfiledCost, bench: Bench, folder: Path, cases: Sequence[Case] = ()
    ) -> None:
        self._setting, self._cost, self._bench, self._folder = setting, cost, bench, folder
        self._cases = cases
        self._limits = (0, 0)  # rows and sequences of the largest step of any policy
        self._policy = ""  # whose graphs the device holds
        self._prepared: dict[str, dict[str, Any]] = {}
        self._device: Any = None
        self._served = -math.inf

    def open(self, entry: Any, workload: Workload) -> tuple[Any, Any]:
        """(cluster, policy): one replica with exactly the bench's KV blocks, ready to be driven by hand."""
        e, policy = self._setting.experiment, make_policy(entry)
        cluster = open_cluster(
            workload,
            policy,
            with_hosts(self._cost, self._folder, policy.lanes),
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

    def kernel(self, cluster: Any) -> str:
        """What runs the attention of mixed steps; SimctlError where the executor has no such kernel."""
        mode = self._cost.attention if cluster.attention is None else cluster.attention
        return fused_kernel(mode, self._cost.gpu.compute_capability)

    def dry_run(self, entry: Any, workload: Workload) -> Trail:
        """What the price tables expect the device to be asked for."""
        cluster, policy = self.open(entry, workload)
        return serve(cluster.replicas[0], DryDevice(), policy.lanes, workload.arrival_s)

    def prepare(self, policy: str) -> None:
        """Make the device ready for a policy, with the graphs of all its cases, and warm it up."""
        mine = [case for case in self._cases if case.policy == policy]
        entry, crowd = mine[0].entry, self._crowd(mine[0])
        cluster, made = self.open(entry, crowd)
        if self._limits == (0, 0):
            self._limits = self._largest(crowd)
        self._device = self._bench.device(made.lanes, *self._limits, self.kernel(cluster))
        if policy not in self._prepared:
            loads = {(case.rate, case.mode): case for case in mine}
            works = [
                work
                for case in loads.values()
                for work in self.dry_run(entry, workload_of(self._setting, case)).works
            ]
            deployment = cluster.groups[0].deployment
            pairs = made.sm_sets(deployment) if made.lanes == 2 and hasattr(made, "sm_sets") else ()
            self._prepared[policy] = self._device.prepare(works, pairs)
        elif time.monotonic() - self._served < WARM_FOR_S:
            self._policy = policy
            return
        # a few requests at once, so that lazily loaded kernels and a cold chip stay out of what is measured
        with self._bench.quiet():
            self._serve(entry, crowd)
        self._policy = policy

    def _crowd(self, case: Case) -> Workload:
        crowd = self._setting.workload(1000.0, case.seed)
        most = max(4, int(np.searchsorted(np.cumsum(crowd.prompt_tokens), WARM_PROMPTS)))
        first = {name: getattr(crowd, name)[: min(WARM_REQUESTS, most)] for name in COLUMNS}
        for name in ("output_tokens", "max_new_tokens"):
            first[name] = np.minimum(first[name], WARM_TOKENS)
        return Workload(name="warm-up", slo_classes=crowd.slo_classes, **first)

    def _largest(self, crowd: Workload) -> tuple[int, int]:
        rows, sequences = 0, 0
        for entry in {case.policy: case.entry for case in self._cases}.values():
            cluster, policy = self.open(entry, crowd)
            step = largest_step(policy, cluster.groups[0].deployment)
            rows, sequences = max(rows, step[0]), max(sequences, step[1])
        return rows, sequences

    def _serve(self, entry: Any, workload: Workload) -> tuple[Any, Trail, float]:
        """(cluster, log, joules from the start of the clock to the last token)."""
        cluster, policy = self.open(entry, workload)
        before_j = self._bench.energy_j()
        try:
            trail = serve(cluster.replicas[0], self._device, policy.lanes, workload.arrival_s)
            spent_j = self._bench.energy_j() - before_j
        finally:
            self._device.forget()
            self._served = time.monotonic()
        return cluster, trail, spent_j

    def run(self, case: Case) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
        """(facts, a row a launch, a row a request) of one case."""
        if case.policy != self._policy:
            self.prepare(case.policy)
        workload = workload_of(self._setting, case)
        with self._bench.quiet():
            cluster, trail, spent_j = self._serve(case.entry, workload)
        end_s = max(row["end_s"] for row in trail.rows)
        records = cluster.close(end_s)
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
            **self._prepared.get(case.policy, {}),
            "num_gpu_blocks": self._bench.num_blocks,
            "energy_j": spent_j if math.isfinite(spent_j) else None,
            "energy_window_s": [0.0, end_s],
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
    """Measure what `folder` does not hold yet, in the order given, as far as the time goes; returns the number of cases
    still to do. A case that fails is told, noted in the folder and left out from then on, as is one during which the
    process died."""
    began = time.monotonic()
    broken = broken_cases(folder)
    done = {*finished(folder), *broken}
    todo = [case for case in cases if case.name not in done]
    session = Session(setting, cost, bench, folder, todo)
    for n, case in enumerate(todo):
        span_s = float(workload_of(setting, case).arrival_s[-1])
        if time.monotonic() - began + span_s + MARGIN_S > time_limit_s:
            return len(todo) - n
        _note(folder, {**broken, case.name: "the process ended while it ran"})
        try:
            facts, steps, requests = session.run(case)
        except Exception as error:
            broken[case.name] = f"{type(error).__name__}: {error}"
            _note(folder, broken)
            say(f"{case.name} failed: {broken[case.name]}")
            if not bench.healthy():
                raise SimctlError(
                    f"the GPU does not answer any more after {case.name}; go on with --resume, which leaves it out"
                ) from error
            continue
        except BaseException:  # interrupted from outside: it may run again
            _note(folder, broken)
            raise
        write_case(folder, case.name, facts, steps, requests)
        _note(folder, broken)
        say(
            f"{case.name}: {len(steps)} launches in {steps['end_s'].max():.1f} s, "
            f"{time.monotonic() - began:.0f} s in all"
        )
    return 0


def broken_cases(folder: Path) -> dict[str, str]:
    """Cases that ended in an error, and what it said."""
    path = folder / BROKEN
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _note(folder: Path, broken: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if broken:
        (folder / BROKEN).write_text(json.dumps(broken, indent=1) + "\n", encoding="utf-8")
    else:
        (folder / BROKEN).unlink(missing_ok=True)


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

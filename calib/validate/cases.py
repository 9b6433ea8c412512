"""What is run: policies x loads x repeats. A load is a fraction of the capacity that the simulator predicts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calib.validate.compare import as_run
from sim.cost.profiled import ProfiledCost
from sim.engine import simulate
from sim.errors import SimctlError
from sim.policies import make_policy
from sim.study.plan import Setting
from sim.workload.workload import Workload

FLAT, STEP = "open", "load_step"
CAPACITY_REQUESTS = 2000
# a load step: factor; start and length as shares of the span
STEP_FACTOR, STEP_AT, STEP_LASTS = 1.5, 0.3, 0.25


@dataclass(frozen=True)
class Case:
    """One run on the GPU. `rate` in requests/s; `mode`: `open` (steady) or `load_step`."""

    policy: str
    entry: Any
    load: float
    rate: float
    mode: str
    repeat: int
    seed: int

    @property
    def name(self) -> str:
        """File name of the case, and what tells it from the others."""
        policy = re.sub(r"[^a-z0-9.-]+", "-", self.policy.lower())
        return f"{policy}_{self.mode}_{self.load:g}_{self.repeat}"


def capacity(setting: Setting, entry: Any, seed: int, cost: ProfiledCost) -> float:
    """Requests per second that the simulated system completes while it has more than it can do, under the targets and
    on the SM sets that the policy will be run with.

    The experiment's workload, with at least 2000 requests where its trace has them, all offered at once within a
    second; counted between 20 and 80 % of the completions.
    """
    e = setting.experiment
    spec = e.workload.model_copy(update={"max_requests": CAPACITY_REQUESTS, "window_s": None})
    if e.workload.trace is None:
        spec = e.workload.model_copy(update={"num_prompts": CAPACITY_REQUESTS})
    crowded = Setting(e.model_copy(update={"workload": spec}), setting.base_dirs)
    workload = crowded.workload(float(CAPACITY_REQUESTS), seed)
    records = simulate(
        workload,
        make_policy(as_run(entry)),
        cost,
        seed=seed,
        jitter=False,
        estimator=e.belief(),
        mechanism=e.mechanism,
        targets=setting.targets(workload.slo_classes),
    )
    ends = np.sort(records.requests["finish_s"].dropna().to_numpy())
    low, high = int(0.2 * len(ends)), int(0.8 * len(ends))
    return float((high - low) / (ends[high] - ends[low]))


def expand(
    setting: Setting,
    entries: Sequence[tuple[Any, str]],
    loads: Sequence[float],
    step_load: float | None,
    repeats: int,
    capacities: Mapping[str, float],
) -> list[Case]:
    """All cases, the first of each before any is repeated, and a load of all policies before the next; repeats are the
    same requests again, since what is repeated is the machine. `capacities`: requests/s by policy."""
    seed = setting.experiment.seed
    wanted = [(load, FLAT) for load in loads] + ([(step_load, STEP)] if step_load is not None else [])
    return [
        Case(label, entry, load, load * capacities[label], mode, repeat, seed)
        for repeat in range(repeats)
        for load, mode in wanted
        for entry, label in entries
    ]


def listed(
    setting: Setting,
    entries: Sequence[tuple[Any, str]],
    names: Sequence[str],
    capacities: Mapping[str, float],
) -> list[Case]:
    """Cases by name, in this order: `POLICY@LOAD`, `POLICY@LOADstep`, and behind either `#N` for repeat N."""
    known = {label: entry for entry, label in entries}
    cases, labels = [], list(known)
    for name in names:
        found = re.fullmatch(r"(.+)@([0-9.]+)(step)?(?:#([0-9]+))?", name)
        load = float(found[2]) if found and found[2].count(".") <= 1 and found[2] != "." else 0.0
        if found is None or found[1] not in known or not load > 0:
            raise SimctlError(
                f"--case {name}: write POLICY@LOAD such as {labels[0]}@0.8, {labels[0]}@0.8step for a load step, "
                f"{labels[0]}@0.8#1 for a repeat; the experiment has {', '.join(labels)}"
            )
        mode = STEP if found[3] else FLAT
        rate, seed = load * capacities[found[1]], setting.experiment.seed
        cases.append(Case(found[1], known[found[1]], load, rate, mode, int(found[4] or 0), seed))
    return cases


def workload_of(setting: Setting, case: Case) -> Workload:
    """The case's requests at its rate."""
    workload = setting.workload(case.rate, case.seed)
    return with_step(workload) if case.mode == STEP else workload


def with_step(workload: Workload) -> Workload:
    """The same requests with the rate 1.5 times as high for a while: those that would arrive in a stretch come in
    two thirds of it, and everything behind moves up."""
    at = workload.arrival_s
    start, span = float(at[0]), float(at[-1] - at[0])
    first, dense = start + STEP_AT * span, STEP_LASTS * span
    inside = np.clip(at - first, 0.0, dense)
    moved = at - inside * (1.0 - 1.0 / STEP_FACTOR)
    return replace(workload, arrival_s=moved, notes=(*workload.notes, f"load step x {STEP_FACTOR:g}"))

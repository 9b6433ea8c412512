"""Serving one load under one policy on one data-sheet GPU, and the highest load that a policy bears."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sim.cost import load_cost
from sim.cost.profiled import ProfiledCost
from sim.engine import simulate
from sim.metrics import Slo, summarise
from sim.policies import make_policy
from sim.study.plan import target_of
from sim.workload.build import build_workload
from sim.workload.workload import Workload

A100 = "a100-80gb-sxm"
AT_ONCE = 1e6  # requests/s of a load that is there from the start


@lru_cache(maxsize=16)
def data_sheet(model: str, gpu: str = A100, tp: int = 1, context: int | None = None) -> ProfiledCost:
    """Prices by the data sheet; `context`: of a model whose window was extended."""
    cost = load_cost(model, gpu, "spec", {"tp": tp})
    return cost if context is None else replace(cost, model=replace(cost.model, max_context=context))


@lru_cache(maxsize=8)
def _drawn(spec: str, rate: float, context: int) -> Workload:
    return build_workload(json.loads(spec), seed=0, request_rate=rate, context_limit=context, base_dirs=())


def load(lengths: Mapping[str, Any], requests: int, rate: float, context: int) -> Workload:
    """Poisson arrivals at `rate`; `lengths`: prompt_tokens, output_tokens and what else a workload takes."""
    spec = {"arrivals": "poisson", "num_prompts": requests, "on_overlength": "truncate", **lengths}
    return _drawn(json.dumps(spec), rate, context)


def serve(
    policy: Any, cost: Any, workload: Workload, slo: Mapping[str, float] | None = None, **options: Any
) -> dict[str, Any]:
    """The summary of one run; `policy`: an entry, or an object with plan(view). `slo` as the experiment has it."""
    from sim.config.schema import SloTargets

    made = policy if callable(getattr(policy, "plan", None)) else make_policy(policy)
    asked = SloTargets(**dict(slo or {}))
    limits = Slo(**asked.model_dump())
    records = simulate(workload, made, cost, targets=(target_of(asked),), **options)
    return summarise(records, slo=limits, cost=cost, policy_label="", request_rate=None, seed=0)


def capacity(bears: Callable[[float], bool], low: float, high: float, steps: int = 6) -> float:
    """The highest rate that `bears` holds at, by bisection of the ratio of `high` to `low`; `low` if none is found."""
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if bears(middle) else (low, middle)
    return low

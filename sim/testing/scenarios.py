"""The loads that policies are tried on, and how they are run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sim.cost import load_cost
from sim.cost.profiled import ProfiledCost
from sim.engine import RunRecords, simulate
from sim.engine.deployment import Target
from sim.policies import make_policy
from sim.workload.workload import Workload, make_workload

CONTEXT = 2048  # tokens that the model of the scenarios takes: price tables stay small
PLENTY = 65536  # tokens of a KV pool that never fills
LIMITS = Target(ttft_s=1.0, tpot_s=0.05, itl_s=0.2)


@dataclass(frozen=True)
class Scenario:
    """A load and the settings that it runs with. `pool_tokens`: KV tokens of a replica; `about`: in words."""

    name: str
    about: str
    workload: Workload
    pool_tokens: int = PLENTY
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, policy: Any, **more: Any) -> RunRecords:
        """Simulate the load under a fresh copy of the policy (an entry, an object, a class)."""
        made = fresh(policy)
        block = getattr(made, "block_size", None) or 16
        options = {
            "num_gpu_blocks": -(-self.pool_tokens // block),
            "targets": (LIMITS,) * len(self.workload.slo_classes),
            "estimator": "oracle",  # the quickest belief to make
            "jitter": False,
            "record_steps": True,
        }
        return simulate(self.workload, made, small_cost(), **{**options, **self.options, **more})


@lru_cache(maxsize=1)
def scenarios() -> dict[str, Scenario]:
    """The loads that policies are tried on, by name."""
    rng = np.random.default_rng(20)
    calm = _load(np.cumsum(rng.exponential(0.2, 20)), rng.integers(1, 900, 20), rng.integers(1, 40, 20))
    rush = _load(np.zeros(40), rng.integers(1, 900, 40), rng.integers(1, 60, 40))
    stream = _load(np.cumsum(rng.exponential(0.01, 60)), rng.integers(100, 1500, 60), rng.integers(1, 50, 60))
    tight = _load(np.cumsum(rng.exponential(0.01, 30)), rng.integers(50, 500, 30), rng.integers(50, 300, 30))
    edges = _load(
        np.array([0.0, 0.0, 0.0, 0.5, 0.5, 60.0, 60.0, 60.0]),
        np.array([1, 1, 400, 1, CONTEXT - 1, 1, 700, CONTEXT]),
        np.array([1, 30, 1, 1, 1, 2, 1, 1]),
    )
    lone = _load(np.zeros(1), np.ones(1), np.ones(1))
    classes = replace(
        stream,
        slo_class=(np.arange(60) % 2).astype(np.int16),
        slo_classes=("chat", "batch"),
        priority=(np.arange(60) % 2).astype(np.int16),
    )
    made = (
        Scenario("calm", "20 requests, one every 0.2 s", calm),
        Scenario("rush", "40 requests at once", rush),
        Scenario("stream", "60 requests, one every 10 ms", stream),
        Scenario("classes", "the stream in two SLO classes of different priority", classes),
        Scenario("tight", "30 requests whose KV does not fit at once", tight, pool_tokens=2400),
        Scenario("edges", "one-token prompts and outputs, equal stamps, a silence, one too long", edges),
        Scenario("lone", "a single request of one token in and one out", lone),
        Scenario("replicas", "the stream on two replicas", stream, options={"replicas": 2}),
        Scenario(
            "closed", "the rush by 6 clients, each waiting for its answer", replace(rush, max_concurrency=6)
        ),
        Scenario(
            "cut", "the stream, cut off after 0.3 s", stream, options={"horizon_s": 0.3, "warmup_s": 0.1}
        ),
    )
    return {scenario.name: scenario for scenario in made}


def _load(arrivals: Any, prompts: Any, outputs: Any) -> Workload:
    asked = np.asarray(outputs, np.int32)
    load = make_workload("check", np.asarray(arrivals, np.float64), np.asarray(prompts, np.int32), asked)
    # clients ask for more than they get: a policy that takes the one for the other goes wrong
    return replace(load, max_new_tokens=np.minimum(asked + 7, CONTEXT).astype(np.int32))


@lru_cache(maxsize=1)
def small_cost() -> ProfiledCost:
    """The GPU and the model of the scenarios, which takes no more than `CONTEXT` tokens."""
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    return replace(cost, model=replace(cost.model, max_context=CONTEXT))


def fresh(policy: Any) -> Any:
    """A policy of an entry, an object or a class, with nothing remembered of earlier runs."""
    if isinstance(policy, str | Mapping):
        return make_policy(policy)
    return policy() if isinstance(policy, type) else deepcopy(policy)

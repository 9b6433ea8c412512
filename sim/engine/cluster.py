"""Opening a cluster for a workload, a policy and GPUs, and running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sim.cost.base import CostModel
from sim.engine.building import Group, Settings
from sim.engine.deploying import deploy
from sim.engine.deployment import Target
from sim.engine.link import Link
from sim.engine.pools import Pool, PooledCluster, pools_of
from sim.engine.records import RunRecords
from sim.engine.run import Cluster
from sim.jit import forced
from sim.workload.workload import Workload


def open_cluster(
    workload: Workload,
    policy: Any,
    cost: CostModel,
    *,
    replicas: int = 1,
    router: str = "round-robin",
    gpu_memory_utilization: float | None = None,
    num_gpu_blocks: int | None = None,
    block_size: int | None = None,
    seed: int = 0,
    jitter: bool = True,
    warmup_s: float = 0.0,
    horizon_s: float | None = None,
    drain: bool = True,
    record_steps: bool = False,
    bursts: bool = True,
    estimator: Any = "analytic",
    mechanism: str = "green",
    contention: bool = True,
    targets: tuple[Target, ...] | None = None,
    compiled: bool | None = None,
    pools: Sequence[Pool] | None = None,
    link: Link | None = None,
) -> Cluster:
    """The cluster that `simulate` runs, with nothing started."""
    end_s = horizon_s if horizon_s is not None else math.inf
    if not drain:
        end_s = min(end_s, float(workload.arrival_s[-1]))
    if compiled is None:
        compiled = forced()
    settings = Settings(seed, jitter, bursts, record_steps, warmup_s, end_s, estimator, contention, compiled)
    memory: dict[str, Any] = {
        "gpu_memory_utilization": gpu_memory_utilization,
        "num_gpu_blocks": num_gpu_blocks,
        "block_size": block_size,
    }
    asked = targets or (Target(),) * len(workload.slo_classes)
    parts, link = pools_of(policy, cost, replicas, pools, link)
    groups = [
        Group(
            pool.name,
            pool.count,
            pool.cost,
            deploy(policy, pool.cost, **memory, mechanism=mechanism, targets=asked, pool=pool.name),
        )
        for pool in parts
    ]
    if link is None:
        return Cluster(workload, policy, groups, settings, router)
    return PooledCluster(workload, policy, groups, settings, link)


def simulate(workload: Workload, policy: Any, cost: CostModel, **options: Any) -> RunRecords:
    """Simulate one workload under one policy; `options` are those of `open_cluster`.

    `policy`: a built-in (`sim.policies.make_policy`) or any object with `plan(view)`. Memory settings given
    here win over the policy's own defaults. `horizon_s`: stop there; without `drain` the run stops at the
    last arrival. `bursts=False` steps one iteration at a time, `compiled` runs machine code (None: as LANESIM_JIT
    says): slower and faster, the same bytes. Without `contention` lanes on SMs of their own cost each other
    nothing. `targets`: what each SLO
    class of the workload asks, for policies that look at it. `pools` and `link` are for policies that split prefill
    from decode, by default one replica each of `cost` and the link that the GPU table names; `replicas` and `router`
    are for the others.
    Raises SimctlError for settings that cannot work, PlanError for a plan that cannot be carried out,
    StalledError if requests wait and nothing can progress.
    """
    cluster = open_cluster(workload, policy, cost, **options)
    return cluster.close(cluster.run())

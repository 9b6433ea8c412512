"""A run: arrivals, a router, replicas, and what they leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pandas as pd
import simpy
from numpy.typing import NDArray

from sim.cost.base import CostModel
from sim.cost.belief import believe
from sim.cost.pairs import compile_pairs
from sim.engine.clock import ARRIVAL, TRANSFER, Clock
from sim.engine.deployment import MECHANISMS, Deployment, Target
from sim.engine.layout import (
    BUSY_S,
    BY_ADMISSION,
    CONTENTION_SM_S,
    DECISIONS,
    DECODE_KV,
    DENSE_TOKENS,
    DONE,
    EAGER_LAUNCHES,
    FLAGGED,
    GPU_S,
    GRAPH_LAUNCHES,
    HEAD_ROWS,
    HOST_BOUND_S,
    HOST_SM_S,
    IDLE_LANE_SM_S,
    ITERATIONS,
    KV_BLOCK_S,
    N_RUN,
    N_WAIT,
    NEW,
    PAIRS,
    PREFILL_KV,
    RUN_AREA,
    SM_S,
    STEP_FIELDS,
    TAIL_SM_S,
    WAIT_AREA,
    Requests,
    make_plan,
    make_replica,
    make_requests,
)
from sim.engine.records import FINISHED, REJECTED, STATUS_NAMES, UNFINISHED, RunRecords
from sim.engine.replica import OneLane, ReplicaProcess, TwoLanes
from sim.engine.view import advance_object
from sim.errors import SimctlError, StalledError
from sim.jit import COMPILED
from sim.suggest import nearest
from sim.workload.workload import Workload

DEFAULT_BLOCK_SIZE = 16

INTEGER_TOTALS = {
    "iterations": ITERATIONS,
    "decisions": DECISIONS,
    "dense_tokens": DENSE_TOKENS,
    "head_rows": HEAD_ROWS,
    "prefill_pairs": PAIRS,
    "prefill_kv_tokens": PREFILL_KV,
    "decode_kv_tokens": DECODE_KV,
    "launches_graph": GRAPH_LAUNCHES,
    "launches_eager": EAGER_LAUNCHES,
    "flagged": FLAGGED,
}
FLOAT_TOTALS = {
    "busy_s": BUSY_S,
    "gpu_s": GPU_S,
    "host_bound_s": HOST_BOUND_S,
    "sm_active_s": SM_S,
    "sm_tail_s": TAIL_SM_S,
    "sm_host_s": HOST_SM_S,
    "sm_contention_s": CONTENTION_SM_S,
    "sm_idle_lane_s": IDLE_LANE_SM_S,
    "kv_block_s": KV_BLOCK_S,
    "waiting_s": WAIT_AREA,
    "running_s": RUN_AREA,
}


class Router(Protocol):
    """Chooses a replica for each request."""

    def assign(self, requests: int, replicas: int) -> NDArray[np.int64] | None:
        """Replica of each request, known beforehand; None if the router must look at the replicas first."""

    def choose(self, replicas: list[ReplicaProcess], now: float) -> int:
        """Replica for the request that arrives now."""


class RoundRobin:
    """Replica i mod n. Never looks at the state, so each replica can run ahead through its own arrivals."""

    def __init__(self) -> None:
        self._routed = 0

    def assign(self, requests: int, replicas: int) -> NDArray[np.int64] | None:
        """In turn."""
        return np.arange(requests, dtype=np.int64) % replicas

    def choose(self, replicas: list[ReplicaProcess], now: float) -> int:
        """The replica whose turn it is."""
        self._routed += 1
        return (self._routed - 1) % len(replicas)


class LeastOutstanding:
    """The replica with the fewest waiting and running requests; the lowest index of equals."""

    def assign(self, requests: int, replicas: int) -> NDArray[np.int64] | None:
        """Known beforehand only if there is no choice."""
        return np.zeros(requests, np.int64) if replicas == 1 else None

    def choose(self, replicas: list[ReplicaProcess], now: float) -> int:
        """Settles every replica to now, then compares."""
        for replica in replicas:
            replica.settle(now)
        return min(range(len(replicas)), key=lambda k: (replicas[k].outstanding, k))


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-outstanding": LeastOutstanding,
}


def is_compiled(policy: Any) -> bool:
    """Built-in policies bring their own loop, `advance`; others have `plan(view)`."""
    return callable(getattr(policy, "advance", None))


def check_router(router: str) -> None:
    """Raise SimctlError for a router that does not exist."""
    if router not in ROUTERS:
        known = nearest(router, ROUTERS) or " Known: " + ", ".join(ROUTERS)
        raise SimctlError(f"unknown router '{router}'.{known}")


class Cluster:
    """Replicas of one policy behind a router on one clock."""

    def __init__(
        self,
        workload: Workload,
        policy: Any,
        cost: CostModel,
        *,
        replicas: int,
        router: str,
        deployment: Deployment,
        seed: int,
        jitter: bool,
        bursts: bool,
        record_steps: bool,
        warmup_s: float,
        end_s: float,
        estimator: Any,
    ) -> None:
        check_router(router)
        self.workload, self.deployment, self.end_s, self.warmup_s = workload, deployment, end_s, warmup_s
        self.clock = Clock()
        self.router = ROUTERS[router]()
        self.q: Requests = make_requests(workload)
        self.replica_of = np.full(len(workload), -1, np.int64)
        self.status = np.full(len(workload), UNFINISHED, np.int8)
        self.reasons = [""] * len(workload)
        self.routed = 0
        self.issued = 0
        self.closed = workload.max_concurrency is not None
        self.window_start: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] | None = None
        self._find_unservable(policy)
        self._routable = np.flatnonzero(self.status != REJECTED)
        assigned = None if self.closed else self.router.assign(len(self._routable), replicas)
        self.run_ahead = assigned is not None
        if assigned is not None:
            self.replica_of[self._routable] = assigned
        self.replicas = [
            self._make_replica(k, policy, cost, seed, jitter, bursts, record_steps, estimator)
            for k in range(replicas)
        ]

    def _make_replica(
        self,
        k: int,
        policy: Any,
        cost: CostModel,
        seed: int,
        jitter: bool,
        bursts: bool,
        record_steps: bool,
        estimator: Any,
    ) -> ReplicaProcess:
        d = self.deployment
        compiled = is_compiled(policy)
        tokens, seqs = largest_step(policy, d)
        order = policy.run_order if compiled else int(getattr(policy, "run_order", BY_ADMISSION))
        pairs = policy.sm_sets(d) if compiled else []
        sizes = policy.price_partitions(d) if compiled else [d.sms]
        partitions = sizes[1:]
        p = cost.compile(
            max_tokens=tokens,
            max_seqs=seqs,
            max_context=d.max_context,
            partitions=partitions,
            seed=seed,
            replica=k,
            jitter=jitter,
            compiled=COMPILED,
        )
        inbox = self._routable[self.replica_of[self._routable] == k]
        r = make_replica(d.num_blocks, d.block_size, seqs, order, record_steps, inbox, sizes, d.layers)
        a = make_plan(seqs)
        lanes = OneLane(self.q, r, p)
        if compiled and policy.lanes == 2:
            x = compile_pairs(cost, partitions, pairs)
            lanes = TwoLanes(self.q, r, p, x)
            belief = believe(estimator, cost, p, x, partitions, pairs, seed)
            drive = _drive_two_lanes(policy, self.q, r, a, p, x, belief, d)
        elif compiled:
            drive = _drive_one_lane(policy, self.q, r, a, p, d, bursts)
        else:
            drive = _drive_object(policy, self.q, r, a, p, d, bursts)
        return ReplicaProcess(
            self.clock,
            k,
            lanes,
            drive,
            self._limit,
            not self.run_ahead,
            self._on_finish if self.closed else None,
            str(getattr(policy, "label", type(policy).__name__)),
        )

    def _find_unservable(self, policy: Any) -> None:
        """Refuse, with the arithmetic, what could never be served."""
        w, d = self.workload, self.deployment
        total = w.prompt_tokens.astype(np.int64) + w.output_tokens
        if is_compiled(policy):
            need = policy.required_blocks(w, d)
        else:
            need = -(-(total - 1) // d.block_size)
        for i in np.flatnonzero((need > d.num_blocks) | (total > d.max_context)):
            self.status[i] = REJECTED
            prompt, output = int(w.prompt_tokens[i]), int(w.output_tokens[i])
            if total[i] > d.max_context:
                self.reasons[i] = f"{prompt} + {output} tokens exceed the context limit of {d.max_context}"
            else:
                self.reasons[i] = (
                    f"{prompt} + {output} tokens need {int(need[i])} KV blocks of {d.block_size}; "
                    f"the pool has {d.num_blocks}"
                )

    def _limit(self) -> float:
        """The next time at which something from outside may touch a replica."""
        bound = self.end_s
        if self.window_start is None:
            bound = min(bound, self.warmup_s)
        if not self.run_ahead and self.routed < len(self._routable):
            bound = min(bound, float(self.workload.arrival_s[self._routable[self.routed]]))
        return bound

    def _route(self, i: int) -> None:
        now = self.clock.now
        k = self.router.choose(self.replicas, now)
        self.routed += 1
        self.replica_of[i] = k
        self.replicas[k].accept(i, now)

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        for i in self._routable.tolist():
            yield self.clock.at(float(self.workload.arrival_s[i]), ARRIVAL)
            self._route(i)

    def _issue(self) -> None:
        """Closed loop: send the next request, at its own earliest time or now."""
        if self.issued >= len(self._routable):
            return
        i = int(self._routable[self.issued])
        self.issued += 1
        time_s = max(self.clock.now, float(self.workload.arrival_s[i]))
        self.q.arrival_s[i] = time_s
        event = self.clock.at(time_s, ARRIVAL)
        event.callbacks.append(lambda _event: self._route(i))

    def _on_finish(self, finished: list[int]) -> None:
        for _ in finished:
            self._issue()

    def _open_window(self, _event: Any) -> None:
        self.window_start = [replica.snapshot(self.clock.now) for replica in self.replicas]

    def run(self) -> float:
        """Run to the end; returns the time of the last event that counts."""
        if math.isfinite(self.warmup_s) and self.warmup_s < self.end_s:
            self.clock.at(self.warmup_s, TRANSFER).callbacks.append(self._open_window)
        if self.closed:
            for _ in range(self.workload.max_concurrency or 0):
                self._issue()
        elif self.run_ahead:
            for replica in self.replicas:
                replica.start()
        else:
            self.clock.process(self._arrivals())
        if self.end_s > self.clock.now:
            self.clock.run(until=self.end_s if math.isfinite(self.end_s) else None)
        finishes = np.array(self.q.finish_s, np.float64)
        done = np.array(self.q.phase) == DONE
        end = (
            self.end_s if math.isfinite(self.end_s) else float(np.max(finishes[done], initial=self.clock.now))
        )
        for replica in self.replicas:
            replica.settle(end)
            replica.drain()
            if not math.isfinite(self.end_s) and replica.outstanding > 0:
                raise StalledError(
                    f"nothing can progress: policy '{replica.name}' leaves {int(replica.r.iv[N_WAIT])} requests "
                    f"waiting and {int(replica.r.iv[N_RUN])} running on replica {replica.index} although no "
                    "other event is due"
                )
            replica.check_empty()
            replica.disband()
        return end


def _drive_one_lane(
    policy: Any, q: Any, r: Any, a: Any, p: Any, d: Deployment, bursts: bool
) -> Callable[[float, float], None]:
    ki, kf = policy.bind(d)
    advance = type(policy).advance

    def drive(limit: float, look_ahead: float) -> None:
        advance(q, r, a, p, ki, kf, limit, look_ahead if bursts else -math.inf)

    return drive


def _drive_two_lanes(
    policy: Any, q: Any, r: Any, a: Any, p: Any, x: Any, belief: tuple[Any, Any], d: Deployment
) -> Callable[[float, float], None]:
    ki, kf = policy.bind(d)
    advance = type(policy).advance
    b, y = belief

    def drive(limit: float, look_ahead: float) -> None:
        advance(q, r, a, p, x, b, y, ki, kf, limit)

    return drive


def _drive_object(
    policy: Any, q: Any, r: Any, a: Any, p: Any, d: Deployment, bursts: bool
) -> Callable[[float, float], None]:
    def drive(limit: float, look_ahead: float) -> None:
        advance_object(policy, q, r, a, p, d.sms, limit, look_ahead if bursts else -math.inf)

    return drive


def _totals(snapshots: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, at in INTEGER_TOTALS.items():
        totals[name] = int(sum(int(iv[at]) for iv, _ in snapshots))
    for name, at in FLOAT_TOTALS.items():
        totals[name] = float(sum(float(fv[at]) for _, fv in snapshots))
    return totals


def _request_frame(cluster: Cluster) -> pd.DataFrame:
    w, q = cluster.workload, cluster.q
    status = cluster.status.copy()
    status[np.array(q.phase) == DONE] = FINISHED
    replica = np.where(np.array(q.phase) == NEW, -1, cluster.replica_of)
    nan_where_never = np.array(q.max_itl_s, np.float64)
    generated = np.array(q.generated, np.int64)
    nan_where_never[nan_where_never == 0.0] = np.nan
    return pd.DataFrame(
        {
            "request_id": np.arange(len(w), dtype=np.int64),
            "arrival_s": np.array(q.arrival_s, np.float64),
            "prompt_tokens": w.prompt_tokens,
            "output_tokens": w.output_tokens,
            "slo_class": np.array(w.slo_classes, dtype=object)[w.slo_class],
            "priority": w.priority,
            "replica": replica.astype(np.int32),
            "status": np.array(STATUS_NAMES, dtype=object)[status],
            "reason": cluster.reasons,
            "first_scheduled_s": np.array(q.first_scheduled_s, np.float64),
            "first_token_s": np.array(q.first_token_s, np.float64),
            "finish_s": np.array(q.finish_s, np.float64),
            "max_itl_s": nan_where_never,
            "generated_tokens": generated,
            "preemptions": np.array(q.preempted, np.int32),
        }
    )


def _records(cluster: Cluster, end_s: float) -> RunRecords:
    final = [replica.snapshot(end_s) for replica in cluster.replicas]
    zero = [(np.zeros_like(iv), np.zeros_like(fv)) for iv, fv in final]
    start = cluster.window_start or zero
    window = [(iv - a, fv - b) for (iv, fv), (a, b) in zip(final, start, strict=True)]
    steps = None
    if any(len(block) for replica in cluster.replicas for block in replica.steps):
        frames = []
        for replica in cluster.replicas:
            frame = pd.DataFrame(np.concatenate(replica.steps), columns=list(STEP_FIELDS))
            frame.insert(0, "replica", replica.index)
            frames.append(frame)
        steps = pd.concat(frames, ignore_index=True)
        steps = steps.sort_values(["start_s", "replica"], kind="stable", ignore_index=True)
        whole = [name for name in STEP_FIELDS if name != "slowdown" and not name.endswith("_s")]
        steps[whole] = steps[whole].astype(np.int64)
        steps["graph"] = steps["chunks"] == 0
    return RunRecords(
        requests=_request_frame(cluster),
        itl_s=np.concatenate([gap for replica in cluster.replicas for gap in replica.gaps]),
        itl_count=np.concatenate([count for replica in cluster.replicas for count in replica.counts]),
        itl_end_s=np.concatenate([end for replica in cluster.replicas for end in replica.gap_ends]),
        totals=_totals(final),
        window_totals=_totals(window),
        window_s=(min(cluster.warmup_s, end_s) if cluster.window_start else 0.0, end_s),
        end_s=end_s,
        num_blocks=cluster.deployment.num_blocks,
        block_size=cluster.deployment.block_size,
        replicas=len(cluster.replicas),
        steps=steps,
    )


def largest_step(policy: Any, deployment: Deployment) -> tuple[int, int]:
    """Most tokens and most sequences of one step of the policy."""
    if is_compiled(policy):
        seqs, tokens = policy.max_seqs(deployment), policy.max_tokens(deployment)
    else:
        seqs = int(getattr(policy, "max_num_seqs", 256))
        tokens = int(getattr(policy, "max_num_batched_tokens", 8192))
    return max(tokens, seqs), seqs


def deploy(
    policy: Any,
    cost: CostModel,
    *,
    gpu_memory_utilization: float | None = None,
    num_gpu_blocks: int | None = None,
    block_size: int | None = None,
    mechanism: str = "green",
    targets: tuple[Target, ...] = (Target(),),
) -> Deployment:
    """The replica that a policy gets: its block size, and the KV blocks that fit beside its largest step."""
    knobs: dict[str, Any] = {
        "block_size": block_size or getattr(policy, "block_size", None) or DEFAULT_BLOCK_SIZE
    }
    if gpu_memory_utilization is not None:
        knobs["gpu_memory_utilization"] = gpu_memory_utilization
    if mechanism not in MECHANISMS:
        raise SimctlError(f"unknown mechanism '{mechanism}'.{nearest(mechanism, MECHANISMS)}")
    first = Deployment(
        cost.memory(**knobs).num_blocks,
        knobs["block_size"],
        cost.model.max_context,
        cost.gpu.name,
        cost.gpu.sms,
        cost.model.layers,
        MECHANISMS[mechanism],
        float(cost.gpu.compute_capability),
        targets,
    )
    tokens, seqs = largest_step(policy, first)
    # a sampler's peak is profiled at no more than 1024 sequences (vllm:vllm/config/scheduler.py)
    plan = cost.memory(**knobs, num_gpu_blocks=num_gpu_blocks, max_tokens=tokens, max_seqs=min(seqs, 1024))
    return replace(first, num_blocks=plan.num_blocks)


def simulate(
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
    targets: tuple[Target, ...] | None = None,
) -> RunRecords:
    """Simulate one workload under one policy.

    `policy`: a built-in (`sim.policies.make_policy`) or any object with `plan(view)`. Memory settings given
    here win over the policy's own defaults. `horizon_s`: stop there; without `drain` the run stops at the
    last arrival. `bursts=False` steps one iteration at a time: slower, the same bytes. `targets`: what each SLO
    class of the workload asks, for policies that look at it.
    Raises SimctlError for settings that cannot work, PlanError for a plan that cannot be carried out,
    StalledError if requests wait and nothing can progress.
    """
    deployment = deploy(
        policy,
        cost,
        gpu_memory_utilization=gpu_memory_utilization,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        mechanism=mechanism,
        targets=targets or (Target(),) * len(workload.slo_classes),
    )
    end_s = horizon_s if horizon_s is not None else math.inf
    if not drain:
        end_s = min(end_s, float(workload.arrival_s[-1]))
    cluster = Cluster(
        workload,
        policy,
        cost,
        replicas=replicas,
        router=router,
        deployment=deployment,
        seed=seed,
        jitter=jitter,
        bursts=bursts,
        record_steps=record_steps,
        warmup_s=warmup_s,
        end_s=end_s,
        estimator=estimator,
    )
    return _records(cluster, cluster.run())

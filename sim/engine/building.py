"""One replica from a policy, its price tables and its deployment: the arrays, and the call that advances them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sim.cost.base import CostModel
from sim.cost.belief import believe
from sim.cost.pairs import compile_pairs
from sim.engine.deploying import is_compiled, largest_step
from sim.engine.deployment import Deployment, check_sets
from sim.engine.layout import BY_ADMISSION, WAIT_ORDERS, Requests, make_plan, make_replica
from sim.engine.replica import OneLane, TwoLanes
from sim.engine.view import advance_object
from sim.native import HotCode

Drive = Callable[[float, float], None]


@dataclass(frozen=True)
class Group:
    """`count` replicas alike; `pool`: prefill, decode or mixed, empty where replicas do everything."""

    pool: str
    count: int
    cost: CostModel
    deployment: Deployment


@dataclass(frozen=True)
class Settings:
    """How to run: `bursts=False` steps one iteration at a time; times in seconds, `end_s` infinite to run out.

    `contention=False`: neighbours on SMs of their own cost each other nothing. `compiled`: hot code as machine code,
    the same bytes sooner."""

    seed: int = 0
    jitter: bool = True
    bursts: bool = True
    record_steps: bool = False
    warmup_s: float = 0.0
    end_s: float = math.inf
    estimator: Any = "analytic"
    contention: bool = True
    compiled: bool = False


def build_replica(
    policy: Any,
    group: Group,
    hot: HotCode,
    q: Requests,
    k: int,
    inbox: Sequence[int],
    settings: Settings,
) -> tuple[OneLane, Drive]:
    """Replica k of a group: its lanes, and `drive(limit, look_ahead)`, which runs the policy's loop."""
    cost, d = group.cost, group.deployment
    compiled = is_compiled(policy)
    tokens, seqs = largest_step(policy, d)
    order = policy.run_order if compiled else int(getattr(policy, "run_order", BY_ADMISSION))
    pairs = policy.sm_sets(d) if compiled else []
    check_sets(pairs, d, str(getattr(policy, "label", "")))
    sizes = policy.price_partitions(d) if compiled else [d.sms]
    partitions = sizes[1:]
    p = cost.compile(
        max_tokens=tokens,
        max_seqs=seqs,
        max_context=d.max_context,
        partitions=partitions,
        seed=settings.seed,
        replica=k,
        jitter=settings.jitter,
        compiled=hot.compiled,
    )
    idle = make_replica(
        d.num_blocks,
        d.block_size,
        seqs,
        order,
        settings.record_steps,
        inbox,
        sizes,
        d.layers,
        switch_s=d.mechanism.switch_s,
        wait_order=WAIT_ORDERS[getattr(policy, "wait_order", "fcfs")],
    )
    r, a = hot.state(idle), hot.state(make_plan(seqs))
    if compiled and policy.lanes == 2:
        priority = getattr(policy, "decode_priority", "normal")
        x = hot.state(
            compile_pairs(cost, partitions, pairs, contention=settings.contention, priority=priority)
        )
        b, y = believe(settings.estimator, cost, p, x, partitions, pairs, settings.seed)
        b, y = hot.state(b), hot.state(y)
        loop = hot.bind(type(policy).advance, q, r, a, p, x, b, y, *_knobs(policy, d, hot))
        lanes = TwoLanes(hot, q, r, p, x)
        lanes.belief = b, y
        return lanes, _without_look_ahead(loop)
    if compiled:
        loop = hot.bind(type(policy).advance, q, r, a, p, *_knobs(policy, d, hot))
    else:
        loop = partial(advance_object, policy, q, r, a, p, d.sms)
    return OneLane(hot, q, r, p), loop if settings.bursts else _without_bursts(loop)


def _knobs(policy: Any, deployment: Deployment, hot: HotCode) -> tuple[Any, Any]:
    integers, floats = policy.bind(deployment)
    return hot.flat(integers), hot.flat(floats)


def _without_look_ahead(loop: Callable[[float], None]) -> Drive:
    """Two lanes take one step at a time."""
    return lambda limit, look_ahead: loop(limit)


def _without_bursts(loop: Drive) -> Drive:
    return lambda limit, look_ahead: loop(limit, -math.inf)

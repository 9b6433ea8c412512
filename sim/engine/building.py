"""One replica from a policy, its price tables and its deployment: the arrays, and the call that advances them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sim.cost.base import CostModel
from sim.cost.belief import believe
from sim.cost.pairs import compile_pairs
from sim.engine.deploying import is_compiled, largest_step
from sim.engine.deployment import Deployment, check_sets
from sim.engine.lane import begin, execute
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import BY_ADMISSION, POLICY_SLOTS, WAIT_ORDERS, Requests, make_plan, make_replica
from sim.engine.objects import ObjectLoop, object_sets, sizes_of
from sim.engine.replica import OneLane, TwoLanes
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
    shared: dict[str, Any],
) -> tuple[OneLane, Drive]:
    """Replica k of a group: its lanes, and `drive(limit, look_ahead)`, which runs the policy's loop.

    `shared` holds what all replicas of the group read: slowdowns, and what the policy believes.
    """
    cost, d = group.cost, group.deployment
    compiled = is_compiled(policy)
    tokens, seqs = largest_step(policy, d)
    order = policy.run_order if compiled else int(getattr(policy, "run_order", BY_ADMISSION))
    pairs, sizes = sets_of(policy, d)
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
        attention=policy.attention(d) if compiled else None,
        page_size=d.block_size,
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
        policy_slots=int(getattr(policy, "state_slots", POLICY_SLOTS)),
    )
    r, a = hot.state(idle), hot.state(make_plan(seqs))
    if getattr(policy, "lanes", 1) == 2:
        priority = getattr(policy, "decode_priority", "normal")
        if not shared:
            x = compile_pairs(cost, partitions, pairs, contention=settings.contention, priority=priority)
            shared["pairs"] = hot.state(x)
            b, y = believe(settings.estimator, cost, p, shared["pairs"], partitions, pairs, settings.seed)
            shared["belief"] = hot.state(b), hot.state(y)
        x, (b, y) = shared["pairs"], shared["belief"]
        lanes = TwoLanes(hot, q, r, p, x, lambda: (b, y))
        if compiled:
            loop = hot.bind(type(policy).advance, q, r, a, p, x, b, y, *_knobs(policy, d, hot))
            hot.prepare(begin_lanes, q, r, x)
            hot.prepare(execute_lanes, q, r, a, p, x)
        else:
            loop = ObjectLoop(policy, lanes, hot, a, cost, d, sizes).two
        return lanes, _without_look_ahead(loop)
    one = OneLane(hot, q, r, p, lambda: _one_lanes_belief(settings, cost, p))
    if compiled and policy.predicts:
        loop = hot.bind(type(policy).advance, q, r, a, p, hot.state(one.belief[0]), *_knobs(policy, d, hot))
    elif compiled:
        loop = hot.bind(type(policy).advance, q, r, a, p, *_knobs(policy, d, hot))
    else:
        loop = ObjectLoop(policy, one, hot, a, cost, d, sizes).one
    if compiled:
        # plain Python between two steps wants the same in parts
        hot.prepare(begin, q, r, p)
        hot.prepare(execute, q, r, a, p)
    return one, loop if settings.bursts else _without_bursts(loop)


def sets_of(policy: Any, d: Deployment) -> tuple[list[tuple[int, int]], list[int]]:
    """(prefill SMs, decode SMs) that may run side by side, and SMs of each price partition, the whole GPU first.

    Raises SimctlError for sets that the mechanism cannot make.
    """
    compiled = is_compiled(policy)
    pairs = policy.sm_sets(d) if compiled else object_sets(policy, d)
    check_sets(pairs, d, str(getattr(policy, "label", "")))
    return pairs, policy.price_partitions(d) if compiled else sizes_of(pairs, d)


def check_settings(policy: Any, d: Deployment) -> None:
    """Raise SimctlError for settings of a policy that cannot work where it is deployed."""
    sets_of(policy, d)
    if is_compiled(policy):
        policy.bind(d)


def hot_loops(policy: Any) -> tuple[Callable[..., Any], ...]:
    """The functions in which a run of the policy, which is no wrapper, spends its time."""
    if is_compiled(policy):
        return (type(policy).advance,)
    return (begin, execute) if getattr(policy, "lanes", 1) == 1 else (begin_lanes, execute_lanes)


def _one_lanes_belief(settings: Settings, cost: CostModel, p: Any) -> tuple[Any, None]:
    b, _ = believe(settings.estimator, cost, p, compile_pairs(cost, [], []), [], [], settings.seed)
    return b, None


def _knobs(policy: Any, deployment: Deployment, hot: HotCode) -> tuple[Any, Any]:
    integers, floats = policy.bind(deployment)
    return hot.flat(integers), hot.flat(floats)


def _without_look_ahead(loop: Callable[[float], None]) -> Drive:
    """Two lanes take one step at a time."""
    return lambda limit, look_ahead: loop(limit)


def _without_bursts(loop: Drive) -> Drive:
    return lambda limit, look_ahead: loop(limit, -math.inf)

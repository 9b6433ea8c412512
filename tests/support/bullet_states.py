"""States of a replica under Bullet, made by hand: what its searches see, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from workloads import workload

from sim.cost import load_cost
from sim.cost.belief import believe
from sim.cost.pairs import compile_pairs
from sim.engine.deploying import deploy
from sim.engine.layout import IN_CHUNKS, IN_TOKENS, NOW, STEP, make_plan, make_replica, make_requests
from sim.policies import make_policy
from sim.policies.parts.bullet_prices import forget_pass
from sim.policies.parts.bullet_state import (
    BATCH,
    CONTEXT_SUM,
    DEADLINE,
    DUE_SINCE,
    P_HISTORY,
    P_TOKENS,
    SPLIT,
    TAIL_BASE,
    TAIL_LIMIT,
    TAIL_SINCE,
    start,
)


@dataclass
class World:
    """A policy on a GPU with what it believes, and arrays to put a state in."""

    q: Any
    r: Any
    a: Any
    b: Any
    y: Any
    ki: Any
    kf: Any
    layers: int
    sms: int

    def put(
        self, *, tokens: int, history: int, batch: int, context: int, split: int, now: float = 10.0
    ) -> None:
        """One prompt of `tokens` is open at its first layer, `batch` requests with mean `context` decode."""
        self.q.computed[0] = history
        self.r.chunk_id[0] = 0
        self.r.chunk_tokens[0] = tokens
        self.r.iv[IN_CHUNKS] = 1
        self.r.iv[IN_TOKENS] = tokens
        self.r.iv[STEP] = 100
        self.r.fv[NOW] = now
        values = {
            BATCH: batch,
            CONTEXT_SUM: batch * context,
            P_TOKENS: tokens,
            P_HISTORY: history,
            SPLIT: split,
        }
        for at, value in values.items():
            self.r.policy_i[at] = value
        forget_pass(self.r)

    def limits(self, *, ttft: tuple[float, float], tpot: tuple[float, int, float]) -> None:
        """`ttft`: arrival and deadline of the open prompt; `tpot`: first token, tokens since, limit of the tail."""
        self.r.policy_f[DUE_SINCE], self.r.policy_f[DEADLINE] = ttft
        self.r.policy_f[TAIL_SINCE], self.r.policy_f[TAIL_LIMIT] = tpot[0], tpot[2]
        self.r.policy_i[TAIL_BASE] = self.r.iv[STEP] - tpot[1]


@lru_cache(maxsize=16)
def world(gpu: str = "h200-sxm", estimator: str = "analytic", profile: str = "auto", **knobs: Any) -> World:
    """Bullet with these knobs; the mechanism is that of the experiment's default."""
    cost = load_cost("llama-3.1-8b", gpu, profile)
    policy = make_policy({"name": "bullet", "max_num_seqs": 256, **knobs})
    deployment = deploy(policy, cost)
    partitions = policy.price_partitions(deployment)[1:]
    pairs = policy.sm_sets(deployment)
    p = cost.compile(
        max_tokens=policy.max_tokens(deployment), max_seqs=256, max_context=16384, partitions=partitions
    )
    b, y = believe(estimator, cost, p, compile_pairs(cost, partitions, pairs), partitions, pairs, 0)
    q = make_requests(workload([0.0], [4096], [100]))
    sizes, inbox = [cost.gpu.sms, *partitions], np.zeros(0, np.int64)
    r = make_replica(1000, 16, 256, 0, False, inbox, sizes, cost.model.layers)
    ki, kf = policy.bind(deployment)
    start(r, ki)
    return World(q, r, make_plan(256), b, y, ki, kf, cost.model.layers, cost.gpu.sms)

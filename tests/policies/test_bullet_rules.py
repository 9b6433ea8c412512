"""Bullet's rules on hand-made states: tail of TPOT, order of the queue, what closes a batch, hand-over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bullet_states import world
from hypothesis import given
from hypothesis import strategies as st
from workloads import workload

from sim.engine.layout import (
    COHORT,
    DECODE,
    N_CHUNKS,
    N_PARTIAL,
    N_READY,
    NOW,
    PREFILL,
    READY,
    STEP,
    make_plan,
    make_replica,
    make_requests,
)
from sim.engine.queues import push_waiting
from sim.policies.parts.bullet_queue import next_batch_of_prompts
from sim.policies.parts.bullet_state import (
    CAP,
    COSTS,
    DEADLINE,
    LIMITS,
    LOOK_AHEAD,
    MISSES,
    ORDER,
    P_TOKENS,
    QUEUE_LATE,
    SCHEDULER,
    SLACKS,
    TAIL_BASE,
    TAIL_SINCE,
    start,
)
from sim.policies.parts.bullet_track import allowed_s, find_tail

TTFT_S, TPOT_S = 1.0, 0.1


def empty(prompts: list[int], arrivals: list[float] | None = None) -> tuple[Any, Any, Any]:
    """Requests, replica and plan with nothing done yet."""
    w = world()
    q = make_requests(workload(arrivals or [0.0] * len(prompts), prompts, [100] * len(prompts)))
    sizes = np.array(w.r.policy_sms).tolist()
    r = make_replica(4000, 16, 64, 0, False, np.zeros(0, np.int64), sizes, w.layers)
    start(r, w.ki)
    return q, r, make_plan(64)


def limits(misses: float = 0.1, ttft_s: float = TTFT_S) -> list[float]:
    kf = list(world().kf)
    kf[MISSES] = misses
    kf[LIMITS], kf[LIMITS + 1], kf[LIMITS + 2] = ttft_s, 1e9, TPOT_S
    return kf


@given(st.integers(1, 40), st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 10_000))
def test_the_tail_is_the_request_at_the_percentile(members, ready, misses, seed):
    rng = np.random.default_rng(seed)
    n = members + ready
    q, r, _ = empty([10] * n)
    r.iv[STEP], r.fv[NOW] = 500, 50.0
    r.iv[COHORT], r.iv[N_READY] = members, ready
    slack = []
    for i in range(n):
        decodes = i < members
        q.phase[i] = DECODE if decodes else READY
        q.generated[i] = int(rng.integers(1, 4))
        q.joined[i] = int(rng.integers(300, 500))
        q.first_token_s[i] = float(rng.uniform(20, 50))
        tokens = q.generated[i] - 1 + (500 - q.joined[i] if decodes else 0)
        slack.append(TPOT_S * tokens - (50.0 - q.first_token_s[i]))
        (r.heap_id if decodes else r.ready)[i if decodes else i - members] = i
    find_tail(q, r, limits(misses))
    kept = sorted(slack)[int(misses * n)]
    assert allowed_s(r) == pytest.approx(kept + TPOT_S)
    assert sum(s < kept - 1e-12 for s in slack) <= misses * n


def test_a_tail_stands_for_as_many_steps_as_its_batch_is_large():
    q, r, _ = empty([10] * 64)
    r.iv[COHORT] = 64
    for i in range(64):
        q.phase[i], q.generated[i], r.heap_id[i] = DECODE, 1, i
        q.first_token_s[i] = 0.0
    find_tail(q, r, limits())
    q.first_token_s[:64] = [5.0] * 64
    for step, since in ((1, 0.0), (2, 0.0), (3, 5.0)):
        r.iv[STEP] = step
        find_tail(q, r, limits())
        assert r.policy_f[TAIL_SINCE] == since
    assert r.policy_i[TAIL_BASE] == 0


def waiting(prompts: list[int], arrivals: list[float], now: float) -> tuple[Any, Any, Any]:
    q, r, a = empty(prompts, arrivals)
    for i in range(len(prompts)):
        push_waiting(q, r, i, False, now)
    r.fv[NOW] = now
    return q, r, a


def plan_batch(q: Any, r: Any, a: Any, kf: Any, **changed: int) -> list[int]:
    """The prompts of the next batch, in order."""
    w = world()
    ki = list(w.ki)
    for name, value in changed.items():
        ki[{"cap": CAP, "scheduler": SCHEDULER, "look_ahead": LOOK_AHEAD}[name]] = value
    next_batch_of_prompts(q, r, a, w.b, ki, kf, 0, 4000)
    return [int(a.chunk_id[c]) for c in range(a.iv[N_CHUNKS])]


@given(st.lists(st.integers(20, 6000), min_size=1, max_size=20), st.floats(0.05, 3.0), st.integers(0, 999))
def test_nobody_is_passed_whose_limit_that_would_break(prompts, ttft_s, seed):
    """Who meets TTFT first come first served meets it in the new order; adjacent ones stand as they do for a reason."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, 1, len(prompts))).tolist()
    n, now, slack, order, cost = len(prompts), 1.0, {}, {}, {}
    for sorts in (0, 1):
        q, r, a = waiting(prompts, arrivals, now)
        plan_batch(q, r, a, limits(ttft_s=ttft_s), scheduler=sorts)
        order[sorts] = [int(i) for i in r.policy_i[ORDER : ORDER + n]]
        cost[sorts] = dict(zip(order[sorts], r.policy_f[COSTS : COSTS + n], strict=True))
        slack[sorts] = dict(zip(order[sorts], r.policy_f[SLACKS : SLACKS + n], strict=True))
    assert order[0] == list(range(n))
    assert sorted(order[1]) == order[0]
    assert cost[1] == cost[0]
    ahead = 0.0
    for i in order[1]:
        ahead += cost[1][i]
        assert slack[1][i] == pytest.approx(arrivals[i] + ttft_s - now - ahead, abs=1e-9)
        if slack[0][i] >= 0:
            assert slack[1][i] > -1e-9
    for first, second in zip(order[1], order[1][1:], strict=False):
        assert cost[1][first] <= cost[1][second] or 0 <= slack[1][first] < cost[1][second]


def test_the_queue_is_late_if_more_than_the_percentile_misses():
    for late, expected in ((0, 0), (1, 0), (2, 1)):
        arrivals = [0.0] * late + [1.0] * (10 - late)
        q, r, a = waiting([100] * 10, arrivals, 1.0)
        plan_batch(q, r, a, limits(ttft_s=0.9))
        assert r.policy_i[QUEUE_LATE] == expected, late


def test_a_batch_closes_with_the_prompt_that_crosses_the_cap():
    q, r, a = waiting([600, 700, 800, 900], [0.0] * 4, 0.5)
    assert plan_batch(q, r, a, limits(), cap=1300) == [0, 1]
    assert r.policy_i[P_TOKENS] == 1300
    assert r.policy_f[DEADLINE] == TTFT_S
    q, r, a = waiting([600, 700, 800, 900], [0.0] * 4, 0.5)
    assert plan_batch(q, r, a, limits(), cap=1301) == [0, 1, 2]
    # by default 989 TFLOP/s over 4.8 TB/s: 207 tokens
    assert world().ki[CAP] == 207


def test_only_the_first_requests_are_looked_at():
    q, r, a = waiting([3000, 2000, 1000, 500], [0.0] * 4, 0.0)
    assert plan_batch(q, r, a, limits(ttft_s=9.0), look_ahead=3) == [2]
    q, r, a = waiting([3000, 2000, 1000, 500], [0.0] * 4, 0.0)
    assert plan_batch(q, r, a, limits(ttft_s=9.0), look_ahead=1) == [0]


def test_a_prompt_longer_than_a_pass_runs_in_pieces():
    q, r, a = waiting([10_000, 50], [0.0, 0.0], 0.0)
    assert plan_batch(q, r, a, limits(), scheduler=0) == [0]
    assert a.chunk_tokens[0] == 8192
    q.phase[0], q.computed[0], r.partial[0], r.iv[N_PARTIAL] = PREFILL, 8192, 0, 1
    a = make_plan(64)
    assert plan_batch(q, r, a, limits(), scheduler=0) == [0]
    assert a.chunk_tokens[0] == 10_000 - 8192

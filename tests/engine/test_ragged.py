"""How far the longest context stands out: against brute force over random batches, and what it does to a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fingerprint import fingerprint
from naive import overhang
from stub_cost import TICK, rough_tables, stub_cost
from workloads import workload

from sim.cost import load_cost
from sim.cost.compile import MOST_SPLITS
from sim.cost.operators import TOGETHER, effective_longest
from sim.cost.shapes import Launch
from sim.cost.step import decode_attention_s, decode_pass_s, overhang_s, overhang_sm
from sim.engine import simulate
from sim.engine.cohort import join, leave
from sim.engine.layout import COHORT, CONTEXT, LEADERS, OVERHANG, STEP, make_replica, make_requests
from sim.engine.queues import push_running, remove_running
from sim.engine.ragged import measure_overhang
from sim.policies import make_policy


class Spare:
    """Prices that know nothing but the pieces to spare."""

    over_on, max_seqs = 1, 1 << 20

    def __init__(self, spare: int) -> None:
        self.spare_graph = self.spare_eager = [spare] * 1000


@pytest.mark.parametrize("spare", [-1, 0, 1, 5, MOST_SPLITS])
def test_members_come_and_go_and_the_overhang_is_that_of_brute_force(spare: int) -> None:
    rng = np.random.default_rng(spare + 2)
    n = 300
    load = workload([0.0] * n, [1] * n, [1000] * n)
    q = make_requests(load).as_lists()
    r = make_replica(10**6, 16, n, 0, False, list(range(n)), [132], 32).as_lists()
    p, members = Spare(spare), []
    for i in range(n):
        q.computed[i] = int(rng.integers(1, 50) if rng.random() < 0.3 else rng.integers(1000, 5000))
        q.generated[i] = 1
    waiting = list(range(n))
    for _ in range(400):
        if waiting and (not members or rng.random() < 0.55):
            members.append(waiting.pop())
            push_running(q, r, members[-1], 0.0)
            join(q, r, members[-1])
        elif members:
            i = members.pop(int(rng.integers(len(members))))
            leave(q, r, i)
            remove_running(q, r, i, 0.0)
        if members:
            measure_overhang(q, r, p, True)
            contexts = [q.computed[i] + r.iv[STEP] - q.joined[i] + 1 for i in members]
            assert r.iv[OVERHANG] == overhang(contexts, spare)
            steps = int(rng.integers(0, 3))
            r.iv[STEP] += steps
            r.iv[CONTEXT] += steps * r.iv[COHORT]


def test_enough_leaders_are_kept() -> None:
    assert TOGETHER + MOST_SPLITS <= LEADERS


def test_tables_price_ragged_batches_as_the_cost_model_does() -> None:
    """A batch too large to split: one context of 6000 among 59 of 1000, on all SMs and on some."""
    cost = load_cost("llama-3.1-8b", "h200-sxm")
    tables = cost.compile(max_tokens=512, max_seqs=128, max_context=8192, partitions=[64])
    contexts = [6000] + [1000] * 59
    over = overhang(contexts, 0)
    longest = effective_longest(contexts)
    assert over == pytest.approx(longest - sum(contexts) / 60, abs=1.0)
    for part, sms in enumerate((132, 64)):
        launch = Launch((), 60, sum(contexts), round(longest), graph=True)
        ours = decode_pass_s(tables, part, 60, sum(contexts)) + overhang_s(tables, part, 60, over)
        assert ours == pytest.approx(cost.solo(launch, sms).gpu_s, rel=5e-3)
        assert overhang_s(tables, part, 60, over) > 0.05 * decode_attention_s(tables, part, 60, sum(contexts))
        # one sequence with a CTA a KV head holds that many SMs while all others have ended
        assert overhang_sm(tables, part, 60, over) == pytest.approx(8 * overhang_s(tables, part, 60, over))


def test_small_batches_are_split_and_data_sheets_know_nothing_of_it() -> None:
    """33 sequences with 8 KV heads are two CTAs on each of 132 SMs; a graph pads to 8 more sequences."""
    limits: dict[str, Any] = {"max_tokens": 512, "max_seqs": 128, "max_context": 8192}
    tables = load_cost("llama-3.1-8b", "h200-sxm").compile(**limits)
    assert [int(tables.spare_eager[b]) for b in (1, 16, 24, 32, 33, 34, 128)] == [-1, -1, 9, 1, 0, 0, 0]
    assert [int(tables.spare_graph[b]) for b in (16, 17, 25, 32, 33)] == [-1, 9, 1, 1, 0]
    spec = load_cost("llama-3.1-8b", "h200-sxm", "spec").compile(**limits)
    assert spec.over_on == 0
    assert not np.any(spec.over_s)


@pytest.mark.parametrize("name", ["vllm", "static-split"])
def test_a_long_context_slows_its_neighbours_steps(name: str) -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm")

    def last(prompts: list[int]) -> float:
        load = workload([0.0] * 40, prompts, [300] * 40)
        records = simulate(load, make_policy(name), cost, jitter=False, record_steps=True)
        steps = records.steps[(records.steps["decode_batch"] == 40) & (records.steps["prefill_tokens"] == 0)]
        return float((steps["end_s"] - steps["start_s"]).iloc[-1])

    assert last([4900, *[900] * 39]) > 1.02 * last([1000] * 40)


def test_bursts_change_nothing_for_ragged_batches() -> None:
    rng = np.random.default_rng(9)
    load = workload(
        np.cumsum(rng.exponential(0.01, 60)).tolist(),
        rng.integers(1, 200, 60).tolist(),
        rng.integers(1, 90, 60).tolist(),
    )
    cost = stub_cost(rough_tables(TICK, wobble=True))
    made = [
        simulate(load, make_policy("vllm"), cost, num_gpu_blocks=4000, record_steps=True, bursts=bursts)
        for bursts in (True, False)
    ]
    assert fingerprint(made[0]) == fingerprint(made[1])

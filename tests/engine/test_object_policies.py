"""Policies in plain Python: the same rule gives the same run, and a plan that cannot be is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_cost import TICK, rough_tables, stub_cost
from workloads import ENTRIES, workload, workloads

from sim.engine import Batch, Decode, Mixed, Plan, Prefill, RunRecords, View, simulate
from sim.errors import PlanError, StalledError
from sim.policies import list_policies, make_policy
from sim.workload.workload import Workload

COST = stub_cost(rough_tables(TICK, wobble=True))


class ObjectSarathi:
    """Sarathi's rule where memory is plenty."""

    def __init__(self, budget: int, seqs: int, one_prefill: bool) -> None:
        self.max_num_batched_tokens, self.max_num_seqs, self.one_prefill = (
            max(budget, seqs),
            seqs,
            one_prefill,
        )
        self.budget = budget

    def plan(self, view: View) -> Plan:
        running, waiting = view.running, view.waiting
        budget, slots = self.budget - int(running.decoding.sum()), self.max_num_seqs - len(running)
        chunks: list[tuple[int, int]] = []
        unfinished = ~running.decoding
        queue = [
            *zip(
                running.id[unfinished],
                (running.target_tokens - running.computed_tokens)[unfinished],
                strict=True,
            ),
            *zip(waiting.id[:slots], waiting.target_tokens[:slots], strict=True),
        ]
        for i, left in queue:
            if budget <= 0 or (self.one_prefill and chunks):
                break
            chunks.append((i, min(int(left), budget)))
            budget -= chunks[-1][1]
        return Plan([Mixed(chunks)]) if chunks else Plan([Decode()], repeat_for=100)


class ObjectVllm:
    """vLLM v1's rule, with eviction."""

    def __init__(self, budget: int, seqs: int) -> None:
        self.max_num_batched_tokens, self.max_num_seqs = max(budget, seqs), seqs
        self.budget = budget

    def plan(self, view: View) -> Plan:
        running, waiting, blocks = view.running, view.waiting, view.blocks_for
        budget, free = self.budget, view.free_blocks
        rows, chunks, decodes, victims = list(range(len(running))), [], [], []
        at = 0
        while at < len(rows) and budget > 0:
            k = rows[at]
            done = int(running.computed_tokens[k])
            tokens = 1 if running.decoding[k] else min(int(running.target_tokens[k]) - done, budget)
            while k in rows and blocks(done + tokens) - blocks(done) > free:
                free += blocks(int(running.computed_tokens[rows[-1]]))
                victims.append(int(running.id[rows.pop()]))
            if k not in rows:
                break
            free -= blocks(done + tokens) - blocks(done)
            budget -= tokens
            (decodes if running.decoding[k] else chunks).append((int(running.id[k]), tokens))
            at += 1
        for i, left in zip(waiting.id, waiting.target_tokens, strict=True):
            tokens = min(int(left), budget)
            if victims or tokens <= 0 or len(rows) == self.max_num_seqs or blocks(tokens) > free:
                break
            chunks.append((int(i), tokens))
            rows.append(-1)
            free -= blocks(tokens)
            budget -= tokens
        return Plan([Mixed(chunks, [i for i, _ in decodes])], preempt=victims)


def run(load: Workload, policy: Any, **options: Any) -> RunRecords:
    settings = {"num_gpu_blocks": 400, "block_size": 16, "jitter": False, "record_steps": True, **options}
    return simulate(load, policy, COST, **settings)


def assert_equal_runs(a: RunRecords, b: RunRecords) -> None:
    assert a.requests.equals(b.requests)
    assert (a.steps is None and b.steps is None) or a.steps.equals(b.steps)
    assert np.array_equal(a.itl_s, b.itl_s)
    assert np.array_equal(a.itl_count, b.itl_count)


@given(
    load=workloads(),
    budget=st.one_of(st.integers(1, 12), st.just(64)),
    seqs=st.integers(1, 8),
    one=st.booleans(),
    bursts=st.booleans(),
)
@settings(max_examples=25)
def test_sarathi_as_an_object(load: Workload, budget: int, seqs: int, one: bool, bursts: bool) -> None:
    compiled = make_policy(
        {"name": "sarathi", "token_budget": budget, "max_num_seqs": seqs, "one_prefill": one}
    )
    assert_equal_runs(run(load, ObjectSarathi(budget, seqs, one), bursts=bursts), run(load, compiled))


@given(load=workloads(), budget=st.integers(1, 40), seqs=st.integers(1, 8), tight=st.booleans())
@settings(max_examples=25)
def test_vllm_as_an_object(load: Workload, budget: int, seqs: int, tight: bool) -> None:
    compiled = make_policy({"name": "vllm", "max_num_batched_tokens": budget, "max_num_seqs": seqs})
    longest = int((load.prompt_tokens + load.output_tokens).max())
    pool = {"num_gpu_blocks": -(-longest // 4) if tight else 400, "block_size": 4}
    assert_equal_runs(run(load, ObjectVllm(budget, seqs), **pool), run(load, compiled, **pool))


class Scripted:
    """Answers by a function of the view and the number of the decision."""

    label = "scripted"
    max_num_seqs = 2
    max_num_batched_tokens = 32

    def __init__(self, answer: Callable[[View, int], Any]) -> None:
        self.answer, self.asked = answer, 0

    def plan(self, view: View) -> Any:
        self.asked += 1
        return self.answer(view, self.asked)


def after_prefill(then: Any) -> Callable[[View, int], Any]:
    """Compute both prompts of 4 tokens, then answer `then`."""
    return lambda view, n: Plan([Prefill([(0, 4), (1, 4)])]) if n == 1 else then


CHUNK = Plan([Prefill([(0, 4)])])
CHUNK_3 = Plan([Prefill([(2, 3)])])
REFUSED: dict[str, tuple[Any, str]] = {
    "not a plan": ([Decode()], "returned list; it must return a Plan"),
    "none": (None, "returned NoneType; it must return a Plan"),
    "two launches": (Plan([Prefill([(0, 4)]), Decode()]), "at most one launch; use Mixed"),
    "not a launch": (Plan([(0, 4)]), "a launch is Prefill, Decode or Mixed, not tuple"),
    "too many": (
        Plan([Prefill([(0, 1)] * 4)]),
        "names more than 2 requests; raise the policy's max_num_seqs",
    ),
    "evict a waiting one": (
        Plan([Prefill([(0, 4)])], preempt=[1]),
        "request 1 is to be preempted but is not running",
    ),
    "evict nobody": (Plan(preempt=[77]), "request 77 is to be preempted but is not running"),
    "unknown chunk": (Plan([Prefill([(77, 4)])]), "request 77 has a chunk but is not waiting or prefilling"),
    "negative id": (Plan([Prefill([(-1, 4)])]), "request -1 has a chunk but is not waiting or prefilling"),
    "chunk of a decode": (after_prefill(CHUNK), "request 0 has a chunk but is not waiting or prefilling"),
    "not admitted": (
        Plan([Prefill([(0, 4), (1, 4)])], admit=[0]),
        "request 1 waits and has a chunk but is not in",
    ),
    "admitted without a chunk": (
        Plan([Prefill([(0, 4)])], admit=[0, 1]),
        r"requests \[1\] are admitted without",
    ),
    "decode of a waiting one": (Plan([Decode([0])]), r"requests \[0\] are to decode but cannot"),
    "decode of a victim": (
        after_prefill(Plan([Decode([0, 1])], preempt=[1])),
        r"\[1\] are to decode but cannot",
    ),
    "chunk too long": (
        Plan([Prefill([(0, 5)])]),
        "scripted.*request 0 was given a chunk that is empty or longer",
    ),
    "empty chunk": (Plan([Prefill([(0, 0)])]), "request 0 was given a chunk that is empty or longer"),
    "twice": (Plan([Prefill([(0, 2), (0, 2)])]), "request 0 was repeated within one plan"),
    "evicted twice": (
        after_prefill(Plan([Decode()], preempt=[1, 1])),
        "request 1 was named for something that its",
    ),
    "one too many running": (
        lambda view, n: Plan([Prefill([(n - 1, 1)])]),
        "request 2 is one more running request than the policy declared",
    ),
    "a step too large": (Plan([Prefill([(2, 33)])]), "request 2 makes the step larger than the price tables"),
    "no memory": (
        # 33 of 36 blocks would do, but 4 are taken
        lambda view, n: (
            Plan([Prefill([(0, 4)])]) if n == 1 else Plan([Prefill([(2, 30)])]) if n == 2 else CHUNK_3
        ),
        "request 2 needs more KV blocks than are free",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_plan_that_cannot_be_carried_out_is_refused(case: str) -> None:
    answer, sentence = REFUSED[case]
    load = workload([0.0, 0.0, 0.0], [4, 4, 33], [3, 3, 1])
    policy = Scripted(answer if callable(answer) else lambda view, n: answer)
    with pytest.raises(PlanError, match=sentence):
        run(load, policy, num_gpu_blocks=36, block_size=1)


def test_decodes_without_blocks_are_refused() -> None:
    load = workload([0.0, 0.0], [4, 4], [3, 3])
    with pytest.raises(PlanError, match="needs more KV blocks than are free"):
        run(load, Scripted(after_prefill(Plan([Decode()]))), num_gpu_blocks=9, block_size=1)


@pytest.mark.parametrize(
    ("plans", "sentence"),
    [
        ([Plan([Prefill([(1, 4)])])], "request 1 has a chunk but is on another replica"),
        (
            [Plan([Prefill([(0, 4)])]), Plan(), Plan([Prefill([(1, 4)])], preempt=[0])],
            "request 0 is to be preempted but is on another replica",
        ),
    ],
)
def test_a_request_of_another_replica_is_out_of_reach(plans: list[Plan], sentence: str) -> None:
    # both arrive at once, one on each replica, which then decide in turn
    load = workload([0.0, 0.0], [4, 4], [9, 9])
    policy = Scripted(lambda view, n: plans[n - 1])
    with pytest.raises(PlanError, match=sentence):
        run(load, policy, replicas=2, router="least-outstanding")


def test_a_policy_that_schedules_nothing_is_diagnosed() -> None:
    with pytest.raises(StalledError, match="policy 'scripted' leaves 2 requests waiting"):
        run(workload([0.0, 1.0], [4, 4], [3, 3]), Scripted(lambda view, n: Plan()))


def test_a_policy_that_never_decodes_is_diagnosed() -> None:
    answer = after_prefill(Plan())
    with pytest.raises(StalledError, match="policy 'scripted' leaves 0 requests waiting and 2 running"):
        run(workload([0.0, 0.0], [4, 4], [3, 3]), Scripted(answer))


def test_a_policy_may_wait_for_an_arrival() -> None:
    def pairs(view: View, n: int) -> Plan:
        if len(view.running):
            return Plan([Decode()])
        if len(view.waiting) < 2:
            return Plan()
        return Plan([Prefill([(i, 4) for i in view.waiting.id])])

    frame = run(workload([0.0, 1.0], [4, 4], [3, 3]), Scripted(pairs)).requests
    assert frame["first_scheduled_s"].tolist() == [1.0, 1.0]


def test_requests_may_sit_out() -> None:
    def oldest_only(view: View, n: int) -> Plan:
        if len(view.waiting):
            return Plan([Prefill([(i, 4) for i in view.waiting.id])])
        return Plan([Decode([view.running.id[0]])], repeat_for=50)

    records = run(workload([0.0, 0.0], [4, 4], [5, 5]), Scripted(oldest_only))
    assert records.steps is not None
    assert records.steps["decode_batch"].tolist() == [0] + [1] * 8
    first, second = records.requests["finish_s"]
    assert first < second
    assert records.requests["max_itl_s"][1] > first - records.requests["first_token_s"][0]


def test_a_view_shows_what_a_scheduler_could_know_and_not_the_output() -> None:
    seen: list[Batch] = []
    shown: list[list[int]] = []

    def look(view: View, n: int) -> Plan:
        for batch in (view.waiting, view.running):
            seen.append(batch)
            if len(batch):  # a column is what it is when first looked at
                shown.append([int(batch.computed_tokens[0]), int(batch.generated_tokens[0])])
        assert (view.num_blocks, view.block_size, view.sms) == (400, 16, COST.gpu.sms)
        assert view.blocks_for(17) == 2
        return Plan([Prefill([(0, 4)])]) if n == 1 else Plan([Decode()])

    load = workload([0.25], [4], [3])
    asked = [31]
    object.__setattr__(load, "max_new_tokens", np.array(asked, np.int32))
    run(load, Scripted(look))
    columns = {name for name in vars(Batch) if not name.startswith("_")}
    assert columns == {
        *("id", "arrival_s", "prompt_tokens", "computed_tokens", "target_tokens", "left_tokens"),
        *("generated_tokens", "max_new_tokens", "slo_class", "priority", "decoding"),
    }
    for batch in seen:
        for name in columns - {"id", "generated_tokens"}:
            assert not len(batch) or 3 not in getattr(batch, name).tolist()
    assert shown == [[0, 0], [4, 1], [5, 2]]
    assert all(b.max_new_tokens.tolist() == asked for b in seen if len(b))


def test_every_strategy_names_a_built_in() -> None:
    assert set(ENTRIES) <= {info.name for info in list_policies()}

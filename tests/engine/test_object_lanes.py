"""Policies in plain Python on two lanes: a rule gives the same run as the built-in, mistakes have their sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_cost import lane_cost, lane_tables
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload, workloads

from sim.cost.shapes import Launch
from sim.cost.traits import TraitModel
from sim.engine import Decode, Mixed, Plan, Prefill, RunRecords, View, simulate
from sim.errors import PlanError, SimctlError
from sim.metrics.conservation import check_conservation
from sim.policies import make_policy
from sim.workload.workload import Workload

COST = lane_cost(rough_tables(TICK, wobble=True), (1.5, 1.25), max_context=256)
SPLIT = (64, 68)


class ObjectSplit:
    """static-split's rule: whole prompts first come first served, decodes beside them, the youngest evicted."""

    label = "split"
    lanes = 2
    sm_sets = (SPLIT,)

    def __init__(self, tokens: int, seqs: int, group: int) -> None:
        self.max_num_seqs, self.max_num_batched_tokens = seqs, 256
        self.tokens, self.group = tokens, group

    def plan(self, view: View) -> Plan:
        prefill, decode = view.lanes
        launches: list[Any] = []
        victims: list[int] = []
        running, free = view.running, view.free_blocks
        if not decode.busy and running.decoding.any():
            free -= view.decode_blocks
            held = [view.blocks_for(int(n)) for n in running.computed_tokens]
            for k in reversed(range(len(running))):
                if free < 0 and running.decoding[k]:
                    needs = int(running.computed_tokens[k]) % view.block_size == 0
                    victims.append(int(running.id[k]))
                    free += held[k] + needs
            launches.append(Decode(sms=SPLIT[1]))
        if not prefill.busy:
            done = view.open_prefill.layers_done if view.open_prefill else 0
            last = view.layers if self.group == 0 else min(view.layers, done + self.group)
            chunks = [] if view.open_prefill or victims else self.admit(view, free)
            if view.open_prefill or chunks:
                launches.append(Prefill(chunks, layers=(done, last), sms=SPLIT[0]))
        return Plan(launches, preempt=victims)

    def admit(self, view: View, free: int) -> list[tuple[int, int]]:
        chunks: list[tuple[int, int]] = []
        tokens, running = 0, len(view.running)
        for i, size in zip(view.waiting.id.tolist(), view.waiting.target_tokens.tolist(), strict=True):
            free -= view.blocks_for(size)
            if running == self.max_num_seqs or (tokens and tokens + size > self.tokens) or free < 0:
                break
            chunks.append((i, size))
            tokens, running = tokens + size, running + 1
        return chunks


def run(load: Workload, policy: Any, **options: Any) -> RunRecords:
    settings = {"num_gpu_blocks": 400, "block_size": 16, "jitter": False, "record_steps": True, **options}
    records = simulate(load, policy, COST, **settings)
    check_conservation(records)
    return records


@given(
    load=workloads(),
    tokens=st.sampled_from([16, 64, 256]),
    seqs=st.integers(1, 8),
    group=st.sampled_from([0, 1, 5, 31]),
    tight=st.booleans(),
)
@settings(max_examples=25)
def test_a_split_as_an_object(load: Workload, tokens: int, seqs: int, group: int, tight: bool) -> None:
    knobs = {"max_prefill_tokens": tokens, "max_num_seqs": seqs, "layer_step": group, "watermark": 0.0}
    sets = {"prefill_sms": SPLIT[0], "decode_sms": SPLIT[1]}
    longest = int((load.prompt_tokens + load.output_tokens).max())
    pool = {"num_gpu_blocks": -(-longest // 4) if tight else 400, "block_size": 4}
    mine = run(load, ObjectSplit(tokens, seqs, group), **pool)
    built_in = run(load, make_policy({"name": "static-split", **knobs, **sets}), **pool)
    assert mine.requests.equals(built_in.requests)
    assert mine.steps is not None
    assert mine.steps.equals(built_in.steps)
    assert np.array_equal(mine.itl_s, built_in.itl_s)


class Scripted:
    """Answers by a function of the view and the number of the decision."""

    label = "scripted"
    lanes = 2
    max_num_seqs = 4
    max_num_batched_tokens = 64
    sm_sets = ((64, 68), (96, 36), (132, 36))

    def __init__(self, answer: Callable[[View, int], Any]) -> None:
        self.answer, self.asked = answer, 0

    def plan(self, view: View) -> Any:
        self.asked += 1
        return self.answer(view, self.asked)


OPEN = Plan([Prefill([(0, 4)], layers=(0, 8), sms=64)])
REFUSED: dict[str, tuple[list[Any], str]] = {
    "two prefills": ([Plan([Prefill([(0, 4)]), Prefill([(1, 4)])])], "one Prefill and one Decode at most"),
    "mixed and decode": ([Plan([Mixed([(0, 4)]), Decode()])], "one Prefill and one Decode at most"),
    "repeat": (
        [Plan([Decode()], repeat_for=3)],
        "`repeat_for` is for one lane; on two, Decode takes `steps`",
    ),
    "steps": ([Plan([Prefill([(0, 4)])]), Plan([Decode(steps=65)])], "a decode has 1 to 64 steps, not 65"),
    "layers from the middle": (
        [Plan([Prefill([(0, 4)], layers=(4, 8))])],
        "layers 4 to 8; the next are 0 to at",
    ),
    "layers beyond": (
        [Plan([Prefill([(0, 4)], layers=(0, 99))])],
        "layers 0 to 99; the next are 0 to at most 32",
    ),
    "no layers": ([Plan([Prefill([(0, 4)], layers=(0, 0))])], "layers 0 to 0; the next are"),
    "layers again": ([OPEN, Plan([Prefill(layers=(0, 8))])], "layers 0 to 8; the next are 8 to at most 32"),
    "other chunks": ([OPEN, Plan([Prefill([(1, 4)])])], r"the open prefill has the chunks \[\(0, 4\)\]"),
    "mixed beside layers": ([OPEN, Plan([Mixed([(1, 4)])])], "cannot begin while a prefill has layers left"),
    "unknown set": (
        [Plan([Prefill([(0, 4)], sms=63)])],
        "on 63 SMs: no such set; there are 36, 64, 68, 96, 132",
    ),
    "undeclared pair": (
        [Plan([Prefill([(0, 4)])]), Plan([Prefill([(1, 4)], sms=96), Decode(sms=68)])],
        "prefill on 96 SMs beside decode on 68: no declared pair",
    ),
    "busy": (
        [Plan([Prefill([(0, 4)])]), Plan([Decode(sms=68)]), Plan([Decode(sms=68)])],
        "a decode cannot start: the decode lane is busy",
    ),
    "pair with what runs": (
        [Plan([Prefill([(0, 4)])]), Plan([Decode(sms=68)]), Plan([Prefill([(2, 4)], sms=96)])],
        "prefill on 96 SMs beside decode on 68: no declared pair",
    ),
    "evict in flight": (
        [Plan([Prefill([(0, 4)])]), Plan([Decode()]), Plan([Prefill([(2, 4)])], preempt=[0])],
        "request 0 is to be preempted but is in flight",
    ),
    "evict the open": ([OPEN, Plan([], preempt=[0])], "request 0 is to be preempted but is in flight"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_plan_that_cannot_be_carried_out_is_refused(case: str) -> None:
    plans, sentence = REFUSED[case]
    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK))
    # the third request comes while the first decodes
    load = workload([0.0, 0.0, 20 * TICK], [4, 4, 4], [9, 3, 1])
    policy = Scripted(lambda view, n: plans[n - 1])
    with pytest.raises(PlanError, match=sentence):
        simulate(load, policy, cost, num_gpu_blocks=100, block_size=16, jitter=False)


def test_choices_of_two_lanes_are_refused_on_one() -> None:
    class One(Scripted):
        lanes = 1

    load = workload([0.0], [4], [3])
    for plan, sentence in (
        (Plan([Prefill([(0, 4)], sms=64)]), "declare `lanes = 2`"),
        (Plan([Prefill([(0, 4)], layers=(0, 2))]), "declare `lanes = 2`"),
        (Plan([Decode(steps=2)]), "here the same is `repeat_for`"),
    ):
        with pytest.raises(PlanError, match=sentence):
            simulate(load, One(lambda view, n, plan=plan: plan), COST)


def test_sets_that_the_mechanism_cannot_make_are_refused() -> None:
    class Odd(Scripted):
        sm_sets = ((63, 69),)

    with pytest.raises(SimctlError, match="63 SMs are no set that 'green' can make on h200-sxm"):
        simulate(workload([0.0], [4], [3]), Odd(lambda view, n: Plan()), COST)


def test_the_view_shows_what_the_lanes_are_doing() -> None:
    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK))
    seen: list[Any] = []

    def answer(view: View, n: int) -> Plan:
        prefill, decode = view.lanes
        seen.append((prefill, decode, view.open_prefill))
        launches: list[Any] = []
        if not decode.busy and view.running.decoding.any():
            launches.append(Decode(sms=68))
        if not prefill.busy and (view.open_prefill or len(view.waiting)):
            done = view.open_prefill.layers_done if view.open_prefill else 0
            chunks = [] if view.open_prefill else [(int(view.waiting.id[0]), 4)]
            launches.append(Prefill(chunks, layers=(done, done + 16), sms=64))
        return Plan(launches, reason=7)

    records = simulate(
        *(workload([0.0, 20 * TICK], [4, 4], [4, 1]), Scripted(answer), cost),
        num_gpu_blocks=100,
        jitter=False,
        record_steps=True,
    )
    first, half, beside = seen[0], seen[1], seen[3]
    assert (first[0].kind, first[0].sms, first[0].busy, first[2]) == ("", 0, False, None)
    assert (half[0].kind, half[0].sms, half[0].layers, half[0].busy) == ("prefill", 64, 16, False)
    assert (half[2].chunks, half[2].layers_done) == (((0, 4),), 16)
    # the second prompt arrives while the first request decodes
    assert (beside[1].kind, beside[1].sms, beside[1].busy) == ("decode", 68, True)
    assert (beside[1].batch, beside[1].context) == (1, 5)
    assert beside[1].started_s == 16 * TICK
    steps = records.steps
    assert steps is not None
    assert steps[steps["lane"] == 0]["layers"].tolist() == [16] * 4
    assert set(steps["reason"]) == {7}


def test_every_split_of_the_mechanism_is_there_unless_some_are_declared() -> None:
    seen: list[Any] = []

    class Free(Scripted):
        sm_sets = None

    def answer(view: View, n: int) -> Plan:
        seen.append((view.partition_sizes, view.sm_sets))
        return Plan([Mixed([(0, 4)])] if n == 1 else [Decode(sms=68)])

    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK))
    simulate(workload([0.0], [4], [3]), Free(answer), cost, num_gpu_blocks=100)
    sizes, pairs = seen[0]
    assert sizes == list(range(8, 132, 8))
    assert pairs == tuple((size, 132 - size) for size in sizes)


def test_steps_ahead_and_requests_that_sit_out() -> None:
    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK))

    def answer(view: View, n: int) -> Plan:
        if len(view.waiting):
            return Plan([Prefill([(int(i), 4) for i in view.waiting.id])])
        return Plan([Decode([view.running.id[0]], steps=3)])

    policy = Scripted(answer)
    records = simulate(
        workload([0.0, 0.0], [4, 4], [7, 4]), policy, cost, num_gpu_blocks=100, record_steps=True
    )
    assert records.steps is not None
    assert records.steps["decode_batch"].tolist() == [0] + [1] * 9
    assert policy.asked == 4


def test_what_is_believed_of_a_launch_is_what_it_takes_under_the_oracle() -> None:
    cost = real_cost()
    expected: list[float] = []

    def answer(view: View, n: int) -> Plan:
        if len(view.waiting):
            launch: Any = Prefill([(0, 600)], layers=(0, 32), sms=64)
        else:
            launch = Decode(sms=68)
        expected.append(view.seconds(launch))
        return Plan([launch])

    class Large(Scripted):
        max_num_batched_tokens = 1024

    load = workload([0.0], [600], [20])
    records = simulate(load, Large(answer), cost, jitter=False, estimator="oracle")
    assert sum(expected) == pytest.approx(records.totals["gpu_s"], rel=1e-9)
    assert len(expected) == 20


def test_slowdowns_are_believed_for_declared_pairs() -> None:
    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK), (1.5, 1.25))
    seen: list[Any] = []

    def answer(view: View, n: int) -> Plan:
        if n == 1:
            return Plan([Prefill([(0, 4)])])
        if n == 2:
            seen.append(view.slowdown(Prefill([(1, 4)], sms=64), Decode(sms=68)))
            with pytest.raises(KeyError, match="none of the declared"):
                view.slowdown(Prefill([(1, 4)], sms=96), Decode(sms=68))
            with pytest.raises(KeyError, match="no SM set of 50"):
                view.seconds(Decode(sms=50))
        if view.lanes[1].busy:
            return Plan()
        return Plan([Decode(sms=68), *([Prefill([(1, 4)], sms=64)] if n == 2 else [])])

    simulate(
        workload([0.0, 0.0], [4, 4], [3, 1]), Scripted(answer), cost, num_gpu_blocks=100, estimator="oracle"
    )
    assert seen == [(pytest.approx(1.5), pytest.approx(1.25))]


def test_traits_of_a_launch() -> None:
    traits = TraitModel(real_cost())  # llama-3.1-8b: 32 query heads, 8 KV heads of 128, FFN 14336
    prefill = traits(Launch(chunks=((1000, 0),)))
    assert (prefill.prefill_ctas, prefill.decode_ctas) == (8 * 32, 0)
    assert prefill.gemm_ctas == 8 * 2 * 14336 // 128  # gate and up
    assert prefill.smem_bytes == 64 * 1024  # (128 + 2 x 64) x 128 x 2 bytes
    assert prefill.attention_waves(132) == 2
    assert traits.ctas_per_sm(prefill) == 3
    decode = traits(Launch(decode_batch=54, decode_context_sum=54 * 1000, graph=True))
    assert decode.decode_ctas == 54 * 8
    # a decode reads weights and KV: few FLOPs a byte; a prefill has hundreds
    assert decode.hbm_bytes == pytest.approx(15e9 + 54e3 * 131072, rel=0.05)
    assert decode.intensity < 60 < 500 < prefill.intensity
    # layers add up to the whole
    parts = [traits(Launch(chunks=((1000, 0),), layers=span)) for span in ((0, 10), (10, 32))]
    assert sum(part.flops for part in parts) == pytest.approx(prefill.flops)
    assert sum(part.hbm_bytes for part in parts) == pytest.approx(prefill.hbm_bytes)
    assert traits(Launch()).intensity == 0.0


def test_traits_agree_with_the_cost_model() -> None:
    cost = real_cost()
    traits = TraitModel(cost)
    for launch in (
        Launch(chunks=((512, 100), (300, 0)), decode_batch=20, decode_context_sum=9000),
        Launch(decode_batch=64, decode_context_sum=64000),
    ):
        price = cost.solo(launch)
        assert traits(launch).flops == pytest.approx(price.flops, rel=1e-6)
        assert traits(launch).hbm_bytes == pytest.approx(price.hbm_bytes, rel=0.02)

"""DuetServe: the best (split, k) against all of them, the target decides, both sides join, knobs, laws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knob_frame import DOWN, UP, Moves
from lane_cost import lane_tables
from lane_frame import busy_load, check_laws, check_move, lane
from split_cost import split_cost
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload, workloads

from sim.cost.pairs import compile_pairs, pair_factor
from sim.cost.step import decode_pass_s
from sim.engine import RunRecords, simulate
from sim.engine.deployment import GREEN, Deployment, Target
from sim.engine.layout import BLOCK, FREE, N_CHUNKS, N_READY, STEP
from sim.policies import list_policies, make_policy
from sim.policies.duetserve import NO_SPLIT, PARTS, SPLIT, SPLITS, DuetServePolicy, choose, steps_that_fit
from sim.policies.parts.predict import pass_s, prompts_attention_s
from sim.workload.workload import Workload

H200 = Deployment(10_000, 16, 4096, "h200-sxm", sms=132, layers=32)


def believed(policy: DuetServePolicy, pairs: bool = False) -> tuple[Any, Any, Any]:
    """Prices, slowdowns and integer parameters of a policy on the data sheet's GPU, as lists."""
    cost, sets = real_cost(), policy.sm_sets(H200)
    partitions = policy.price_partitions(H200)[1:]
    b = cost.compile(
        max_tokens=8192, max_seqs=256, max_context=4096, partitions=partitions, compiled=False, jitter=False
    )
    y = compile_pairs(cost, partitions, sets if pairs else sets[:1])
    return b, y, policy.parameters(H200)[0]


def batch(chunks: list[tuple[int, int]]) -> tuple[Any, Any]:
    """Requests with so much computed, and a plan with a chunk of each."""
    q = SimpleNamespace(computed=[done for _, done in chunks])
    iv = [0] * 64
    iv[N_CHUNKS] = len(chunks)
    return q, SimpleNamespace(iv=iv, chunk_id=list(range(len(chunks))), chunk_tokens=[n for n, _ in chunks])


@pytest.mark.parametrize("aware", [False, True])
def test_the_choice_is_the_best_of_all(aware: bool) -> None:
    policy = make_policy({"name": "duetserve", "contention_aware": aware})
    b, y, ki = believed(policy, pairs=aware)
    rng = np.random.default_rng(1)
    splits = range(ki[SPLITS])
    for case in range(60):
        chunks = [(int(rng.integers(1, 2500)), int(rng.integers(0, 1500))) for _ in range(rng.integers(1, 4))]
        d, most = int(rng.integers(1, 200)), int(rng.integers(1, 17))
        context = d * int(rng.integers(20, 3000))
        tau = float(rng.choice([0.006, 0.01, 0.02, 0.1]))
        q, a = batch(chunks)
        tokens, history = sum(n for n, _ in chunks), sum(done for _, done in chunks) // len(chunks)
        best, rates = 0.0, {}
        for s in splits:
            p_part, d_part = ki[PARTS + s], ki[PARTS + ki[SPLITS] + s]
            t_d = decode_pass_s(b, d_part, d, context)
            attention = prompts_attention_s(q, b, p_part, a.chunk_id, a.chunk_tokens, len(chunks))
            t_p = pass_s(b, p_part, attention, tokens, len(chunks), 0, 0)
            if aware:
                config = y.config[p_part * len(y.sms) + d_part]
                t_d *= pair_factor(y, y.factor_decode, config, tokens, history, d, context // d)
                t_p *= pair_factor(y, y.factor_prefill, config, tokens, history, d, context // d)
            for k in range(1, most + 1):
                rates[s, k] = (k * d + tokens) / max(k * t_d, t_p) if t_d <= tau else -1.0
        best = max(rates.values())
        found = choose(q, a, b, y, ki, tau, d, context, most)
        if best < 0:
            assert found == (-1, 1), case
        else:
            assert rates[found] == best, case


def in_ticks(arrivals: list[int], prompts: list[int], outputs: list[int]) -> Workload:
    return workload([t * TICK for t in arrivals], prompts, outputs)


TOKEN, STEP_TICKS = 4, 64


def run(load: Workload, knee: int = 24, **more: Any) -> RunRecords:
    """A decode step takes 64 ticks from `knee` SMs on; a prompt token 4 on all SMs; tau 500 ticks."""
    knobs = {key: more.pop(key) for key in list(more) if key in DuetServePolicy.knobs}
    targets = (Target(itl_s=more.pop("tau", 500) * TICK),)
    cost = more.pop("cost", None) or split_cost(lane_tables(TOKEN * TICK, STEP_TICKS * TICK), knee)
    policy = make_policy({"name": "duetserve", "max_num_seqs": 16, "watermark": 0.0, **knobs})
    blocks = more.pop("blocks", 2000)
    options = {"jitter": False, "record_steps": True, "estimator": "oracle", "targets": targets, **more}
    return simulate(load, policy, cost, num_gpu_blocks=blocks, block_size=16, **options)


def test_a_pass_is_mixed_until_it_would_miss_the_target() -> None:
    # the second prompt: 4 x (n + 1) ticks with the decode aboard, 500 allowed
    for tokens, split in ((120, False), (130, True)):
        records = run(in_ticks([0, 100], [8, tokens], [40, 2]))
        prefill = lane(records, 0)
        assert prefill["decode_batch"].tolist() == [0, 0 if split else 1]
        assert prefill["reason"].tolist() == [0, SPLIT if split else 0]
        assert (prefill["sms"].iloc[1] < 132) == split


def test_the_split_by_hand() -> None:
    # t_d is 64 from 24 SMs on, t_p = 4 x 400 x 132 / S_p: decode's least set that keeps the target is the best
    records = run(in_ticks([0, 100], [8, 400], [60, 2]), tau=70)
    second = lane(records, 0).iloc[1]
    assert second["sms"] == 132 - 24
    seconds = second["end_s"] - second["start_s"]
    assert seconds == pytest.approx(1600 * TICK * 132 / 108 + GREEN.switch_s)
    beside = lane(records, 1)
    beside = beside[(beside["start_s"] >= second["start_s"]) & (beside["start_s"] < second["end_s"] - TICK)]
    assert set(beside["sms"]) == {24}
    # k = 16 of the at most 16, though 30 would fit
    assert len(beside) == 16
    assert (
        run(in_ticks([0, 100], [8, 400], [60, 2]), tau=70, max_lookahead=64).totals["decisions"]
        < (records.totals["decisions"])
    )


def test_both_sides_join() -> None:
    """Nothing starts on one lane while the other still runs, but for the steps launched ahead."""
    rng = np.random.default_rng(4)
    n = 60
    load = in_ticks(
        np.cumsum(rng.integers(1, 600, n)).tolist(),
        rng.integers(1, 300, n).tolist(),
        rng.integers(1, 40, n).tolist(),
    )
    records = run(load)
    prefill, decode = lane(records, 0), lane(records, 1)
    assert (prefill["reason"] == SPLIT).sum() > 10
    for _, one in prefill.iterrows():
        inside = decode[(decode["start_s"] < one["end_s"]) & (decode["end_s"] > one["start_s"])]
        if len(inside):
            # all of them are one chain, which starts with the prefill
            assert inside["start_s"].iloc[0] == one["start_s"]
            assert inside["start_s"].tolist()[1:] == inside["end_s"].tolist()[:-1]


def test_who_is_done_stays_to_the_end_of_the_chain() -> None:
    records = run(in_ticks([0, 0, 500], [8, 8, 400], [11, 60, 1]), tau=400)
    second = lane(records, 0).iloc[-1]
    assert second["reason"] == SPLIT
    chain = lane(records, 1)
    chain = chain[(chain["start_s"] >= second["start_s"]) & (chain["start_s"] < second["end_s"])]
    first = records.requests["finish_s"][0]
    assert second["start_s"] < first < chain["end_s"].iloc[-1]
    assert set(chain["decode_batch"]) == {2}


def test_without_a_split_that_keeps_the_target_the_pass_is_mixed() -> None:
    # from 120 SMs on a step would take 64 ticks, but 60 are the target
    records = run(in_ticks([0, 100], [8, 400], [60, 2]), tau=60)
    assert lane(records, 0)["reason"].tolist() == [0, NO_SPLIT]
    assert lane(records, 0)["decode_batch"].tolist() == [0, 1]


def test_the_target_comes_from_the_knob_the_experiment_or_the_default() -> None:
    def tau(knob: Any, *targets: Target) -> float:
        deployment = Deployment(100, 16, 4096, "h200-sxm", sms=132, targets=targets or (Target(),))
        return make_policy({"name": "duetserve", "tbt_ms": knob}).parameters(deployment)[1][0]

    assert tau(None) == 0.1
    assert tau(None, Target(tpot_s=0.05)) == 0.05
    assert tau(None, Target(tpot_s=0.05, itl_s=0.2)) == 0.2
    assert tau(None, Target(itl_s=0.2), Target(itl_s=0.03)) == 0.03
    assert tau(20, Target(itl_s=0.2)) == 0.02


@given(
    ready=st.lists(st.integers(1, 40), max_size=4),
    members=st.lists(st.integers(1, 40), max_size=4),
    size=st.sampled_from([1, 2, 16]),
    free=st.integers(0, 12),
)
def test_steps_ahead_take_no_more_blocks_than_are_free(
    ready: list[int], members: list[int], size: int, free: int
) -> None:
    """Against growing each request token by token; the first step has its blocks."""
    phase = [0] * size
    iv = [0] * 64
    iv[BLOCK], iv[STEP], iv[N_READY], iv[FREE] = size, 7, len(ready), free
    for tokens in members:
        phase[(7 + -tokens % size) % size] += 1
    r = SimpleNamespace(iv=iv, block_phase=phase, ready=list(range(len(ready))))
    q = SimpleNamespace(computed=ready)
    found = steps_that_fit(q, r, free, 9)
    need, fits = 0, 1
    for k in range(1, 9):
        need += sum(1 for tokens in (*ready, *members) if (tokens + k) % size == 0)
        if need > free:
            break
        fits = k + 1
    assert found == fits


MOVES = [
    Moves("duetserve", "token_budget", 2048, "largest_prefill", DOWN),
    Moves("duetserve", "max_num_seqs", 20, "largest_batch", DOWN),
    Moves("duetserve", "watermark", 0.2, "kv_tokens_held", DOWN),
    Moves("duetserve", "tbt_ms", 15, "split_passes", UP),
    Moves("duetserve", "max_lookahead", 1, "mean_tpot", UP, {"tbt_ms": 20}),
    Moves("duetserve", "splits", 1, "split_passes", DOWN, {"tbt_ms": 20}),
]


@pytest.mark.parametrize("row", MOVES, ids=str)
def test_every_knob_moves_what_it_is_about(row: Moves) -> None:
    check_move(row, num_gpu_blocks=3000)


def test_contention_that_is_expected_gives_decode_more() -> None:
    # t_d = 64 x 96 / S_d within 100 ticks: 64 SMs alone, 80 where it is a quarter slower beside a prefill
    load, sms = in_ticks([0, 100], [8, 400], [60, 2]), {}
    for aware in (False, True):
        cost = split_cost(lane_tables(TOKEN * TICK, STEP_TICKS * TICK), 96, (1.0, 1.25))
        sms[aware] = lane(run(load, tau=100, cost=cost, contention_aware=aware), 1)["sms"].min()
    assert sms == {False: 64, True: 80}


def test_the_list_of_knobs_is_complete() -> None:
    assert {row.knob for row in MOVES} | {"contention_aware"} == set(DuetServePolicy.knobs)
    assert "duetserve" in {info.name for info in list_policies()}


@pytest.mark.parametrize("blocks", [None, 700])
def test_overload_is_served_to_the_end(blocks: int | None) -> None:
    policy = make_policy({"name": "duetserve", "tbt_ms": 20})
    records = simulate(busy_load(), policy, real_cost(), record_steps=True, num_gpu_blocks=blocks)
    check_laws(records)
    assert (records.requests["preemptions"].sum() > 0) == (blocks is not None)
    assert (lane(records, 0)["reason"] == SPLIT).any()


@given(load=workloads(most=12), data=st.data())
@settings(max_examples=60)
def test_every_run_obeys_the_laws(load: Workload, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 16]))
    largest = int(np.max(-(-(load.prompt_tokens.astype(int) + load.output_tokens) // size)))
    policy = make_policy(
        {
            "name": "duetserve",
            "token_budget": data.draw(st.sampled_from([4, 32, 256])),
            "max_num_seqs": data.draw(st.integers(1, 8)),
            "watermark": 0.0,
            "max_lookahead": data.draw(st.sampled_from([1, 3, 16])),
            "contention_aware": data.draw(st.booleans()),
            "splits": data.draw(st.sampled_from([1, 4, 16])),
        }
    )
    cost = split_cost(rough_tables(TICK, wobble=True), 60, (1.3, 1.2))
    blocks = data.draw(st.one_of(st.integers(largest, 2 * largest + 2), st.just(20 * largest)))
    targets = (Target(itl_s=data.draw(st.sampled_from([1, 600, 1500, 1e9])) * TICK),)
    records = simulate(
        load,
        policy,
        cost,
        num_gpu_blocks=blocks,
        block_size=size,
        record_steps=True,
        targets=targets,
        estimator="oracle",
    )
    check_laws(records)

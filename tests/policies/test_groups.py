"""MuxWise and SGLang's PD multiplexing: tables of splits, the choice of a group, slices, polling, preemption, laws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fingerprint import fingerprint
from hypothesis import given, settings
from hypothesis import strategies as st
from knob_frame import DOWN, UP, Moves
from lane_cost import lane_tables
from lane_frame import busy_load, check_laws, check_move, lane
from split_cost import split_cost
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload, workloads

from sim.cost.pairs import compile_pairs, pair_factor, worst_factor
from sim.engine import RunRecords, simulate
from sim.engine.deploying import deploy
from sim.engine.deployment import MPS, Deployment, Target
from sim.errors import SimctlError
from sim.policies import list_policies, make_policy
from sim.policies.muxwise import ALONE, KEPT, MISSED
from sim.policies.pdmux import choose_group, divide_sm
from sim.workload.workload import Workload

A100 = Deployment(10_000, 16, 4096, "a100-80gb-sxm", sms=108, layers=32, compute_capability=8.0)
H200 = Deployment(10_000, 16, 4096, "h200-sxm", sms=132, layers=32)
TOKEN, STEP = 4, 64
FREE = {"decode_launch_ms": 0.0, "prefill_overhead": 0.0, "sync_us": 0.0}


def run(entry: dict[str, Any], load: Workload | None = None, cost: Any = None, **options: Any) -> RunRecords:
    settings = {"jitter": False, "record_steps": True, "estimator": "oracle", **options}
    return simulate(load or busy_load(), make_policy(entry), cost or real_cost(), **settings)


def beside(records: RunRecords) -> list[tuple[int, int]]:
    """(prefill SMs, decode SMs) of every two launches that overlapped in time."""
    prefill, decode = lane(records, 0), lane(records, 1)
    found = []
    for _, step in decode.iterrows():
        both = (prefill["start_s"] < step["end_s"]) & (prefill["end_s"] > step["start_s"])
        both &= prefill["replica"] == step["replica"]
        found += [(int(sms), int(step["sms"])) for sms in prefill.loc[both, "sms"]]
    return found


# the splits


@pytest.mark.parametrize(
    ("total", "capability", "splits"),
    [
        (108, 8, [(84, 24), (78, 30), (72, 36), (66, 42), (60, 48), (54, 54)]),
        (132, 9, [(112, 20), (104, 28), (96, 36), (88, 44), (80, 52), (72, 60)]),
        (78, 9, [(56, 22), (48, 30), (40, 38)]),
    ],
)
def test_sglangs_table_of_splits(total: int, capability: int, splits: list[tuple[int, int]]) -> None:
    assert divide_sm(total, capability, 6) == splits


def test_fewer_groups_are_spread_over_the_same_range() -> None:
    assert divide_sm(132, 9, 3) == [(104, 28), (88, 44), (72, 60)]
    assert make_policy({"name": "pdmux", "sm_group_num": 5}).sm_sets(H200) == divide_sm(132, 9, 3)


def test_the_split_of_a_decode_batch() -> None:
    ki = [0, 0, 0, 6, 0, *range(12), 36]
    found = [choose_group(ki, 17, batch) for batch in (0, 1, 5, 6, 11, 12, 18, 24, 30, 35, 36, 500)]
    assert found == [1, 1, 1, 1, 1, 2, 3, 4, 5, 5, 6, 6]


def test_the_split_of_a_decode_batch_by_hand() -> None:
    rows = [[112, 20, 1], [104, 28, 5], [96, 36, 10], [80, 52, 15], [64, 68, 20], [56, 76, 25]]
    policy = make_policy({"name": "pdmux", "manual_divisions": rows})
    ki, _ = policy.parameters(H200)
    own = 5 + 2 * len(rows)
    found = [choose_group(ki, own, batch) for batch in (1, 4, 5, 9, 10, 14, 15, 19, 20, 24, 25, 300)]
    assert found == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert policy.sm_sets(H200) == [(p, d) for p, d, _ in rows]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("112", "it takes a list"),
        ([[112, 20]], "rows of three whole numbers above 0"),
        ([[112, 20, 0]], "rows of three whole numbers above 0"),
        ([[112, 20, 1.5]], "rows of three whole numbers above 0"),
        ([[112, 28, 1]], r"112 \+ 28 SMs is no split that 'green' can make of the 132 of h200-sxm"),
        ([[110, 22, 1]], r"110 \+ 22 SMs is no split"),
        ([[112, 20, 4]], r"the thresholds \[4\] must rise from 1 on"),
        ([[112, 20, 1], [104, 28, 9], [96, 36, 5]], r"the thresholds \[1, 9, 5\] must rise"),
    ],
)
def test_divisions_that_cannot_be_are_told(rows: Any, sentence: str) -> None:
    with pytest.raises(SimctlError, match=sentence):
        make_policy({"name": "pdmux", "manual_divisions": rows}).parameters(H200)


def test_muxwise_has_the_papers_partitions() -> None:
    policy = make_policy("muxwise")
    assert [d for _, d in policy.sm_sets(A100)] == [12, 28, 44, 60, 76]
    assert [d for _, d in policy.sm_sets(H200)] == [20, 36, 52, 68, 84, 100]
    assert [d for _, d in policy.sm_sets(replace(H200, sms=78))] == [14, 30, 46]


@pytest.mark.parametrize("name", ["muxwise", "pdmux"])
def test_sets_must_be_ready(name: str) -> None:
    with pytest.raises(SimctlError, match=r"a new set takes 5 s under mechanism 'mps'; use green"):
        make_policy(name).sm_sets(replace(H200, mechanism=MPS))


# muxwise: predictor, guard, dispatcher


def test_the_guard_is_the_largest_slowdown_of_the_cell() -> None:
    y = compile_pairs(real_cost(), [112, 20], [(112, 20)])
    rng = np.random.default_rng(2)
    for _ in range(300):
        q, h = int(rng.integers(1, 9000)), int(rng.integers(0, 9000))
        batch, context = int(rng.integers(1, 256)), int(rng.integers(100, 9000))
        worst = worst_factor(y, y.factor_decode, 0, q, h, batch, context)
        assert worst >= pair_factor(y, y.factor_decode, 0, q, h, batch, context) - 1e-12
    # at a corner of four cells it is at least the value there
    assert worst_factor(y, y.factor_decode, 0, 512, 0, 32, 1024) >= pair_factor(
        y, y.factor_decode, 0, 512, 0, 32, 1024
    )


@pytest.mark.parametrize("tbt_ms", [8.0, 12.0, 20.0, 50.0])
def test_decode_gets_the_fewest_sms_that_keep_its_slo(tbt_ms: float) -> None:
    """Believing the truth, the guard makes every step beside prefill last at most the SLO where any split can."""
    records = run({"name": "muxwise", "tbt_slo_ms": tbt_ms, **FREE})
    check_laws(records)
    steps = lane(records, 1)
    took = steps["end_s"] - steps["start_s"]
    kept, missed = steps["reason"] == KEPT, steps["reason"] == MISSED
    assert kept.sum() > 100 or tbt_ms < 10
    assert (took[kept] <= tbt_ms / 1e3 + 1e-5).all()
    assert set(steps.loc[missed, "sms"]) <= {100}
    assert set(steps.loc[steps["reason"] == ALONE, "sms"]) == {132}


def test_the_split_is_the_first_within_the_slo_by_hand() -> None:
    # a step takes 64 ticks on 66 SMs or more, else 64 x 66 / SMs: 211.2 on 20, 117.3 on 36, 81.2 on 52, 64 on 68
    cost = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 66, (1.0, 1.0))
    load = workload([0.0, 0.0, 32 * TICK], [4, 4, 2000], [40, 40, 1])
    for tbt, sms in ((300, 20), (200, 36), (117, 52), (100, 52), (70, 68), (64, 68), (60, 100)):
        records = run({"name": "muxwise", "tbt_slo_ms": 1e3 * tbt * TICK, **FREE}, load, cost)
        steps = lane(records, 1)
        assert steps[steps["reason"] != ALONE]["sms"].iloc[0] == sms, tbt
    # slowed by a half each: 81.2 becomes 121.8
    slow = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 66, (1.0, 1.5))
    for guard, sms in ((True, 68), (False, 52)):
        entry = {"name": "muxwise", "tbt_slo_ms": 1e3 * 110 * TICK, "guard": guard, **FREE}
        steps = lane(run(entry, load, slow), 1)
        assert steps[steps["reason"] != ALONE]["sms"].iloc[0] == sms


def test_prefill_is_granted_the_layers_that_fit_one_step() -> None:
    cost = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 66, (1.0, 1.0))
    load = workload([0.0, 32 * TICK], [8, 2000], [40, 1])
    records = run({"name": "muxwise", "tbt_slo_ms": 1e3 * 100 * TICK, **FREE}, load, cost)
    beside_decode = lane(records, 0).iloc[1:-1]
    # on 80 SMs the pass takes 2000 x 4 x 132 / 80 ticks, the step 64 x 66 / 52
    whole, step = 2000 * TOKEN * 132 / 80, STEP * 66 / 52
    assert set(beside_decode["sms"]) == {80}
    assert set(beside_decode["layers"]) == {math.ceil(step * cost.model.layers / whole)} == {1}
    short = workload([0.0, 32 * TICK], [8, 100], [40, 1])
    records = run({"name": "muxwise", "tbt_slo_ms": 1e3 * 100 * TICK, **FREE}, short, cost)
    assert lane(records, 0)["layers"].iloc[1] == math.ceil(step * cost.model.layers / (whole / 20)) == 4


def test_the_whole_pass_is_launched_where_nothing_decodes() -> None:
    records = run({"name": "muxwise", **FREE}, workload([0.0, 0.0], [500, 600], [1, 1]))
    passes = lane(records, 0)
    assert passes["layers"].tolist() == [32]
    assert passes["sms"].tolist() == [132]


@pytest.mark.parametrize("name", ["muxwise", "pdmux"])
def test_a_pass_is_seen_done_as_a_decode_step_ends(name: str) -> None:
    entry = {"name": name} if name == "pdmux" else {"name": name, "tbt_slo_ms": 20}
    records = run(entry, busy_load(n=80))
    ends = set(lane(records, 1)["end_s"])
    prefill, decode = lane(records, 0), lane(records, 1)
    polled = 0
    for first in records.requests["first_token_s"]:
        running = ((decode["start_s"] < first) & (decode["end_s"] > first)).any()
        assert not running, "a token appears in the middle of a decode step"
        polled += first in ends
    assert polled > 40
    assert not prefill["end_s"].isin(ends).all()


@pytest.mark.parametrize("name", ["muxwise", "pdmux"])
def test_groups_change_only_with_both_streams_done(name: str) -> None:
    entry = {"name": name} if name == "pdmux" else {"name": name, "tbt_slo_ms": 15}
    records = run(entry)
    splits = set(make_policy(entry).sm_sets(H200))
    assert set(beside(records)) <= splits
    assert len(set(beside(records))) >= 2


# muxwise: preemption


def test_a_short_prompt_preempts_a_pass_that_keeps_its_limit() -> None:
    cost = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 66, (1.0, 1.0))
    # a decode runs; a long pass opens beside it; a short prompt comes
    load = workload([0.0, 32 * TICK, 3000 * TICK], [8, 2000, 40], [400, 1, 1])
    entry = {"name": "muxwise", "tbt_slo_ms": 1e3 * 100 * TICK, **FREE}
    first = {}
    for key, more in {
        "off": {},
        "free": {"preempt": True},
        "tight": {"preempt": True, "ttft_slo_ms": 1e3 * 13_300 * TICK},
    }.items():
        records = run({**entry, **more}, load, cost)
        first[key] = records.requests["first_token_s"].to_numpy() / TICK
    assert first["off"][2] > first["off"][1]
    assert first["free"][2] < first["free"][1]
    # the pass is later by the short one, which would break its limit
    assert first["free"][1] > first["off"][1]
    assert first["tight"].tolist() == first["off"].tolist()


def test_preemption_keeps_the_limits_of_each_class() -> None:
    entry = {"name": "muxwise", "tbt_slo_ms": 20, "preempt": True, **FREE}
    load = busy_load(n=80, rate=12.0)
    no_limit, limit = (
        run(entry, load, targets=(Target(ttft_s=seconds),)).requests for seconds in (math.inf, 0.001)
    )
    never = run({**entry, "preempt": False}, load).requests
    assert not no_limit.equals(never)
    # who has missed the limit already is not made to wait any longer
    assert limit.equals(never)


# what tells them apart


def test_only_muxwise_looks_at_the_slo() -> None:
    load = busy_load(n=60)
    for name, same in (("pdmux", True), ("muxwise", False)):
        one, other = (run({"name": name}, load, targets=(Target(itl_s=seconds),)) for seconds in (0.01, 0.04))
        assert (fingerprint(one) == fingerprint(other)) is same


def test_only_muxwise_moves_sms_during_a_pass() -> None:
    """The batch grows during one long pass: pdmux keeps the split that it chose for it."""
    cost = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 66, (1.0, 1.0))
    n = 12
    arrivals = [0.0] * n + [60 * TICK]
    # the members finish one by one while the last prompt's pass runs
    load = workload(arrivals, [2] * n + [3000], [5 * k + 5 for k in range(n)] + [1])
    sizes = {}
    for entry in ({"name": "pdmux"}, {"name": "muxwise", "tbt_slo_ms": 1e3 * 90 * TICK}):
        records = run(entry, load, cost)
        long = lane(records, 0)
        long = long[long["prefill_tokens"] == 3000]
        inside = lane(records, 1)
        inside = inside[(inside["start_s"] > long["start_s"].min()) & (inside["end_s"] < long["end_s"].max())]
        sizes[entry["name"]] = set(inside["sms"])
    assert len(sizes["pdmux"]) == 1


def test_pdmux_slices_are_layers_by_the_token_budget() -> None:
    cost = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 66, (1.0, 1.0))
    load = workload([0.0, 32 * TICK], [8, 2000], [400, 1])
    for budget, layers in ((65536, 32), (12_000, 6), (4000, 2), (100, 1)):
        entry = {"name": "pdmux", "split_forward_token_budget": budget, "overlap_schedule": True}
        slices = lane(run(entry, load, cost), 0).iloc[1:]
        assert slices["layers"].iloc[0] == layers
        assert slices["layers"].sum() == 32
    # slices that take longer than a step queue up behind it
    records = run({"name": "pdmux", "split_forward_token_budget": 4000}, load, cost)
    assert lane(records, 0)["layers"].iloc[2] > 2


@given(
    load=workloads(most=10),
    entry=st.sampled_from(
        [
            {"name": "muxwise"},
            {"name": "muxwise", "preempt": True, "tbt_slo_ms": 0.3},
            {"name": "muxwise", "preempt": True, "tbt_slo_ms": 1.0, "guard": False},
            {"name": "pdmux", "split_forward_token_budget": 100},
            {"name": "pdmux", "overlap_schedule": True},
        ]
    ),
    seqs=st.sampled_from([1, 8]),
    tokens=st.sampled_from([1, 64]),
    watermark=st.sampled_from([0.0, 0.2]),
    blocks=st.sampled_from([1.0, 1.5, 9.0]),
    size=st.sampled_from([1, 16]),
    jitter=st.booleans(),
    replicas=st.integers(1, 2),
)
@settings(max_examples=40)
def test_every_run_obeys_the_laws(
    load: Workload,
    entry: dict[str, Any],
    seqs: int,
    tokens: int,
    watermark: float,
    blocks: float,
    size: int,
    **options: Any,
) -> None:
    cost = split_cost(rough_tables(TICK, wobble=True), 66, (1.2, 1.4), max_context=160)
    largest = -(-int(np.max(load.prompt_tokens.astype(int) + load.output_tokens)) // size)
    pool = int(blocks * largest / (1 - watermark)) + 2
    knobs = {**entry, "max_num_seqs": seqs, "max_prefill_tokens": tokens, "watermark": watermark}
    records = run(knobs, load, cost, num_gpu_blocks=pool, block_size=size, **options)
    check_laws(records)
    held = sum(
        records.totals[f"sm_{name}_s"]
        for name in ("active", "tail", "host", "contention", "switch", "lent", "idle_lane")
    )
    assert held == pytest.approx(cost.gpu.sms * records.totals["busy_s"], rel=1e-9)
    assert set(beside(records)) <= set(make_policy(entry).sm_sets(H200))


# knobs

MOVES = [
    Moves("muxwise", "tbt_slo_ms", 10, "decode_sms_beside", UP),
    Moves("muxwise", "preempt", True, "long_ttft", UP, {"tbt_slo_ms": 15, "max_prefill_tokens": 2048}),
    Moves("muxwise", "ttft_slo_ms", 1, "long_ttft", DOWN, {"tbt_slo_ms": 15, "preempt": True}),
    Moves("muxwise", "prefill_overhead", 0.3, "mean_ttft", UP),
    Moves("muxwise", "decode_launch_ms", 5.0, "mean_ttft", UP),
    Moves("muxwise", "sync_us", 5000.0, "mean_tpot", UP),
    Moves("muxwise", "max_prefill_tokens", 2048, "tokens_of_several", DOWN),
    Moves("muxwise", "max_prompt_tokens", 3000, "served", DOWN),
    Moves("pdmux", "max_prompt_tokens", 3000, "served", DOWN),
    Moves("muxwise", "max_num_seqs", 8, "largest_batch", DOWN),
    Moves("pdmux", "sm_group_num", 3, "decode_sizes", DOWN),
    Moves("pdmux", "decode_bs_divisor", 200, "mean_ttft", DOWN),
    Moves("pdmux", "manual_divisions", ((56, 76, 1),), "mean_tpot", DOWN),
    Moves("pdmux", "split_forward_token_budget", 2000, "mean_ttft", UP),
    Moves("pdmux", "overlap_schedule", True, "mean_tpot", DOWN),
    Moves("pdmux", "sync_us", 5000.0, "mean_tpot", UP),
    Moves("pdmux", "max_prefill_tokens", 2048, "tokens_of_several", DOWN),
    Moves("pdmux", "max_num_seqs", 8, "largest_batch", DOWN),
]
PRESSED = [
    Moves("muxwise", "watermark", 0.3, "preemptions", DOWN),
    Moves("pdmux", "watermark", 0.3, "preemptions", DOWN),
]
# a third of the memory of a pool that overflows
CROWDED = [Moves("muxwise", "graph_memory", 0.0, "preemptions", DOWN)]


@pytest.mark.parametrize("row", MOVES, ids=str)
def test_every_knob_moves_what_it_is_about(row: Moves) -> None:
    check_move(row)


@pytest.mark.parametrize("row", PRESSED, ids=str)
def test_knobs_of_a_full_pool(row: Moves) -> None:
    check_move(row, num_gpu_blocks=900)


@pytest.mark.parametrize("row", CROWDED, ids=str)
def test_knobs_of_a_full_memory(row: Moves) -> None:
    check_move(row, gpu_memory_utilization=0.165)


def test_graphs_of_each_partition_take_their_share_of_the_memory() -> None:
    cost = real_cost()
    pools = {
        share: deploy(make_policy({"name": "muxwise", "graph_memory": share}), cost) for share in (0.0, 0.062)
    }
    block = 16 * cost.model.kv_bytes_per_token()
    lost = 0.062 * 0.9 * cost.gpu.hbm_bytes
    assert pools[0.0].num_blocks - pools[0.062].num_blocks == pytest.approx(lost / block, abs=1)
    assert deploy(make_policy("muxwise"), cost) == pools[0.062]


def test_the_list_of_knobs_is_complete() -> None:
    for name in ("muxwise", "pdmux"):
        knobs = {knob for info in list_policies() if info.name == name for knob in info.knobs}
        # the guard matters where neighbours are slowed, as in the test by hand above
        assert {row.knob for row in [*MOVES, *PRESSED, *CROWDED] if row.policy == name} == knobs - {"guard"}


def test_the_step_log_tells_why_in_words() -> None:
    steps = run({"name": "muxwise", "tbt_slo_ms": 8}).steps
    assert steps is not None
    words = dict(zip(steps["reason"], steps["split_reason"], strict=True))
    assert words == {
        0: "granted with an earlier step",
        ALONE: "one phase alone",
        KEPT: "fewest SMs within the SLO",
    }

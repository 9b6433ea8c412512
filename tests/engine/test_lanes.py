"""Two lanes: rates against sums on paper, SM-seconds, memory, and the laws of every run under a static split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_cost import LaneCost, lane_cost, lane_tables
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload, workloads

from sim.engine import RunRecords, simulate
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import (
    COHORT,
    D_LAUNCH,
    D_PART,
    MODEL_LAYERS,
    N_CHUNKS,
    N_READY,
    P_LAYERS,
    P_MIXED,
    P_PART,
    RUN_HEAD,
)
from sim.engine.plans import add_victim
from sim.errors import PlanError
from sim.metrics.conservation import check_conservation
from sim.policies import make_policy
from sim.policies.parts.two_lanes import admit_prompts, clear_lanes, may_decode, may_prefill
from sim.policies.static_split import StaticSplitPolicy
from sim.workload.workload import Workload

TOKEN, STEP = 4, 64  # ticks of a prompt token and of a decode step
WASTE = (
    *("sm_active_s", "sm_tail_s", "sm_host_s", "sm_contention_s", "sm_switch_s", "sm_lent_s"),
    "sm_idle_lane_s",
)


def run(load: Workload, cost: LaneCost, blocks: int = 1000, size: int = 16, **more: Any) -> RunRecords:
    """Knobs of the policy are those that it has; the rest are options of the run."""
    knobs = {key: more.pop(key) for key in list(more) if key in StaticSplitPolicy.knobs}
    policy = make_policy({"name": "static-split", "max_num_seqs": 8, "watermark": 0.0, **knobs})
    options = {"jitter": False, "record_steps": True, "estimator": "oracle", **more}
    return simulate(load, policy, cost, num_gpu_blocks=blocks, block_size=size, **options)


def ticks(values: Any) -> list[float]:
    return [float(x) / TICK for x in values]


def in_ticks(arrivals: list[int], prompts: list[int], outputs: list[int]) -> Workload:
    return workload([t * TICK for t in arrivals], prompts, outputs)


def lane(records: RunRecords, number: int) -> Any:
    assert records.steps is not None
    return records.steps[records.steps["lane"] == number].reset_index(drop=True)


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12)


def test_a_lane_alone_takes_its_solo_time() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), (3.0, 3.0))
    records = run(in_ticks([0], [50], [4]), cost)
    assert ticks(records.requests["first_token_s"]) == [200]
    assert ticks(records.itl_s) == [64, 64, 64]
    assert records.totals["busy_s"] == records.end_s == 392 * TICK


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(1.5, 1.25), (2.0, 1.0), (1.0, 4.0), (1.1, 1.3)])
def test_a_neighbour_slows_only_what_is_left_while_it_runs(of_prefill: float, of_decode: float) -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), (of_prefill, of_decode))
    # the first prompt takes 32 ticks; the second arrives 16 ticks into the third step
    records = run(in_ticks([0, 32 + 2 * 64 + 16], [8, 100], [20, 2]), cost)
    prefill_end = 176 + 400 * of_prefill
    ends = [96.0, 160.0, 176 + (64 - 16) * of_decode]
    while ends[-1] + 64 * of_decode <= prefill_end:
        ends.append(ends[-1] + 64 * of_decode)
    done = (prefill_end - ends[-1]) / of_decode
    ends.append(prefill_end + 64 - done)
    assert ticks(records.requests["first_token_s"]) == close([32, prefill_end])
    assert ticks(lane(records, 1)["end_s"])[: len(ends)] == close(ends)
    # the second joins at the next step and has its last token there
    assert ticks(records.requests["finish_s"])[1] == close(ends[-1] + 64)


def test_what_has_been_done_counts_whatever_the_neighbour_did_since() -> None:
    """Solo work is the integral of 1 / slowdown over the launch's time."""
    of_prefill, of_decode = 1.5, 1.25
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), (of_prefill, of_decode))
    rng = np.random.default_rng(5)
    records = run(
        in_ticks(
            np.cumsum(rng.integers(1, 900, 40)).tolist(),
            rng.integers(1, 200, 40).tolist(),
            rng.integers(1, 12, 40).tolist(),
        ),
        cost,
    )
    sides, lost = [lane(records, 0), lane(records, 1)], 0.0
    for mine, other, factor in ((*sides, of_prefill), (*sides[::-1], of_decode)):
        solo = (
            TOKEN * TICK * mine["prefill_tokens"] if mine is sides[0] else STEP * TICK + 0.0 * mine["end_s"]
        )
        for start, end, own, slow in zip(mine["start_s"], mine["end_s"], solo, mine["slowdown"], strict=True):
            both = np.minimum(other["end_s"], end) - np.maximum(other["start_s"], start)
            overlap = float(both.clip(lower=0).sum())
            assert (end - start - overlap) + overlap / factor == close(own)
            assert slow == close((end - start) / own)
            lost += (end - start - own) * int(mine["sms"][0])
    assert records.totals["sm_contention_s"] == pytest.approx(lost, rel=1e-9)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.5, 1.25)])
@pytest.mark.parametrize("layers", [1, 3, 16, 31])
def test_a_prefill_in_layer_groups_takes_as_long_as_whole(layers: int, factors: tuple[float, float]) -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), factors)
    load = in_ticks([0, 176, 500], [8, 100, 60], [40, 2, 5])
    whole, split = run(load, cost), run(load, cost, layer_step=layers)
    for column in ("first_token_s", "finish_s", "max_itl_s"):
        assert ticks(split.requests[column]) == close(ticks(whole.requests[column]))
    groups = -(-cost.model.layers // layers)
    assert len(lane(split, 0)) == groups * len(lane(whole, 0))
    # a pass in groups is still one pass over the weights
    for name in ("launches_eager", "launches_graph", "dense_tokens", "head_rows", "prefill_pairs"):
        assert split.totals[name] == whole.totals[name], name
    for name in (*WASTE, "gpu_s", "busy_s", "kv_block_s", "host_bound_s"):
        assert split.totals[name] == pytest.approx(whole.totals[name], rel=1e-9, abs=1e-15), name


def test_each_layer_group_pays_its_share_of_the_host_and_of_the_gap() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK, host_s=480 * TICK, gap_s=3 * TICK))
    records = run(in_ticks([0], [100], [1]), cost, layer_step=8)
    # 4 groups of 120 ticks of host time, which hide 100 of the GPU each
    assert ticks(records.requests["first_token_s"]) == close([4 * 120 + 3])
    assert records.totals["gpu_s"] == close(400 * TICK)
    assert records.totals["host_bound_s"] == close(4 * 20 * TICK)


def test_only_the_gpus_part_of_a_launch_is_slowed() -> None:
    # a decode step is half host time
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK, host_s=2 * STEP * TICK), (1.0, 1.5))
    records = run(in_ticks([0, 1000], [100, 500], [60, 1]), cost)
    inside = lane(records, 1)
    prefill = lane(records, 0).iloc[-1]
    inside = inside[(inside["start_s"] >= prefill["start_s"]) & (inside["end_s"] <= prefill["end_s"])]
    assert len(inside) > 5
    assert ticks(inside["end_s"] - inside["start_s"]) == close([2 * STEP * 1.25] * len(inside))


def test_a_neighbour_of_no_demand_changes_nothing() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), (1.0, 1.0))
    alone = run(in_ticks([0], [8], [30]), cost)
    beside = run(in_ticks([0, 200], [8, 300], [30, 1]), cost)
    assert ticks(beside.requests["finish_s"])[0] == close(ticks(alone.requests["finish_s"])[0])
    assert ticks(beside.requests["first_token_s"])[1] == close(200 + 1200)
    assert beside.totals["sm_contention_s"] == 0


def test_host_time_is_counted_as_for_one_lane() -> None:
    """A sole request never has both lanes busy, so that only the launches' own time counts."""
    tables = rough_tables(TICK)
    load = in_ticks([0], [40], [30])
    two = run(load, lane_cost(tables)).totals
    policy = make_policy({"name": "sglang", "page_size": 16})
    one = simulate(load, policy, lane_cost(tables), num_gpu_blocks=1000, jitter=False).totals
    for name in (
        *("busy_s", "gpu_s", "host_bound_s", "kv_block_s", "iterations", "dense_tokens", "head_rows"),
        *("launches_graph", "launches_eager", "prefill_pairs", "prefill_kv_tokens", "decode_kv_tokens"),
    ):
        assert two[name] == close(one[name]), name


def test_sm_seconds_of_overlapping_sets_are_counted_once() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK))
    sms = cost.gpu.sms
    records = run(in_ticks([0, 200], [8, 300], [30, 1]), cost, prefill_sms=sms, decode_sms=sms)
    assert set(lane(records, 0)["sms"]) == set(lane(records, 1)["sms"]) == {sms}
    held = sum(records.totals[name] for name in WASTE[:-1])
    assert held == close(sms * records.totals["busy_s"])
    assert records.totals["sm_idle_lane_s"] == 0


def test_a_phase_alone_takes_all_sms_only_where_it_may() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK))
    load = in_ticks([0, 200], [8, 300], [60, 1])
    strict, free = run(load, cost), run(load, cost, expand_when_idle=True)
    p, d = 64, cost.gpu.sms - 64
    assert set(lane(strict, 0)["sms"]) == {p}
    assert set(lane(strict, 1)["sms"]) == {d}
    assert lane(free, 0)["sms"].tolist() == [cost.gpu.sms, p]
    second = lane(free, 0).iloc[1]
    for _, step in lane(free, 1).iterrows():
        beside = second["start_s"] <= step["start_s"] < second["end_s"]
        assert step["sms"] == (d if beside else cost.gpu.sms)


def test_a_decode_step_holds_its_blocks_from_its_launch_on() -> None:
    # the first fills its block of 4 with the prompt: its first step takes the second of two blocks
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK))
    records = run(in_ticks([0, 17], [4, 4], [3, 2]), cost, blocks=2, size=4)
    first, second = records.requests.iloc[0], records.requests.iloc[1]
    assert records.requests["preemptions"].sum() == 0
    assert second["first_scheduled_s"] == first["finish_s"]


def test_a_victim_that_needs_no_block_frees_only_what_it_holds() -> None:
    # blocks of 2. After the prompts 7 of 7 are held; of the next step's three requests two need a block and
    # the youngest none, and it holds one: it alone is not enough
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK))
    records = run(in_ticks([0, 0, 0], [6, 6, 1], [3, 3, 2]), cost, blocks=7, size=2)
    assert (records.requests["status"] == "finished").all()
    assert records.requests["preemptions"].tolist() == [0, 1, 1]


class Wrong(StaticSplitPolicy):
    """Makes one mistake in its second decision that could be made."""

    mistake = ""

    @staticmethod
    def advance(  # type: ignore[override]
        q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float
    ) -> None:
        while begin_lanes(q, r, x, limit):
            clear_lanes(a)
            decoding = r.iv[COHORT] > 0
            if Wrong.mistake == "busy" and decoding:
                a.iv[D_LAUNCH] = 1
            elif Wrong.mistake == "evict" and decoding:
                add_victim(a, r.iv[RUN_HEAD])
            elif Wrong.mistake == "sets" and decoding:
                admit_prompts(q, r, a, 64, 8, 0, 100)
                a.iv[P_LAYERS], a.iv[P_PART] = 99, 0
            elif may_decode(r) and r.iv[COHORT] + r.iv[N_READY] > 0:
                a.iv[D_LAUNCH], a.iv[D_PART] = 1, 0
            elif may_prefill(r):
                admit_prompts(q, r, a, 64, 8, 0, 100)
                a.iv[P_LAYERS] = 99
            if not execute_lanes(q, r, a, p, x):
                return


@pytest.mark.parametrize("mistake", ["busy", "evict", "sets"])
def test_mistakes_of_a_policy_are_refused(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "mistake", mistake)
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK))
    # the second arrives in a decode step of the first
    load = in_ticks([0, 40], [8, 8], [4, 4])
    with pytest.raises(PlanError, match="launched on a lane that is busy"):
        simulate(load, Wrong(max_num_seqs=8), cost, num_gpu_blocks=100, jitter=False)


class Riding(StaticSplitPolicy):
    """Prompts take the decodes along whenever both are there."""

    @staticmethod
    def advance(  # type: ignore[override]
        q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float
    ) -> None:
        while begin_lanes(q, r, x, limit):
            clear_lanes(a)
            decodes = r.iv[COHORT] + r.iv[N_READY]
            if may_decode(r) and may_prefill(r):
                admit_prompts(q, r, a, ki[0], ki[1], 0, 100)
                if a.iv[N_CHUNKS] > 0:
                    a.iv[P_LAYERS], a.iv[P_MIXED] = r.iv[MODEL_LAYERS], 1
                elif decodes > 0:
                    a.iv[D_LAUNCH] = 1
            if not execute_lanes(q, r, a, p, x):
                return


def test_decodes_may_ride_in_a_pass_of_prompts() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), (9.0, 9.0))
    load = in_ticks([0, 40, 40], [8, 10, 3], [4, 2, 1])
    policy = Riding(max_num_seqs=8)
    records = simulate(load, policy, cost, num_gpu_blocks=100, jitter=False, record_steps=True)
    # 8 tokens; a step; 13 tokens and a decode in one pass; two decode; the first alone has its fourth token
    assert ticks(lane(records, 0)["end_s"]) == close([32, 96 + 14 * 4])
    assert lane(records, 0)["decode_batch"].tolist() == [0, 1]
    assert ticks(lane(records, 1)["end_s"]) == close([96, 152 + 64])
    assert ticks(records.requests["finish_s"]) == close([216, 216, 152])
    assert ticks(records.requests["max_itl_s"])[:2] == close([64, 64])
    totals = records.totals
    assert (totals["launches_eager"], totals["launches_graph"]) == (2, 2)
    assert (totals["dense_tokens"], totals["head_rows"]) == (21 + 4, 3 + 4)
    assert totals["decode_kv_tokens"] == 9 + 10 + (11 + 11)


def test_a_pass_with_riders_must_fit_the_price_tables() -> None:
    cost = lane_cost(lane_tables(TOKEN * TICK, STEP * TICK), max_context=64)
    load = in_ticks([0, 40], [8, 50], [9, 1])
    full = Riding(max_num_seqs=2, max_prefill_tokens=50)
    assert simulate(load, full, cost, num_gpu_blocks=100, jitter=False).totals["launches_eager"] == 2
    crowded = in_ticks([0, 40, 40], [8, 30, 34], [9, 1, 1])
    with pytest.raises(PlanError, match="makes the step larger than the price tables"):
        simulate(crowded, Riding(max_num_seqs=8, max_prefill_tokens=64), cost, num_gpu_blocks=100)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, LaneCost, dict[str, Any]]:
    load = draw(workloads(most=10))
    size = draw(st.sampled_from([1, 2, 16]))
    largest = -(-int(np.max(load.prompt_tokens.astype(int) + load.output_tokens)) // size)
    blocks = draw(st.one_of(st.integers(max(1, largest // 2), 2 * largest + 2), st.just(20 * largest)))
    cost = lane_cost(
        rough_tables(draw(st.sampled_from([TICK, 1.1e-6])), wobble=True),
        draw(st.sampled_from([(1.0, 1.0), (1.5, 1.25), (1.1, 2.3)])),
    )
    options = {
        "blocks": blocks,
        "size": size,
        "expand_when_idle": draw(st.booleans()),
        "layer_step": draw(st.sampled_from([0, 0, 1, 5, 16])),
        "max_prefill_tokens": draw(st.sampled_from([1, 32, 8192])),
        "max_num_seqs": draw(st.integers(1, 8)),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.2])),
        "prefill_share": draw(st.sampled_from([0.1, 0.5, 0.9])),
        "replicas": draw(st.integers(1, 3)),
        "router": draw(st.sampled_from(["round-robin", "least-outstanding"])),
        "warmup_s": draw(st.sampled_from([0.0, 0.0, 0.01, 0.1])),
        "horizon_s": draw(st.sampled_from([None, None, 0.005, 0.05, 0.3])),
        "drain": draw(st.sampled_from([True, True, False])),
        "jitter": draw(st.booleans()),
    }
    if draw(st.booleans()):
        load = workload(
            load.arrival_s.tolist(),
            load.prompt_tokens.tolist(),
            load.output_tokens.tolist(),
            max_concurrency=draw(st.integers(1, 6)),
        )
    return load, cost, options


@given(drawn=runs())
@settings(max_examples=80)
def test_every_run_obeys_the_laws(drawn: tuple[Workload, LaneCost, dict[str, Any]]) -> None:
    load, cost, options = drawn
    records = run(load, cost, **options)
    check_conservation(records)
    frame, totals = records.requests, records.totals
    whole = options["horizon_s"] is None and options["drain"]
    if whole:
        assert set(frame["status"]) <= {"finished", "rejected"}
    span = records.end_s * records.replicas
    assert totals["busy_s"] <= span * (1 + 1e-12)
    assert totals["kv_block_s"] <= records.num_blocks * span * (1 + 1e-12)
    assert min(totals[name] for name in WASTE) >= 0
    held = sum(totals[name] for name in WASTE)
    available = cost.gpu.sms * totals["busy_s"]
    if whole:
        assert held == pytest.approx(available, rel=1e-9, abs=1e-12)
    assert (records.itl_s > 0).all()
    if records.steps is None:
        return
    steps = records.steps
    for _, mine in steps.groupby(["replica", "lane"]):
        starts, ends = mine["start_s"].to_numpy(), mine["end_s"].to_numpy()
        assert (starts < ends).all()
        assert (starts[1:] >= ends[:-1]).all()
    assert (steps["slowdown"] >= 1 - 1e-9).all()
    assert totals["iterations"] == len(steps)
    assert totals["launches_graph"] == (steps["lane"] == 1).sum()
    layers = steps.loc[steps["lane"] == 0, "layers"].sum()
    assert totals["launches_eager"] == layers // cost.model.layers if whole else True
    if whole and frame["preemptions"].sum() == 0:
        done = frame[frame["status"] == "finished"]
        assert totals["dense_tokens"] == (done["prompt_tokens"] + done["output_tokens"] - 1).sum()
        assert steps["decode_batch"].sum() == (done["output_tokens"] - 1).sum()


def mixed_load(n: int = 90, seed: int = 2) -> Workload:
    rng = np.random.default_rng(seed)
    return workload(
        np.cumsum(rng.exponential(0.002, n)).tolist(),
        rng.integers(1, 150, n).tolist(),
        rng.integers(1, 40, n).tolist(),
    )


ROUGH = lane_cost(rough_tables(TICK), (1.5, 1.25))


def test_least_outstanding_sees_both_lanes() -> None:
    load = mixed_load()
    frame = run(load, ROUGH, blocks=60, replicas=3, router="least-outstanding").requests
    for i in range(len(load)):
        before, now = frame.iloc[:i], frame["arrival_s"][i]
        inside = before[before["finish_s"] > now]
        loads = [int((inside["replica"] == k).sum()) for k in range(3)]
        assert frame["replica"][i] == loads.index(min(loads)), f"request {i} with {loads}"
    assert frame["replica"].nunique() == 3


def test_round_robin_is_so_many_separate_runs() -> None:
    load = mixed_load()
    together = run(load, ROUGH, blocks=60, replicas=2).requests
    columns = ["first_scheduled_s", "first_token_s", "finish_s", "max_itl_s", "preemptions"]
    for k in range(2):
        rows = np.arange(k, len(load), 2)
        part = workload(
            load.arrival_s[rows].tolist(),
            load.prompt_tokens[rows].tolist(),
            load.output_tokens[rows].tolist(),
        )
        alone = run(part, ROUGH, blocks=60).requests
        assert together.iloc[rows][columns].reset_index(drop=True).equals(alone[columns])


def test_a_horizon_cuts_and_changes_nothing_before_it() -> None:
    whole = run(mixed_load(), ROUGH, blocks=60)
    horizon = float(np.quantile(whole.requests["finish_s"], 0.4))
    cut = run(mixed_load(), ROUGH, blocks=60, horizon_s=horizon)
    for name in ("first_token_s", "finish_s"):
        assert cut.requests[name].equals(whole.requests[name].where(whole.requests[name] <= horizon)), name
    assert cut.itl_count.sum() == whole.itl_count[whole.itl_end_s <= horizon].sum()


def test_on_a_real_profile_no_more_sms_are_active_than_there_are() -> None:
    cost = real_cost()
    policy = make_policy({"name": "static-split", "max_num_seqs": 64})
    records = simulate(mixed_load(60), policy, cost, record_steps=True)
    totals = records.totals
    assert sum(totals[name] for name in WASTE) == pytest.approx(cost.gpu.sms * totals["busy_s"], rel=1e-9)
    assert 0 < totals["sm_active_s"] < cost.gpu.sms * totals["busy_s"]
    assert records.steps["slowdown"].min() >= 1 - 1e-9

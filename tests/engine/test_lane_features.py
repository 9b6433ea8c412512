"""Two lanes: steps launched ahead, parking, lending, delays, price of a new SM set, and what a policy may observe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_cost import LaneCost, lane_cost, lane_tables
from stub_cost import TICK, rough_tables
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.engine.deployment import GREEN, MECHANISMS
from sim.engine.lanes import (
    begin_lanes,
    execute_lanes,
    last_beside_s,
    last_launch,
    last_launch_s,
    launches_done,
)
from sim.engine.layout import (
    D_DELAY_NS,
    D_STEPS,
    DECODE_LANE,
    IN_CHUNKS,
    LANE_BATCH,
    LANE_CHUNKS,
    LANE_CONTEXT,
    LANE_KIND,
    LANE_LAYERS,
    LANE_PART,
    LANE_TOKENS,
    LEND,
    N_WAIT,
    P_DELAY_NS,
    P_LAYERS,
    P_PART,
    P_POLL,
    PARK,
    PARKED,
    PREFILL_ITEM,
    PREFILL_LANE,
    REASON,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk
from sim.errors import PlanError, SimctlError
from sim.metrics.conservation import check_conservation
from sim.policies import make_policy
from sim.policies.parts.two_lanes import clear_lanes, layers_left, may_prefill
from sim.policies.static_split import StaticSplitPolicy, plan
from sim.workload.workload import Workload

TOKEN, STEP = 4, 64  # ticks of a prompt token and of a decode step
Script = Callable[[Any, Any, Any], None]


class Scripted(StaticSplitPolicy):
    """What static-split plans, changed by a script that sees the state and the plan."""

    script: Script = staticmethod(lambda q, r, a: None)

    @staticmethod
    def advance(  # type: ignore[override]
        q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float
    ) -> None:
        while begin_lanes(q, r, x, limit):
            plan(q, r, a, ki)
            Scripted.script(q, r, a)
            if not execute_lanes(q, r, a, p, x):
                return


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunRecords]:
    def simulated(load: Workload, cost: LaneCost, script: Script, **more: Any) -> RunRecords:
        monkeypatch.setattr(Scripted, "script", staticmethod(script))
        knobs = {key: more.pop(key) for key in list(more) if key in StaticSplitPolicy.knobs}
        policy = Scripted(**{"max_num_seqs": 8, "watermark": 0.0, **knobs})
        options = {"num_gpu_blocks": 1000, "jitter": False, "record_steps": True, **more}
        records = simulate(load, policy, cost, **options)
        check_conservation(records)
        return records

    return simulated


def plain(of_prefill: float = 1.0, of_decode: float = 1.0, **more: float) -> LaneCost:
    return lane_cost(lane_tables(TOKEN * TICK, STEP * TICK, **more), (of_prefill, of_decode))


def in_ticks(arrivals: list[int], prompts: list[int], outputs: list[int]) -> Workload:
    return workload([t * TICK for t in arrivals], prompts, outputs)


def ticks(values: Any) -> list[float]:
    return [float(x) / TICK for x in values]


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12)


def steps_of(records: RunRecords, lane: int) -> Any:
    assert records.steps is not None
    return records.steps[records.steps["lane"] == lane].reset_index(drop=True)


# steps launched ahead


def ahead(k: int) -> Script:
    def script(q: Any, r: Any, a: Any) -> None:
        a.iv[D_STEPS] = k

    return script


def test_steps_launched_ahead_pay_the_host_once_and_stamp_their_own_tokens(run: Any) -> None:
    cost = plain(host_s=100 * TICK, gap_s=3 * TICK)
    # the prompt's host time is longer than its GPU time
    one, four = (run(in_ticks([0], [8], [13]), cost, ahead(k)) for k in (1, 4))
    assert ticks(one.itl_s) == close([103] * 12)
    # 100 + 3 for the first of each four, then the GPU alone
    assert ticks(four.itl_s) == close([103, 64, 64, 64] * 3)
    assert four.totals["decisions"] == one.totals["decisions"] - 9
    assert four.totals["launches_graph"] == 12


def test_who_is_done_stays_in_the_batch_until_the_last_step_launched_ahead(run: Any) -> None:
    # 1 + 2 and 1 + 7 tokens: the first is done after 2 steps of 4
    records = run(in_ticks([0, 0], [4, 4], [3, 8]), plain(), ahead(4))
    decodes = steps_of(records, 1)
    assert decodes["decode_batch"].tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    # contexts of both grow to the end: 5 + 5, then two more a step
    assert decodes["context_sum"].tolist() == [10, 12, 14, 16, 9, 10, 11, 12]
    assert ticks(records.requests["finish_s"]) == close([32 + 2 * 64, 32 + 7 * 64])
    # the eighth step has nobody left, and is run all the same
    assert ticks(decodes["end_s"])[-1] == close(32 + 8 * 64)


def test_blocks_of_who_is_done_are_free_only_after_the_last_step_launched_ahead(run: Any) -> None:
    # the first holds all 3 blocks of 4 to the end of its chain; the second needs one
    load = in_ticks([0, 33], [8, 4], [2, 1])
    first = 8 * TOKEN + STEP
    at_once, late = (run(load, plain(), ahead(k), num_gpu_blocks=3, block_size=4) for k in (1, 4))
    assert ticks(at_once.requests["first_scheduled_s"])[1] == close(first)
    assert ticks(late.requests["finish_s"])[0] == close(first)
    assert ticks(late.requests["first_scheduled_s"])[1] == close(first + 3 * STEP)


def test_steps_ahead_take_their_blocks_at_launch(run: Any) -> None:
    # 3 + 6 tokens fit 2 blocks of 4 but a chain of 6 from a context of 3 needs the third block
    with pytest.raises(PlanError, match="needs more KV blocks"):
        run(in_ticks([0], [3], [6]), plain(), ahead(6), num_gpu_blocks=2, block_size=4)
    run(in_ticks([0], [3], [6]), plain(), ahead(5), num_gpu_blocks=2, block_size=4)


def test_too_many_steps_ahead_are_refused(run: Any) -> None:
    with pytest.raises(PlanError, match="too many steps ahead"):
        run(in_ticks([0], [8], [3]), plain(), ahead(65))


@given(
    k=st.integers(1, 9),
    size=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 200),
    replicas=st.integers(1, 2),
    closed=st.sampled_from([None, None, 3]),
    horizon_s=st.sampled_from([None, None, 0.1]),
)
@settings(max_examples=30)
def test_random_runs_with_steps_ahead_keep_the_laws(
    k: int, size: int, seed: int, replicas: int, closed: int | None, horizon_s: float | None
) -> None:
    rng = np.random.default_rng(seed)
    n = 12
    load = workload(
        np.cumsum(rng.exponential(0.004, n)).tolist(),
        rng.integers(1, 60, n).tolist(),
        rng.integers(1, 25, n).tolist(),
        max_concurrency=closed,
    )
    cost = lane_cost(rough_tables(TICK, wobble=True), (1.5, 1.25))
    policy = Scripted(max_num_seqs=8, watermark=0.0)
    options: dict[str, Any] = {"num_gpu_blocks": 4000, "block_size": size, "record_steps": True}
    before = Scripted.script
    Scripted.script = staticmethod(ahead(k))
    try:
        records = simulate(load, policy, cost, replicas=replicas, horizon_s=horizon_s, **options)
    finally:
        Scripted.script = before
    check_conservation(records)
    assert records.requests["preemptions"].sum() == 0
    held = sum(
        records.totals[f"sm_{name}_s"]
        for name in ("active", "tail", "host", "contention", "switch", "idle_lane")
    )
    assert held == pytest.approx(cost.gpu.sms * records.totals["busy_s"], rel=1e-9)
    if horizon_s is None:
        done = records.requests
        assert (done["status"] == "finished").all()
        assert records.itl_count.sum() == (done["output_tokens"] - 1).sum()


# delays and the price of a new SM set


def test_a_delay_is_host_time_before_the_launch(run: Any) -> None:
    delay_ns = 100_000

    def script(q: Any, r: Any, a: Any) -> None:
        a.iv[P_DELAY_NS], a.iv[D_DELAY_NS] = delay_ns, 2 * delay_ns

    cost = plain()
    late, soon = run(in_ticks([0], [8], [4]), cost, script), run(in_ticks([0], [8], [4]), cost, ahead(1))
    assert late.end_s - soon.end_s == pytest.approx(1e-9 * delay_ns * (1 + 3 * 2))
    assert late.totals["host_bound_s"] == pytest.approx(late.end_s - soon.end_s)
    assert late.totals["gpu_s"] == soon.totals["gpu_s"]
    prefill_sms, decode_sms = (int(steps_of(late, lane)["sms"][0]) for lane in (0, 1))
    held = 1e-9 * delay_ns * (prefill_sms + 6 * decode_sms)
    assert late.totals["sm_host_s"] - soon.totals["sm_host_s"] == pytest.approx(held)


def test_a_lane_pays_for_each_change_of_its_set(run: Any) -> None:
    switch_s = MECHANISMS["green"].switch_s
    cost = plain()
    load = in_ticks([0, 200], [8, 300], [30, 1])
    strict, free = (run(load, cost, ahead(1), expand_when_idle=e) for e in (False, True))
    assert strict.totals["sm_switch_s"] == 0
    # the second prompt moves prefill to its set; decode moves in beside it and out again
    rows = free.steps[free.steps["switch_sm_s"] > 0]
    assert rows["lane"].tolist() == [0, 1, 1]
    assert rows["switch_sm_s"].sum() == pytest.approx(free.totals["sm_switch_s"])
    alone = rows.iloc[-1]
    assert alone["switch_sm_s"] == pytest.approx(switch_s * alone["sms"])
    assert alone["end_s"] - alone["start_s"] == pytest.approx(STEP * TICK + switch_s)


def test_sets_may_share_sms_only_where_the_mechanism_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy({"name": "static-split", "prefill_sms": 132, "decode_sms": 132})
    monkeypatch.setitem(MECHANISMS, "apart", replace(GREEN, name="apart", overlap=False))
    with pytest.raises(SimctlError, match=r"prefill on 132 and decode on 132 SMs share some of the 132"):
        simulate(in_ticks([0], [8], [2]), policy, plain(), mechanism="apart")
    simulate(in_ticks([0], [8], [2]), policy, plain(), mechanism="green")


# what a policy observes, and the reason that it gives


def test_a_policy_sees_how_long_its_launches_took(run: Any) -> None:
    seen: list[tuple[Any, ...]] = []
    fields = (LANE_PART, LANE_LAYERS, LANE_BATCH, LANE_CONTEXT, LANE_TOKENS, LANE_CHUNKS)

    def script(q: Any, r: Any, a: Any) -> None:
        for lane in (PREFILL_LANE, DECODE_LANE):
            if launches_done(r, lane) > sum(1 for one in seen if one[0] == lane):
                row = [last_launch(r, lane, field) for field in fields]
                seen.append((lane, last_launch_s(r, lane), last_beside_s(r, lane), *row))
        a.iv[REASON] = len(seen)

    cost = plain(of_prefill=1.5, of_decode=1.25)
    layers = cost.model.layers
    records = run(in_ticks([0, 32], [8, 100], [7, 1]), cost, script)
    prefill, decode = ([one[1:] for one in seen if one[0] == lane] for lane in (0, 1))
    # the second prompt runs beside 6 slowed steps of 80 ticks, then alone
    assert ticks(one[0] for one in decode) == close([80] * 6)
    assert ticks(one[1] for one in decode) == close([80] * 6)
    assert prefill == [(32 * TICK, 0.0, 1, layers, 0, 0, 8, 1)]
    assert [one[2:] for one in decode] == [(2, layers, 1, 9 + n, 0, 0) for n in range(6)]
    assert records.steps is not None
    rows = records.steps[records.steps["lane"] == 1]
    # each step was launched after one more observation than the one before
    assert rows["reason"].tolist() == [1, 2, 3, 4, 5, 6]


# parking


def small_first(q: Any, r: Any, a: Any) -> None:
    """Park the open batch for a waiting prompt of less than 40 tokens."""
    clear_lanes(a)
    if not may_prefill(r):
        return
    i = r.iv[WAIT_HEAD]
    small = r.iv[N_WAIT] > 0 and q.target[i] < 40
    if r.iv[IN_CHUNKS] == 0 or (small and r.iv[PARKED] == 0):
        if r.iv[N_WAIT] > 0:
            add_chunk(a, i, q.target[i], q.target[i])
            a.iv[PARK] = 1 if r.iv[IN_CHUNKS] > 0 else 0
            a.iv[P_LAYERS] = 8
    elif r.iv[IN_CHUNKS] > 0:
        a.iv[P_LAYERS] = min(8, layers_left(r))
    a.iv[P_PART] = 0


def test_a_parked_batch_goes_on_where_it_was_when_the_other_is_done(run: Any) -> None:
    # 4 groups of 100 ticks; a prompt of 40 ticks comes within the second
    records = run(in_ticks([0, 150], [100, 10], [1, 1]), plain(), small_first)
    assert ticks(records.requests["first_token_s"]) == close([440, 240])
    rows = steps_of(records, 0)
    assert rows["prefill_tokens"].tolist() == [100, 100, 10, 10, 10, 10, 100, 100]
    assert records.totals["launches_eager"] == 2
    assert records.totals["dense_tokens"] == 110
    # without parking it waits for its turn
    plain_turns = run(in_ticks([0, 150], [100, 10], [1, 1]), plain(), ahead(1))
    assert ticks(plain_turns.requests["first_token_s"]) == close([400, 440])


def test_a_third_waits_while_one_batch_is_parked(run: Any) -> None:
    records = run(in_ticks([0, 150, 205], [100, 10, 20], [1, 1, 1]), plain(), small_first)
    # it parks the first again once the second is done
    assert ticks(records.requests["first_token_s"]) == close([520, 240, 320])


def test_parking_twice_is_the_policys_mistake(run: Any) -> None:
    def greedy(q: Any, r: Any, a: Any) -> None:
        clear_lanes(a)
        if may_prefill(r) and r.iv[N_WAIT] > 0:
            add_chunk(a, r.iv[WAIT_HEAD], q.target[r.iv[WAIT_HEAD]], 0)
            a.iv[PARK] = 1 if r.iv[IN_CHUNKS] > 0 else 0
        if may_prefill(r):
            a.iv[P_LAYERS] = 8

    with pytest.raises(PlanError, match="parked in flight"):
        run(in_ticks([0, 50, 150], [100, 100, 10], [1, 1, 1]), plain(), greedy)


# lending


def lend(mode: int) -> Script:
    def script(q: Any, r: Any, a: Any) -> None:
        a.iv[LEND] = mode

    return script


def lending_cost(idle: float, faster: float, of_prefill: float = 1.0, of_decode: float = 1.0) -> LaneCost:
    """Prefill leaves the share `idle` of its SMs idle; a decode step on all SMs is `faster` times as fast."""
    tables = lane_tables(TOKEN * TICK, STEP * TICK)
    cost = lane_cost(tables, (of_prefill, of_decode))
    whole = cost.gpu.sms

    class Lending(LaneCost):
        def compile(self, **options: Any) -> Any:
            p = super().compile(**options)
            sizes = [whole, *options.get("partitions", ())]
            tokens = p.max_tokens + 1
            graph, busy = [], []
            for sms in sizes:
                graph += [STEP * TICK / (faster if sms == whole else 1.0)] * tokens
                busy += [(1.0 - idle) * sms * TOKEN * TICK * m for m in range(tokens)]
            return p._replace(dense_graph_s=graph, dense_eager_sm=busy)

    made = Lending(cost.model, cost.profile, cost.launching, cost.scale)
    for name in ("tables", "factors"):
        object.__setattr__(made, name, getattr(cost, name))
    return made


def test_lent_sms_speed_decode_by_as_much_as_prefill_leaves_idle(run: Any) -> None:
    # prefill on 64 SMs of which a quarter idles: 16 more for decode's 68
    load = in_ticks([0, 32], [8, 1000], [30, 1])
    cost = lending_cost(idle=0.25, faster=1.9)
    off, ideal = run(load, cost, lend(0)), run(load, cost, lend(1))
    speed = 1 + 16 / 68
    beside = steps_of(ideal, 1)["end_s"] < steps_of(ideal, 0)["end_s"].max()
    took = steps_of(ideal, 1)["end_s"] - steps_of(ideal, 1)["start_s"]
    assert ticks(took[beside]) == close([STEP / speed] * int(beside.sum()))
    assert int(beside.sum()) > 20
    lent = 16 * took[beside].sum()
    assert ideal.totals["sm_lent_s"] == pytest.approx(lent)
    assert off.totals["sm_lent_s"] == 0
    # out of the tails of prefill, and the whole is as large as ever
    assert steps_of(ideal, 0)["lent_sm_s"].sum() == pytest.approx(lent)
    assert steps_of(ideal, 0)["tail_sm_s"].sum() + lent == pytest.approx(steps_of(off, 0)["tail_sm_s"].sum())


def test_decode_gains_no_more_than_all_sms_would_give_it(run: Any) -> None:
    load = in_ticks([0, 32], [8, 1000], [30, 1])
    records = run(load, lending_cost(idle=0.9, faster=1.1), lend(1))
    took = steps_of(records, 1)["end_s"] - steps_of(records, 1)["start_s"]
    assert ticks(took)[3] == close(STEP / 1.1)


@given(
    idle=st.floats(0, 1),
    faster=st.floats(0.5, 3),
    slow=st.tuples(st.floats(1, 2), st.floats(1, 2)),
    seed=st.integers(0, 99),
    layers=st.sampled_from([0, 1, 7]),
)
@settings(max_examples=25)
def test_lent_sm_seconds_never_exceed_the_idle_ones(
    idle: float, faster: float, slow: tuple[float, float], seed: int, layers: int
) -> None:
    rng = np.random.default_rng(seed)
    load = in_ticks(
        np.cumsum(rng.integers(1, 400, 15)).tolist(),
        rng.integers(1, 80, 15).tolist(),
        rng.integers(1, 12, 15).tolist(),
    )
    cost = lending_cost(idle, faster, *slow)
    before = Scripted.script
    Scripted.script = staticmethod(lend(1))
    try:
        policy = Scripted(max_num_seqs=8, watermark=0.0, layer_step=layers)
        records = simulate(load, policy, cost, num_gpu_blocks=900, jitter=False, record_steps=True)
    finally:
        Scripted.script = before
    rows = steps_of(records, 0)
    idle_sm_s = (
        idle * rows["sms"] * TOKEN * TICK * rows["prefill_tokens"] * rows["layers"] / cost.model.layers
    )
    assert (rows["lent_sm_s"] <= idle_sm_s + 1e-12).all()
    held = sum(
        records.totals[f"sm_{name}_s"]
        for name in ("active", "tail", "host", "contention", "switch", "lent", "idle_lane")
    )
    assert held == pytest.approx(cost.gpu.sms * records.totals["busy_s"], rel=1e-9)


def test_a_kind_is_known_by_its_number(run: Any) -> None:
    kinds: list[int] = []

    def script(q: Any, r: Any, a: Any) -> None:
        if launches_done(r, PREFILL_LANE) > len(kinds):
            kinds.append(last_launch(r, PREFILL_LANE, LANE_KIND))

    run(in_ticks([0], [8], [2]), plain(), script)
    assert kinds == [PREFILL_ITEM]


# polling


def test_a_polled_pass_is_done_when_the_decode_step_ends(run: Any) -> None:
    def polled(q: Any, r: Any, a: Any) -> None:
        a.iv[P_POLL] = 1

    # 25 tokens from tick 32 on are through at 132, in the middle of the second decode step
    load = in_ticks([0, 32], [8, 25], [10, 3])
    seen, late = (run(load, plain(), script) for script in (ahead(1), polled))
    assert ticks(seen.requests["first_token_s"]) == close([32, 132])
    assert ticks(late.requests["first_token_s"]) == close([32, 160])
    # it joins at the same step either way
    assert ticks(late.requests["finish_s"]) == ticks(seen.requests["finish_s"])
    assert late.totals["launches_eager"] == seen.totals["launches_eager"] == 2
    # alone a pass is seen at once
    alone = run(in_ticks([0], [25], [1]), plain(), polled)
    assert ticks(alone.requests["first_token_s"]) == close([100])


def test_nothing_is_launched_behind_a_pass_that_is_not_seen_done(run: Any) -> None:
    def hasty(q: Any, r: Any, a: Any) -> None:
        a.iv[P_POLL] = 1
        if may_prefill(r) and r.iv[IN_CHUNKS] > 0:
            a.iv[P_LAYERS] = 1

    with pytest.raises(PlanError, match="launched on a lane that is busy"):
        run(in_ticks([0, 32], [8, 25], [10, 3]), plain(), hasty)

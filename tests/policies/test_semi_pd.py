"""semi-PD: percentiles and fits, the feedback's rule, switches behind the old split, knobs, check 18, laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knob_frame import DOWN, UP, Moves
from lane_cost import lane_tables
from lane_frame import busy_load, check_laws, check_move, lane, metrics
from split_cost import split_cost
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload, workloads

from sim.engine import RunRecords, simulate
from sim.engine.deployment import MPS, Deployment, Target
from sim.policies import list_policies, make_policy
from sim.policies.parts.observe import BINS, SUMS, add_point, count_value, edges, line_value, percentile
from sim.policies.parts.semi_pd_feedback import (
    TPOT_LINE,
    TPOT_SHAPE,
    TTFT_LINE,
    TTFT_SHAPE,
    decide,
    effective,
    headroom,
    one_up,
)
from sim.policies.semi_pd import SemiPdPolicy
from sim.workload.workload import Workload


@given(
    values=st.lists(st.floats(1e-3, 30.0), min_size=1, max_size=60),
    share=st.sampled_from([0.5, 0.9, 0.99]),
)
def test_a_percentile_is_right_to_a_bin_and_its_side_of_the_target_to_the_bit(
    values: list[float], share: float
) -> None:
    target, counts = 0.4, [0] * (BINS + 2)
    upper = [0.0, *edges(target)]
    for value in values:
        count_value(counts, 2, upper, 1, value)
    assert sum(counts) == len(values)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    found = percentile(counts, 2, upper, 1, share)
    low, high = target / 16, target * 16
    assert min(max(exact, low), high) / 1.27 <= max(found, low) * 1.001
    assert found <= max(min(exact, high), low) * 1.27
    assert (found > target) == (exact > target)


def test_without_values_there_is_no_percentile() -> None:
    assert percentile([0] * BINS, 0, edges(1.0), 0, 0.9) == 0.0


def test_the_line_is_that_of_the_points() -> None:
    sums = [0.0] * (SUMS + 1)
    for z in (1.0, 2.0, 5.0):
        add_point(sums, 1, 0.8, z, 0.3 * z + 0.1)
    assert line_value(sums, 1, 9.0, 4.0) == pytest.approx(1.3)
    # what is new outweighs what is old
    for _ in range(60):
        add_point(sums, 1, 0.5, 1.0, 1.0)
        add_point(sums, 1, 0.5, 2.0, 1.5)
    assert line_value(sums, 1, 9.0, 4.0) == pytest.approx(2.5)


@pytest.mark.parametrize("points", [[(2.0, 1.2)], [(2.0, 1.2), (2.0, 1.2)], [(1.0, 2.0), (3.0, 0.4)]])
def test_points_that_tell_no_rising_line_scale_the_published_one(points: list[tuple[float, float]]) -> None:
    sums = [0.0] * SUMS
    assert line_value(sums, 0, 0.5, 2.0) == 0.0
    for z, y in points:
        add_point(sums, 0, 1.0, z, y)
    assert line_value(sums, 0, 0.5, 2.0) == pytest.approx(1.2)
    assert line_value(sums, 0, 0.5, 4.5) == pytest.approx(2.4)


def feedback(policy: SemiPdPolicy) -> tuple[list[int], list[float]]:
    deployment = Deployment(1000, 16, 4096, "h200-sxm", sms=132, mechanism=MPS)
    return policy.parameters(deployment)


def fitted(ttft: float, tpot: float, share_x: float, share_y: float, load: float) -> list[float]:
    """Fits with one observation each: the published shapes through it."""
    mf = [0.0] * 40
    add_point(mf, TTFT_LINE, 1.0, 1.0 / headroom(share_x, load), ttft)
    add_point(mf, TPOT_LINE, 1.0, 1.0 / share_y, tpot)
    return mf


def test_percentages_rise_only_for_the_one_that_fails() -> None:
    ki, kf = feedback(make_policy({"name": "semi-pd", "ttft_slo_ms": 400, "tpot_slo_ms": 200}))
    mf = fitted(0.8, 0.4, 0.5, 0.5, 0.1)
    for both in (True, False):
        assert decide(60, 60, both, both, 0.1, mf, ki, kf) == (60, 60)
    assert decide(60, 60, True, False, 0.1, mf, ki, kf) == (90, 60)
    assert decide(60, 60, False, True, 0.1, mf, ki, kf) == (60, 90)


def test_the_steps_stop_where_the_estimate_holds() -> None:
    """By hand: TTFT at x' = 1/2 and lambda 0.1 is observed as 0.5 s; with the published shape it falls like
    1 / (x' - 0.1) + 0.0323, so 0.4 s take x' = 0.603: of y = 50 that is x = 80, at 76."""
    ki, kf = feedback(
        make_policy(
            {"name": "semi-pd", "ttft_slo_ms": 400, "max_step": 9, "prefill_pct": 50, "decode_pct": 50}
        )
    )
    mf = fitted(0.5, 0.1, 0.5, 0.5, 0.1)
    assert decide(50, 50, True, False, 0.1, mf, ki, kf) == (80, 50)
    a = 0.5 / (1 / 0.4 + TTFT_SHAPE)
    assert a * (1 / (80 / 130 - 0.1) + TTFT_SHAPE) < 0.4 < a * (1 / (70 / 120 - 0.1) + TTFT_SHAPE)
    assert pytest.approx(0.0323, abs=1e-4) == TTFT_SHAPE
    assert pytest.approx(0.6076, abs=1e-4) == TPOT_SHAPE
    few, kf = feedback(make_policy({"name": "semi-pd", "ttft_slo_ms": 400, "max_step": 2}))
    assert decide(50, 50, True, False, 0.1, mf, few, kf) == (70, 50)


def test_a_side_that_has_all_takes_from_the_other() -> None:
    assert one_up(95, 60, 10) == (100, 60)
    assert one_up(100, 60, 10) == (100, 50)
    assert one_up(100, 15, 10) == (100, 15)
    assert one_up(100, 3, 10) == (100, 3)
    assert effective(100, 50) == pytest.approx(2 / 3)
    assert effective(30, 50) == 0.3


@given(
    x0=st.integers(1, 100),
    y0=st.integers(1, 100),
    step=st.integers(1, 50),
    ups=st.lists(st.booleans(), max_size=40),
)
def test_every_percentage_that_can_be_reached_is_declared(
    x0: int, y0: int, step: int, ups: list[bool]
) -> None:
    policy = make_policy({"name": "semi-pd", "prefill_pct": x0, "decode_pct": y0, "step": step})
    declared, x, y = set(policy.percentages()), x0, y0
    for prefill in ups:
        if prefill:
            x, y = one_up(x, y, step)
        else:
            y, x = one_up(y, x, step)
        assert (x, y) in declared


def test_sets_are_per_cent_of_the_sms() -> None:
    mps = Deployment(1000, 16, 4096, "h200-sxm", sms=132, mechanism=MPS)
    green = Deployment(1000, 16, 4096, "h200-sxm", sms=132)
    oss = make_policy("semi-pd-oss")
    assert oss.sm_sets(mps) == [(106, 132)]
    assert oss.sm_sets(green) == [(104, 132)]
    free = make_policy({"name": "semi-pd", "dynamic": False, "prefill_pct": 100})
    assert free.sm_sets(mps) == [(132, 132)]
    # few enough to price quickly
    assert len(make_policy("semi-pd").sm_sets(mps)) == 19


TOKEN, STEP = 4, 64


def in_ticks(arrivals: list[int], prompts: list[int], outputs: list[int]) -> Workload:
    return workload([t * TICK for t in arrivals], prompts, outputs)


def run(load: Workload, targets: tuple[float, float], **more: Any) -> RunRecords:
    """A prompt token takes 4 x 132 / S_p ticks, a decode step 64 x 132 / S_d; `targets`: TTFT and TPOT in ticks."""
    knobs = {key: more.pop(key) for key in list(more) if key in SemiPdPolicy.knobs}
    target = Target(ttft_s=targets[0] * TICK, tpot_s=targets[1] * TICK)
    cost = split_cost(lane_tables(TOKEN * TICK, STEP * TICK), 132)
    policy = make_policy({"name": "semi-pd", "max_num_seqs": 16, "watermark": 0.0, **knobs})
    options = {"jitter": False, "record_steps": True, "num_gpu_blocks": 2000, "mechanism": "mps", **more}
    return simulate(load, policy, cost, block_size=16, targets=(target,), estimator="oracle", **options)


STEADY = in_ticks(list(range(0, 160_000, 800)), [50] * 200, [6] * 200)


def test_the_old_split_serves_until_the_new_one_is_ready() -> None:
    # TTFT takes 4 x 50 x 100 / x ticks: 500 at 40 %, 333 at 60 %
    switch = 20_000
    records = run(
        STEADY,
        (400, 1000),
        prefill_pct=40,
        decode_pct=60,
        window_size=40,
        switch_s=switch * TICK,
        step=20,
        max_step=1,
    )
    prefill = lane(records, 0)
    sizes = prefill["sms"].drop_duplicates().tolist()
    assert sizes == [53, 79]
    moved = prefill.loc[prefill["sms"] == 79, "start_s"].iloc[0]
    # 40 launches are 6 or 7 requests' worth
    window = records.steps["end_s"].sort_values().iloc[39] / TICK
    assert window + switch <= moved / TICK < window + switch + 1000
    assert prefill["sms"].iloc[-1] == 79
    # nothing waits for the switch: gaps between prompts are those of the arrivals
    assert prefill["start_s"].diff().max() <= 1000 * TICK
    assert lane(records, 1)["sms"].unique().tolist() == [79]


def test_tpot_that_fails_gives_decode_more() -> None:
    records = run(STEADY, (5000, 100), prefill_pct=60, decode_pct=40, window_size=40, switch_s=0.0)
    decode = lane(records, 1)
    assert decode["sms"].iloc[0] == 53
    assert decode["sms"].iloc[-1] > 79
    assert lane(records, 0)["sms"].unique().tolist() == [79]


@pytest.mark.parametrize("targets", [(1, 1), (1e6, 1e6)])
def test_nothing_moves_where_both_or_neither_fail(targets: tuple[float, float]) -> None:
    records = run(STEADY, targets, prefill_pct=40, decode_pct=60, window_size=40, switch_s=0.0)
    assert set(records.steps["sms"]) == {53, 79}
    assert lane(records, 0)["sms"].nunique() == 1


def test_a_move_from_one_side_to_the_other_leaves_no_overlap_that_was_not_declared() -> None:
    """From x = 100 on TTFT takes from y, while the old prefill still runs beside."""
    records = run(STEADY, (150, 1000), prefill_pct=80, decode_pct=100, window_size=40, switch_s=0.0, step=20)
    assert lane(records, 0)["sms"].iloc[-1] == 132
    assert lane(records, 1)["sms"].iloc[-1] < 132
    check_laws(records)


TIGHT = {"ttft_slo_ms": 300, "window_size": 60, "switch_s": 0.2, "prefill_pct": 40, "decode_pct": 60}
MOVES = [
    Moves("semi-pd", "prefill_pct", 40, "prefill_sms", DOWN, {"dynamic": False}),
    Moves("semi-pd", "decode_pct", 40, "decode_sms", DOWN, {"dynamic": False}),
    Moves("semi-pd", "dynamic", False, "last_prefill_sms", DOWN, TIGHT),
    Moves("semi-pd", "window_size", 300, "prefill_sms", DOWN, TIGHT),
    Moves("semi-pd", "step", 5, "prefill_sms", DOWN, {**TIGHT, "max_step": 1}),
    Moves("semi-pd", "max_step", 1, "prefill_sms", DOWN, TIGHT),
    Moves("semi-pd", "percentile", 0.02, "prefill_sms", DOWN, TIGHT),
    Moves("semi-pd", "ttft_slo_ms", 100_000, "prefill_sms", DOWN, TIGHT),
    Moves("semi-pd", "tpot_slo_ms", 5, "decode_sms", UP, {**TIGHT, "ttft_slo_ms": 100_000, "decode_pct": 40}),
    Moves("semi-pd", "switch_s", 5.0, "prefill_sms", DOWN, TIGHT),
    Moves("semi-pd", "token_budget", 512, "largest_prefill", DOWN),
    Moves("semi-pd", "max_num_seqs", 20, "largest_batch", DOWN),
    Moves("semi-pd", "watermark", 0.2, "kv_tokens_held", DOWN),
]


@pytest.mark.parametrize("row", MOVES, ids=str)
def test_every_knob_moves_what_it_is_about(row: Moves) -> None:
    check_move(row, num_gpu_blocks=3000, mechanism="mps")


def test_what_is_kept_of_earlier_windows_steadies_the_fit() -> None:
    """A load that doubles: with nothing kept the estimate knows the new load alone, and asks for more at once."""
    sums = {}
    for keep in (0.0, 0.9):
        mf = [0.0] * 40
        for ttft in (0.3, 0.3, 0.3, 0.9):
            add_point(mf, TTFT_LINE, keep, 2.0, ttft)
        sums[keep] = line_value(mf, TTFT_LINE, TTFT_SHAPE, 1.5)
    assert sums[0.0] > sums[0.9]
    assert 0.25 in feedback(make_policy({"name": "semi-pd", "keep": 0.25}))[1]


def test_the_list_of_knobs_is_complete() -> None:
    assert {row.knob for row in MOVES} | {"keep"} == set(SemiPdPolicy.knobs)
    names = {info.name: info for info in list_policies()}
    assert names["semi-pd-oss"].base == "semi-pd"


@pytest.mark.parametrize("blocks", [None, 700])
def test_overload_is_served_to_the_end(blocks: int | None) -> None:
    policy = make_policy({"name": "semi-pd", **TIGHT})
    records = simulate(
        busy_load(), policy, real_cost(), record_steps=True, num_gpu_blocks=blocks, mechanism="mps"
    )
    check_laws(records)
    assert (records.requests["preemptions"].sum() > 0) == (blocks is not None)


def test_controlled_sharing_beats_an_ill_chosen_split() -> None:
    load = busy_load(rate=12.0)
    found = {}
    for dynamic in (False, True):
        policy = make_policy({"name": "semi-pd", **TIGHT, "prefill_pct": 20, "dynamic": dynamic})
        found[dynamic] = metrics(simulate(load, policy, real_cost(), record_steps=True, mechanism="mps"))
    assert found[True]["mean_ttft"] < found[False]["mean_ttft"]


@given(load=workloads(most=12), data=st.data())
@settings(max_examples=60)
def test_every_run_obeys_the_laws(load: Workload, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 16]))
    largest = int(np.max(-(-(load.prompt_tokens.astype(int) + load.output_tokens) // size)))
    policy = make_policy(
        {
            "name": "semi-pd",
            "token_budget": data.draw(st.sampled_from([4, 32, 256])),
            "max_num_seqs": data.draw(st.integers(1, 8)),
            "watermark": 0.0,
            "prefill_pct": data.draw(st.sampled_from([10, 60, 100])),
            "decode_pct": data.draw(st.sampled_from([10, 40, 100])),
            "window_size": data.draw(st.sampled_from([1, 5, 40])),
            "step": data.draw(st.sampled_from([10, 50])),
            "switch_s": data.draw(st.sampled_from([0.0, 2e-3])),
            "dynamic": data.draw(st.booleans()),
        }
    )
    cost = split_cost(rough_tables(TICK, wobble=True), 60, (1.3, 1.2))
    blocks = data.draw(st.one_of(st.integers(largest, 2 * largest + 2), st.just(20 * largest)))
    targets = (Target(*(data.draw(st.sampled_from([10, 1500, 1e6])) * TICK for _ in range(4))),)
    records = simulate(
        load, policy, cost, num_gpu_blocks=blocks, block_size=size, record_steps=True, estimator="oracle",
        targets=targets,
    )  # fmt: skip
    check_laws(records)

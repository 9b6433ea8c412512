"""Bullet in runs: its naive arm, bursts, reuse of idle SMs, what deciding costs, every knob, and the laws of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knob_frame import DOWN, UP, Moves
from lane_cost import lane_cost, lane_tables
from lane_frame import busy_load, lane, metrics
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload, workloads

from sim.cost import load_cost
from sim.engine import RunRecords, simulate
from sim.engine.cluster import open_cluster
from sim.engine.deployment import MPS, Deployment, Target
from sim.errors import SimctlError
from sim.metrics.conservation import check_conservation
from sim.policies import list_policies, make_policy
from sim.policies.bullet import BulletPolicy
from sim.policies.parts.bullet_state import BALANCED, D_ALPHA, HANDED_OVER, P_ALPHA, PAUSED
from sim.workload.workload import Workload

H200 = Deployment(10_000, 16, 4096, "h200-sxm", sms=132, layers=32)
NAIVE = {
    "partition": False,
    "scheduler": False,
    "online_alpha": False,
    "contention_belief": False,
    "layer_step": 0,
}
FREE = {"prediction_us": 0.0, "sync_us": 0.0, "handoff_us": 0.0}
STRICT = Target(ttft_per_token_s=2e-3, tpot_s=0.05)


def run(load: Workload, entry: dict[str, Any] | str, **options: Any) -> RunRecords:
    given_entry = {"name": entry} if isinstance(entry, str) else {"name": "bullet", **entry}
    known = {"jitter": False, "record_steps": True, "estimator": "oracle", "targets": (STRICT,), **options}
    return simulate(load, make_policy(given_entry), known.pop("cost", None) or real_cost(), **known)


def tpot_s(records: RunRecords) -> Any:
    frame = records.requests[records.requests["output_tokens"] > 1]
    return (frame["finish_s"] - frame["first_token_s"]) / (frame["output_tokens"] - 1)


def check_laws(records: RunRecords) -> None:
    """Everybody is served, each layer once for each prompt token, and a lane runs one thing at a time."""
    check_conservation(records)
    assert (records.requests["status"] == "finished").all()
    for number in (0, 1):
        mine = lane(records, number)
        assert (mine["start_s"].to_numpy()[1:] >= mine["end_s"].to_numpy()[:-1]).all()
    if records.requests["preemptions"].sum() == 0:
        prefill = lane(records, 0)
        layers = int((prefill["prefill_tokens"] * prefill["layers"]).sum())
        assert layers == 32 * records.requests["prompt_tokens"].sum()
        assert lane(records, 1)["decode_batch"].sum() == (records.requests["output_tokens"] - 1).sum()


def test_the_naive_arm_is_two_streams() -> None:
    """All ablations off: both phases on all SMs, first come first served, a whole prefill at once."""
    load = busy_load(60)
    shared = {"max_prefill_tokens": 1, "max_num_seqs": 64}
    naive = run(load, {**NAIVE, **FREE, **shared, "longest_pass": 8192})
    streams = run(load, {"name": "streams", **shared})
    for column in ("first_token_s", "finish_s", "max_itl_s"):
        assert naive.requests[column].tolist() == streams.requests[column].tolist()
    assert naive.totals["split_evaluations"] == naive.totals["decision_s"] == 0


def test_the_public_code_has_neither_partition_nor_order() -> None:
    records = run(busy_load(60), "bullet-oss")
    prefill = lane(records, 0)
    assert set(records.steps["sms"]) == {132}
    assert set(prefill["layers"]) == {32}
    # the prompt that crosses 1664 tokens is kept, none is added behind it
    assert prefill["prefill_tokens"].max() > 1664
    first = records.requests.sort_values("first_scheduled_s")["request_id"]
    assert first.tolist() == sorted(first)


def test_a_phase_alone_has_all_sms_and_both_have_disjoint_sets() -> None:
    records = run(workload([0.0, 0.05], [3000, 3000], [200, 20]), {"tpot_ms": 40, "handover_layers": 0})
    prefill, decode = lane(records, 0), lane(records, 1)
    assert set(prefill.loc[prefill["start_s"] < 0.05, "sms"]) == {132}
    beside = decode[(decode["start_s"] > 0.07) & (decode["end_s"] < prefill["end_s"].max())]
    assert len(beside) > 0
    assert beside["sms"].max() < 132
    assert set(prefill.loc[prefill["start_s"] > 0.07, "sms"]) == {132 - int(beside["sms"].iloc[0])}
    assert decode["sms"].iloc[-1] == 132


def test_hand_over_and_synchronisation_cost_what_they_say() -> None:
    """In ticks: a prompt of 100 takes 400, a step 64; 32 groups wait 10 each, the hand-over takes 50."""
    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK))
    us = 1e6 * TICK
    entry = {"sync_us": 10 * us, "handoff_us": 50 * us, "prediction_us": 0.0, "max_num_seqs": 8}
    records = run(workload([0.0], [100], [3]), entry, cost=cost, num_gpu_blocks=100, block_size=16)
    first, done = records.requests["first_token_s"][0], records.requests["finish_s"][0]
    # the mechanism's price for a new set is not due: both lanes only ever have all SMs
    assert first / TICK == pytest.approx(400 + 32 * 10, abs=0.1)
    assert (done - first) / TICK == pytest.approx(50 + 2 * 64, abs=0.1)


def test_who_is_handed_over_misses_the_step_that_is_launched_meanwhile() -> None:
    cost = lane_cost(lane_tables(4 * TICK, 64 * TICK))
    load = workload([0.0, 500 * TICK], [100, 8], [40, 3])
    entry = {**FREE, "handoff_us": 5e7 * TICK, "max_num_seqs": 8, "layer_step": 0}
    records = run(load, entry, cost=cost, num_gpu_blocks=100, block_size=16)
    decode = lane(records, 1)
    ready = records.requests["first_token_s"][1] + 50 * TICK
    joined = decode.loc[decode["decode_batch"] == 2, "start_s"].min()
    assert ready <= joined < ready + 70 * TICK


def burst(n: int = 40) -> Workload:
    """Four long answers under way, then many prompts at once."""
    return workload([0.0] * 4 + [2.0] * n, [200] * 4 + [1500] * n, [400] * 4 + [4] * n)


@pytest.mark.parametrize("estimator", ["oracle", "analytic"])
def test_a_burst_pauses_decode_and_tpot_holds(estimator: str) -> None:
    targets = (Target(ttft_per_token_s=0.4e-3, tpot_s=0.05),)
    load = burst()
    paused = run(load, {}, estimator=estimator, targets=targets)
    steady = run(load, {"scheduler": False}, estimator=estimator, targets=targets)
    assert (lane(paused, 0)["reason"] == PAUSED).sum() > 30
    assert PAUSED not in set(steady.steps["reason"])
    # a gap far beyond the limit of the mean, which the slack of earlier tokens pays
    assert paused.requests["max_itl_s"][:4].min() > 0.1 > steady.requests["max_itl_s"][:4].max()
    assert tpot_s(paused)[:4].max() <= 0.05
    ttft = [r.requests["first_token_s"][4:].mean() for r in (paused, steady)]
    assert ttft[0] < ttft[1]


def test_a_late_burst_without_slack_is_balanced() -> None:
    """TTFT and TPOT both missed: decode has more than its least set, prefill more than the rest of a whole search."""
    load = workload([0.0] * 60 + [0.5] * 30, [500] * 60 + [3000] * 30, [300] * 60 + [2] * 30)
    records = run(load, {}, targets=(Target(ttft_s=0.3, tpot_s=0.012),))
    balanced = lane(records, 1)
    assert BALANCED in set(balanced["reason"])
    sms = balanced.loc[balanced["reason"] == BALANCED, "sms"]
    assert 8 < sms.mean() < 124


def test_an_oracle_misses_no_tpot_at_low_load_that_the_analytic_belief_meets() -> None:
    load = busy_load(60, rate=4.0)
    oracle, analytic = (run(load, {}, estimator=e) for e in ("oracle", "analytic"))
    met = tpot_s(analytic) <= 0.05
    assert met.mean() > 0.9
    assert (tpot_s(oracle)[met] <= 0.05).all()


@pytest.mark.parametrize("layer_step", [0, 1])
@pytest.mark.parametrize("bias", [0.0, -0.7, 0.5])
def test_alpha_learns_by_how_much_a_belief_is_off(bias: float, layer_step: int) -> None:
    """Of launches that began alone and got a neighbour, and of none whose neighbour changed."""
    policy = make_policy({"name": "bullet", "layer_step": layer_step})
    cost, noisy = load_cost("llama-3.1-8b", "h200-sxm", "auto"), {"noisy": {"sigma": 0.0, "bias": bias}}
    cluster = open_cluster(
        busy_load(80, 12.0), policy, cost, jitter=False, estimator=noisy, targets=(STRICT,)
    )
    cluster.run()
    learnt = cluster.replicas[0].r.policy_f
    # prices are those of a settled clock: a prefill on a cool GPU is some per cent shorter, which alpha learns as well
    assert learnt[P_ALPHA] == pytest.approx(np.exp(-bias), rel=0.06)
    assert learnt[D_ALPHA] == pytest.approx(np.exp(-bias), rel=0.03)


@pytest.mark.parametrize("split", ["greedy", "closed_form", "exhaustive"])
def test_searches_agree_in_outcome_and_differ_in_price(split: str) -> None:
    entry = {"split": split, "tpot_ms": 20}
    records, best = (
        run(busy_load(60, 14.0), entry),
        run(busy_load(60, 14.0), {**entry, "split": "exhaustive"}),
    )
    ours, theirs = metrics(records), metrics(best)
    for name in ("mean_ttft", "mean_tpot"):
        assert ours[name] == pytest.approx(theirs[name], rel=0.15)
    if split != "exhaustive":
        assert records.totals["split_evaluations"] < 0.8 * best.totals["split_evaluations"]
        assert records.totals["decision_s"] < 0.8 * best.totals["decision_s"]


@pytest.mark.parametrize("split", ["greedy", "closed_form"])
def test_deciding_stays_within_the_papers_budget(split: str) -> None:
    """Check 20: a decision and a mask take at most 20 us, and 1 % of a layer step (A100, TPC masks)."""
    cost = load_cost("llama-3.1-8b", "a100-80gb-sxm", "spec")
    records = run(busy_load(40, 4.0), {"split": split}, cost=cost, mechanism="libsmctrl")
    prefill = lane(records, 0)
    assert 10.2e-6 + 4.1e-6 <= 20e-6
    mean = records.totals["decision_s"] / records.totals["decisions"]
    assert 0 < mean <= 20e-6
    assert mean <= 0.01 * (prefill["end_s"] - prefill["start_s"]).mean()


def test_reuse_of_idle_sms() -> None:
    """Each step of it uses more of the GPU; what is lent was idle, and decode is the one that gains."""
    load = busy_load(60, 14.0)
    by = {reuse: run(load, {"temporal_reuse": reuse}) for reuse in ("off", "layer", "overlap", "ideal")}
    for reuse, records in by.items():
        check_laws(records)
        lent = records.totals["sm_lent_s"]
        assert (lent > 0) == (reuse == "ideal")
    strict, decode = by["off"].steps, lane(by["off"], 1)
    assert strict["sms"].max() < 132
    assert decode["sms"].nunique() == 1
    assert by["layer"].requests["finish_s"].mean() < by["off"].requests["finish_s"].mean()
    assert set(lane(by["overlap"], 1)["sms"]) == {132}
    assert tpot_s(by["ideal"]).mean() < tpot_s(by["layer"]).mean()
    prefill = lane(by["ideal"], 0)
    idle = (prefill["end_s"] - prefill["start_s"]) * prefill["sms"] - prefill["active_sm_s"]
    assert (prefill["lent_sm_s"] <= idle + 1e-12).all()
    assert prefill["tail_sm_s"].min() >= 0


def test_decode_takes_all_sms_beside_the_last_layers_of_a_lone_prefill() -> None:
    records = run(workload([0.0, 0.05], [500, 4000], [60, 20]), {"handover_layers": 8, "tpot_ms": 20})
    decode, prefill = lane(records, 1), lane(records, 0)
    handed = decode[decode["reason"] == HANDED_OVER]
    assert len(handed) > 0
    assert set(handed["sms"]) == {132}
    end = prefill["end_s"].max()
    last = prefill[prefill["end_s"] > end - 0.1].iloc[-8:]
    assert handed["start_s"].min() >= last["start_s"].min()


def test_what_cannot_be_is_refused() -> None:
    for changed, sentence in (
        ({"min_decode_sms": 100}, "min_decode_sms = 100 leaves no split of the 132 SMs"),
        (
            {"temporal_reuse": "overlap", "mask_overlap": False},
            "temporal_reuse: overlap needs sets that may overlap",
        ),
    ):
        with pytest.raises(SimctlError, match=sentence):
            make_policy({"name": "bullet", **changed}).sm_sets(H200)
    with pytest.raises(SimctlError, match="a new set takes 5 s under mechanism 'mps'"):
        make_policy("bullet").sm_sets(replace(H200, mechanism=MPS))
    with pytest.raises(SimctlError, match="knob 'split' is 'best'"):
        make_policy({"name": "bullet", "split": "best"})


def test_limits_come_from_knobs_then_the_experiment_then_the_paper() -> None:
    inf = float("inf")
    cases = [
        ({}, Target(), [inf, 0.003, 0.15]),
        ({}, Target(ttft_s=0.4, tpot_s=0.03), [0.4, inf, 0.03]),
        ({}, Target(ttft_per_token_s=0.001), [inf, 0.001, 0.15]),
        ({"ttft_ms_per_token": 1.5, "tpot_ms": 200}, Target(ttft_s=0.4, tpot_s=0.03), [inf, 0.0015, 0.2]),
    ]
    for knobs, target, wanted in cases:
        _, floats = make_policy({"name": "bullet", **knobs}).parameters(
            replace(H200, targets=(target, Target()))
        )
        assert floats[2:5] == wanted
        assert len(floats) == 8


MEASURED = {"cost": "auto"}
BIASED = {"estimator": {"noisy": {"sigma": 0.0, "bias": -0.7}}}
TIGHT = {"tpot_ms": 20}
MOVES = [
    (Moves("bullet", "partition", False, "contention", UP), {}),
    (Moves("bullet", "scheduler", False, "mean_ttft", UP), {}),
    (
        Moves(
            "bullet", "contention_belief", False, "decode_sms_beside", DOWN, {**TIGHT, "online_alpha": False}
        ),
        MEASURED,
    ),
    (Moves("bullet", "online_alpha", False, "decode_sms_beside", DOWN, TIGHT), BIASED),
    (Moves("bullet", "alpha_weight", 0.003, "decode_sms_beside", DOWN, TIGHT), BIASED),
    (Moves("bullet", "layer_step", 8, "launches", DOWN), {}),
    (Moves("bullet", "split", "exhaustive", "predictions", UP), {}),
    (
        Moves(
            "bullet", "balance", "limit", "decode_sms_beside", DOWN, {"tpot_ms": 6, "ttft_ms_per_token": 0.02}
        ),
        {},
    ),
    (Moves("bullet", "temporal_reuse", "off", "decode_sms", DOWN), {}),
    (Moves("bullet", "splits", 3, "decode_sizes", DOWN, TIGHT), {}),
    (Moves("bullet", "min_decode_sms", 40, "decode_sms_beside", UP), {}),
    (Moves("bullet", "mask_overlap", False, "contention", DOWN), {}),
    (Moves("bullet", "handover_layers", 8, "handed_over", UP), {}),
    (Moves("bullet", "percentile", 50.0, "decode_sms_beside", DOWN, TIGHT), {}),
    (Moves("bullet", "look_ahead", 1, "mean_ttft", UP), {}),
    (Moves("bullet", "max_prefill_tokens", 4000, "launches", DOWN), {}),
    (Moves("bullet", "longest_pass", 1024, "largest_prefill", DOWN), {}),
    (Moves("bullet", "max_num_seqs", 8, "largest_batch", DOWN), {}),
    (Moves("bullet", "watermark", 0.3, "kv_tokens_held", DOWN), {}),
    (Moves("bullet", "ttft_ms_per_token", 0.2, "paused", UP), {}),
    (Moves("bullet", "tpot_ms", 20, "decode_sms_beside", UP), {}),
    (Moves("bullet", "prediction_us", 200.0, "decision_s", UP), {}),
    (Moves("bullet", "sync_us", 300.0, "mean_ttft", UP), {}),
    (Moves("bullet", "handoff_us", 20_000.0, "mean_tpot", UP), {}),
    (
        Moves("bullet", "decode_stream", "high", "decode_slowdown", DOWN, {"temporal_reuse": "overlap"}),
        MEASURED,
    ),
]


def numbers(records: RunRecords) -> dict[str, float]:
    """Those of `lane_frame`, and those that Bullet's knobs are about."""
    decode, prefill = lane(records, 1), lane(records, 0)
    return {
        **metrics(records),
        "launches": float(len(prefill)),
        "paused": float((prefill["reason"] == PAUSED).sum()),
        "handed_over": float((decode["reason"] == HANDED_OVER).sum()),
        "predictions": float(records.totals["split_evaluations"]),
        "decision_s": records.totals["decision_s"],
        "contention": records.totals["sm_contention_s"],
        "decode_slowdown": float(decode["slowdown"].mean()),
    }


@lru_cache(maxsize=64)
def outcome(entry: tuple[tuple[str, Any], ...], measured: bool, biased: bool) -> dict[str, float]:
    cost = load_cost("llama-3.1-8b", "h200-sxm", "auto") if measured else real_cost()
    options = BIASED if biased else {}
    return numbers(run(busy_load(120, 14.0), dict(entry), cost=cost, num_gpu_blocks=3000, **options))


@pytest.mark.parametrize(("row", "options"), MOVES, ids=[str(row) for row, _ in MOVES])
def test_every_knob_moves_what_it_is_about(row: Moves, options: dict[str, Any]) -> None:
    before, after = (
        outcome(tuple(sorted(entry.items())), options is MEASURED, options is BIASED)
        for entry in (row.given, {**row.given, row.knob: row.value})
    )
    change = after[row.metric] - before[row.metric]
    assert change * row.direction > 0, f"{row}: {row.metric} goes from {before[row.metric]} by {change}"


def test_the_list_of_knobs_is_complete() -> None:
    assert {row.knob for row, _ in MOVES} == set(BulletPolicy.knobs)
    assert {"bullet", "bullet-oss"} <= {info.name for info in list_policies()}


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    overlap = draw(st.booleans())
    reuses = ("off", "layer", "overlap", "ideal") if overlap else ("off", "layer", "ideal")
    return {
        "partition": draw(st.booleans()),
        "scheduler": draw(st.booleans()),
        "layer_step": draw(st.sampled_from([0, 1, 5])),
        "split": draw(st.sampled_from(["greedy", "closed_form", "exhaustive"])),
        "temporal_reuse": draw(st.sampled_from(reuses)),
        "mask_overlap": overlap,
        "splits": draw(st.sampled_from([1, 3])),
        "handover_layers": draw(st.sampled_from([0, 4])),
        "longest_pass": draw(st.sampled_from([16, 8192])),
        "max_num_seqs": draw(st.integers(1, 8)),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "tpot_ms": draw(st.sampled_from([0.001, 1.0, 150.0])),
        "ttft_ms_per_token": draw(st.sampled_from([0.0001, 3.0])),
    }


@settings(max_examples=25)
@given(workloads(most=10), entries(), st.integers(12, 60))
def test_laws(load: Workload, entry: dict[str, Any], blocks: int) -> None:
    cost = lane_cost(rough_tables(TICK), (1.5, 1.25))
    check_laws(run(load, entry, cost=cost, num_gpu_blocks=blocks, block_size=16))


def test_check_4_chunks_read_the_cache_again() -> None:
    """A prompt in N chunks reads N (N + 1) / 2 chunks of keys and values (arXiv:2504.19516 section 2.2)."""
    chunk, n = 512, 8
    records = simulate(workload([0.0], [chunk * n], [1]), make_policy("sarathi-512"), real_cost())
    assert records.totals["prefill_kv_tokens"] == chunk * n * (n + 1) // 2
    whole = run(workload([0.0], [chunk * n], [1]), {})
    assert whole.totals["prefill_kv_tokens"] == chunk * n


def test_runs_are_the_same_twice() -> None:
    load = busy_load(40)
    first, again = (run(load, {}, jitter=True).requests["finish_s"].to_numpy() for _ in range(2))
    assert np.array_equal(first, again)

"""The scheduler that picks chunks from verified combinations: candidates, classes, limits, knobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fingerprint import fingerprint
from workloads import workload

from sim.cost import load_cost
from sim.cost.attention_facts import AttentionFacts, attention_facts
from sim.cost.gpu import load_gpu
from sim.cost.model import load_model
from sim.engine import RunRecords, simulate
from sim.engine.deployment import Target
from sim.errors import SimctlError
from sim.policies import make_policy
from sim.policies.parts.combinations import COMBINATIONS, candidates, combination, octave

A100 = load_cost("llama-3-8b", "a100-80gb-sxm", "spec", {"tp": 2})
RNG = np.random.default_rng(1)
LOAD = workload(
    np.cumsum(RNG.exponential(0.05, 40)).tolist(),
    RNG.integers(3000, 7000, 40).tolist(),
    RNG.integers(30, 300, 40).tolist(),
)


def run(cost: Any = A100, name: str = "resource-aware", **knobs: Any) -> RunRecords:
    engine = {
        key: knobs.pop(key)
        for key in ("bursts", "estimator", "targets", "jitter", "record_steps")
        if key in knobs
    }
    return simulate(LOAD, make_policy({"name": name, **knobs}), cost, **{"jitter": False, **engine})


def p99_ms(records: RunRecords) -> float:
    order = np.argsort(records.itl_s)
    share = np.cumsum(records.itl_count[order]) / records.itl_count.sum()
    return 1e3 * float(records.itl_s[order][np.searchsorted(share, 0.99)])


def share_over(records: RunRecords, limit_s: float) -> float:
    return float(records.itl_count[records.itl_s > limit_s].sum() / records.itl_count.sum())


def test_candidates_fill_shares_of_the_gpus_slots():
    # 216 slots: a quarter of a wave is 54 CTAs, one row of tiles of 32 heads; a whole one 6 rows
    assert candidates(AttentionFacts(), 108, 2048) == [128, 384, 768, 1664]
    assert candidates(AttentionFacts(q_heads=16), 108, 1024) == [384, 768]
    assert candidates(AttentionFacts(), 108, 100) == [100]
    for sms in (78, 108, 132, 148):
        for size in candidates(AttentionFacts(), sms, 10**6):
            ctas = size // 128 * 32
            assert ctas <= 8 * 2 * sms
            assert 2 * sms % ctas < ctas


def test_only_short_chunks_where_both_kinds_do_not_fit_an_sm():
    model = load_model("llama-3.1-8b")
    assert attention_facts(model, load_gpu("a100-80gb-sxm")).both_fit
    small = attention_facts(model, load_gpu("l40s"))
    assert not small.both_fit
    assert candidates(small, 142, 4096) == candidates(AttentionFacts(), 142, 4096)[:1]


def test_classes_are_told_apart_and_stay_within_the_table():
    assert [octave(x) for x in (0, 1, 2, 3, 4, 1023, 1024)] == [0, 0, 1, 1, 2, 9, 10]
    assert combination(0, 0, 0, 216, 0) == 0
    far = combination(7, 1 << 30, 1 << 30, 216, 1 << 40)
    assert 0 < far < COMBINATIONS
    base = combination(2, 3000, 100, 216, 50_000)
    assert combination(2, 3100, 101, 216, 50_500) == base
    others = {
        combination(3, 3000, 100, 216, 50_000),
        combination(2, 9000, 100, 216, 50_000),
        combination(2, 3000, 300, 216, 50_000),
        combination(2, 3000, 100, 216, 90_000),
    }
    assert len(others | {base}) == 5


def test_a_tighter_target_is_met_and_costs_prefill_speed():
    tight, loose = run(tbt_slo_ms=30), run(tbt_slo_ms=90)
    assert p99_ms(tight) <= 30 < p99_ms(loose) <= 90
    assert tight.requests["first_token_s"].mean() > loose.requests["first_token_s"].mean()


def test_the_target_is_the_experiments_unless_the_knob_is_set():
    targets = (Target(itl_s=0.5), Target(itl_s=0.04))
    assert run(targets=targets).totals == run(tbt_slo_ms=40).totals
    assert run(targets=(Target(tpot_s=0.06),)).totals == run(tbt_slo_ms=60).totals
    assert run().totals == run(tbt_slo_ms=50).totals


def test_what_was_observed_corrects_a_belief_that_is_twice_too_fast():
    wrong = {"noisy": {"sigma": 0.0, "bias": -0.7}}
    table = run(tbt_slo_ms=40, estimator=wrong, unverified_margin=0.0)
    bound = run(name="pod", token_budget=2048, step_limit_ms=40, estimator=wrong)
    assert share_over(table, 0.040) < 0.05 < 0.25 < share_over(bound, 0.040)


def test_a_margin_on_what_was_never_run_spares_the_slowest_tokens():
    wrong = {"noisy": {"sigma": 0.0, "bias": -0.4}}
    bold, careful = (run(tbt_slo_ms=40, unverified_margin=m, estimator=wrong) for m in (0.0, 1.0))
    assert share_over(careful, 0.040) < share_over(bold, 0.040)


def test_prompts_wait_no_longer_than_they_may():
    # nothing fits: prompts go on by skips alone
    rare, often = (run(tbt_slo_ms=1, max_skips=skips, record_steps=True) for skips in (20, 2))
    assert rare.requests["first_token_s"].mean() > often.requests["first_token_s"].mean()
    assert rare.itl_s.mean() < often.itl_s.mean()
    for records, skips in ((rare, 20), (often, 2)):
        steps = records.steps
        waits = (steps["prefill_tokens"] == 0) & (steps["decode_batch"] > 0)
        runs = waits.astype(int).groupby((~waits).cumsum()).sum()
        assert runs[:-1].max() == skips
        assert (records.requests["status"] == "finished").all()
    assert run(tbt_slo_ms=1, max_skips=0).totals["iterations"] < often.totals["iterations"]


def test_chunks_below_the_least_intensity_are_not_taken():
    usual, dense = (
        run(tbt_slo_ms=40, least_intensity=least, record_steps=True).steps for least in (0.5, 12.0)
    )
    assert usual["prefill_tokens"].replace(0, np.nan).min() < dense["prefill_tokens"].max()
    beside = dense[(dense["prefill_tokens"] > 0) & (dense["decode_batch"] > 0)]
    # the least candidate keeps prompts from starving, remainders are what they are
    assert len(beside) < len(usual[(usual["prefill_tokens"] > 0) & (usual["decode_batch"] > 0)])


def test_fused_attention_leaves_room_for_longer_chunks():
    fused, apart = (run(tbt_slo_ms=40, attention=mode) for mode in ("pod", "serial"))
    assert fused.totals["fast_path_steps"] > 0 == apart.totals["fast_path_steps"]
    assert fused.requests["first_token_s"].mean() < apart.requests["first_token_s"].mean()


def test_the_budget_and_sarathis_knobs_reach_it():
    steps = run(token_budget=400, tbt_slo_ms=200, record_steps=True).steps
    assert steps["prefill_tokens"].max() <= 400
    assert (
        run(tbt_slo_ms=200, token_budget=512).totals["iterations"] > run(tbt_slo_ms=200).totals["iterations"]
    )
    assert run(max_num_seqs=4).end_s > run().end_s
    late = run(watermark=0.9).requests["first_scheduled_s"].max()
    assert late > run().requests["first_scheduled_s"].max()


def test_bursts_change_nothing_and_all_is_served():
    fast, slow = (run(jitter=True, bursts=bursts, record_steps=True) for bursts in (True, False))
    assert fingerprint(fast) == fingerprint(slow)
    assert (fast.requests["generated_tokens"] == fast.requests["output_tokens"]).all()
    assert fast.steps["prefill_tokens"].sum() == fast.requests["prompt_tokens"].sum()


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"tbt_slo_ms": 0}, "knob 'tbt_slo_ms' is 0; the least is 1"),
        ({"unverified_margin": -0.1}, "knob 'unverified_margin' is -0.1; the least is 0"),
        ({"max_skips": 1.5}, "knob 'max_skips' is 1.5"),
        ({"attention": "fused"}, "knob 'attention' is 'fused'"),
        ({"one_prefill": True}, "has no knob 'one_prefill'"),
    ],
)
def test_bad_knobs_are_told_in_one_sentence(knobs, sentence):
    with pytest.raises(SimctlError, match=sentence):
        make_policy({"name": "resource-aware", **knobs})

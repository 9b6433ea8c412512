"""POD over Sarathi batches: its limits, every knob, fallbacks, bounds by latency, and bursts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fingerprint import fingerprint
from workloads import workload

from sim.cost import load_cost
from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import MixedShape
from sim.cost.cta_terms import cta_terms
from sim.cost.fused_modes import fused_run
from sim.engine import RunRecords, simulate
from sim.engine.deployment import Target
from sim.errors import SimctlError
from sim.metrics.definitions import Slo
from sim.metrics.summary import summarise
from sim.policies import make_policy

A100 = load_cost("llama-3-8b", "a100-80gb-sxm", "spec", {"tp": 2})
H200 = load_cost("llama-3.1-8b", "h200-sxm", "spec")


def long_contexts(n: int = 40) -> Any:
    """Prompts of thousands of tokens that come faster than they are served, so that nearly every step is mixed."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.05, n)).tolist()
    return workload(arrivals, rng.integers(3000, 7000, n).tolist(), rng.integers(30, 300, n).tolist())


LOAD = long_contexts()


def run(cost: Any = A100, load: Any = LOAD, name: str = "pod", **knobs: Any) -> RunRecords:
    engine = {key: knobs.pop(key) for key in ("bursts", "estimator", "targets", "jitter", "block_size", "record_steps")
              if key in knobs}  # fmt: skip
    return simulate(
        load, make_policy({"name": name, "token_budget": 512, **knobs}), cost, **{"jitter": False, **engine}
    )


def summary(records: RunRecords, cost: Any = A100) -> dict[str, Any]:
    return summarise(records, slo=Slo(), cost=cost, policy_label="pod", request_rate=None, seed=0)


def same_service(a: RunRecords, b: RunRecords) -> None:
    for column in a.requests:
        assert a.requests[column].tolist() == b.requests[column].tolist() or a.requests[column].isna().any()
    for column in ("finish_s", "first_token_s", "max_itl_s"):
        assert np.array_equal(a.requests[column], b.requests[column], equal_nan=True)
    for name in ("itl_s", "itl_count", "itl_end_s"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert a.end_s == b.end_s
    assert a.totals["gpu_s"] == b.totals["gpu_s"]


@pytest.mark.parametrize("aware", [True, False])
def test_without_a_speed_up_it_is_sarathi_to_the_bit(aware):
    pod = run(speedup=1.0, shape_aware=aware, jitter=True)
    same_service(pod, run(name="sarathi", one_prefill=aware, jitter=True))
    assert run().end_s < pod.end_s


def test_a_kernel_that_never_runs_is_sarathi_to_the_bit():
    pages = run(contiguous_kv=False)
    same_service(pages, run(name="sarathi", one_prefill=True))
    told = summary(pages)
    assert told["fast_path_pct"] == 0.0
    assert told["fallbacks"] == {"KV page size": int(pages.totals["fallback/KV page size"])}
    assert told["fallbacks"]["KV page size"] == run().totals["fast_path_steps"]


def test_bursts_change_nothing():
    for knobs in ({}, {"shape_aware": False}, {"step_limit_ms": 40}, {"max_chunk": 200}):
        fast, slow = (run(jitter=True, bursts=bursts, record_steps=True, **knobs) for bursts in (True, False))
        assert fingerprint(fast) == fingerprint(slow)


def test_tokens_and_counters_add_up():
    records = run(record_steps=True, shape_aware=False)
    requests, steps = records.requests, records.steps
    assert (requests["status"] == "finished").all()
    assert (requests["generated_tokens"] == requests["output_tokens"]).all()
    assert steps["prefill_tokens"].sum() == requests["prompt_tokens"].sum()
    mixed = steps[(steps["prefill_tokens"] > 0) & (steps["decode_batch"] > 0)]
    assert records.totals["fast_path_steps"] == (mixed["fallback"] == 0).sum() > 0
    assert records.totals["fallback/several prefill chunks in one step"] == (mixed["chunks"] > 1).sum() > 0
    assert ((mixed["fallback"] == 1) == (mixed["chunks"] > 1)).all()
    fused = steps["virtual_ctas"] > 0
    assert (
        fused == ((steps["prefill_tokens"] > 0) & (steps["decode_batch"] > 0) & (steps["chunks"] == 1))
    ).all()
    assert (steps.loc[fused, "occupancy"] > 0).all()
    assert (steps.loc[~fused, "tile"] == "").all()


def test_separate_attention_has_no_fast_path():
    told = summary(run(name="sarathi"))
    assert told["fast_path_pct"] is None
    assert told["fallbacks"] == {}


def test_reports_say_where_fused_prices_come_from():
    records = run()
    told = summary(records)
    assert records.fused_label in told["provenance"]
    assert sum(told["provenance"].values()) == pytest.approx(1.0)
    assert summary(run(name="sarathi"))["provenance"].keys() < told["provenance"].keys()


@pytest.mark.parametrize("mode", ["streams", "hfuse", "batched", "pod"])
def test_any_chunked_policy_runs_in_any_mode(mode):
    cost = load_cost("llama-3-8b", "a100-80gb-sxm", "spec", {"tp": 2}, {"attention": mode})
    plain = run(name="sarathi", one_prefill=True)
    made = run(cost, name="sarathi", one_prefill=True)
    assert made.totals["fast_path_steps"] > 0
    assert made.totals["gpu_s"] != plain.totals["gpu_s"]
    vllm = {"name": "vllm", "max_num_batched_tokens": 512, "max_num_seqs": 128}
    sglang = {"name": "sglang", "chunked_prefill_size": 512, "mixed_chunk": True, "max_running_requests": 128}
    for entry in (vllm, {**sglang, "max_prefill_tokens": 512}):
        assert simulate(LOAD, make_policy(entry), cost, jitter=False).totals["fast_path_steps"] > 0


def test_a_mixed_pass_of_two_lanes_is_fused_too():
    fused, apart = (
        load_cost("llama-3.1-8b", "h200-sxm", "spec", kernels={"attention": mode})
        for mode in ("streams", "serial")
    )
    entry = {"name": "duetserve"}
    one, other = (simulate(LOAD, make_policy(entry), cost, jitter=False) for cost in (fused, apart))
    assert one.totals["fast_path_steps"] > 0
    assert other.totals["fast_path_steps"] == 0
    assert one.end_s != other.end_s


def test_variants_choose_the_kernel_of_the_gpu():
    assert run(variant="auto").totals == run(variant="artefact").totals
    assert run(H200, variant="auto").totals == run(H200, variant="flashinfer-batch").totals
    # on Hopper all of them are FlashAttention 2 against 3, and lose
    assert run(H200).totals["gpu_s"] > run(H200, speedup=1.0).totals["gpu_s"]


def test_flashinfers_single_kernel_takes_one_chunk_and_its_batched_one_several():
    single, several = (
        run(H200, variant=variant, shape_aware=False) for variant in ("flashinfer", "flashinfer-batch")
    )
    assert single.totals["fallback/several prefill chunks in one step"] > 0
    assert several.totals["fallback/several prefill chunks in one step"] == 0


def test_page_size_is_part_of_what_is_supported():
    assert run(H200, block_size=16).totals["fallback/KV page size"] == 0
    assert run(H200, block_size=32).totals["fallback/KV page size"] > 0
    assert run(contiguous_kv=False, block_size=256).totals["fallback/KV page size"] == 0


def test_splits_and_ctas_cost_what_the_kernel_says():
    assert run(split="vanilla").totals["gpu_s"] > run(split="limited").totals["gpu_s"]
    # beyond 4K of context two CTAs an SM are better than four
    assert run(ctas_per_sm=4).totals["gpu_s"] > run(ctas_per_sm=2).totals["gpu_s"]


def test_tickets_matter_as_they_do_in_the_kernel():
    terms, shape = cta_terms(A100.gpu), MixedShape(8192, 0, 192, 8192, 32, 8)
    fair, half = (
        fused_run(terms, AttentionMode("pod", tickets=t), shape).seconds for t in ("proportional", "50:50")
    )
    assert half > 1.05 * fair
    assert run(tickets="50:50").totals["gpu_s"] != run().totals["gpu_s"]


def test_the_more_the_kernel_speeds_up_the_sooner_all_is_done():
    ends = [run(speedup=speedup).end_s for speedup in (0.5, 1.0, 1.5, 3.0)]
    assert ends == sorted(ends, reverse=True)
    assert len(set(ends)) == 4


def test_sarathis_own_knobs_reach_it():
    assert run(token_budget=2048).totals["iterations"] < run().totals["iterations"]
    assert run(max_num_seqs=4).end_s > run().end_s
    few = run(watermark=0.9)
    assert few.requests["first_scheduled_s"].max() > run().requests["first_scheduled_s"].max()


def longest_ms(records: RunRecords) -> float:
    return 1e3 * float(records.itl_s.max())


def test_a_bound_on_chunks_bounds_the_slowest_token():
    free, bound = run(token_budget=2048), run(token_budget=2048, max_chunk=256)
    assert longest_ms(bound) < 0.5 * longest_ms(free)
    steps = run(token_budget=2048, max_chunk=256, record_steps=True).steps
    assert steps["prefill_tokens"].max() == 256


@pytest.mark.parametrize("limit_ms", [30, 60])
def test_a_limit_on_steps_holds_for_every_one_of_them(limit_ms):
    # with the truth as belief; the first and the last chunk of a prompt may be of any size
    records = run(token_budget=2048, step_limit_ms=limit_ms, estimator="oracle", least_chunk=1)
    assert longest_ms(records) <= 1.001 * limit_ms
    assert longest_ms(run(token_budget=2048)) > limit_ms


def test_a_larger_limit_buys_prefill_speed_with_token_latency():
    tight, loose = (run(token_budget=2048, step_limit_ms=limit, estimator="oracle") for limit in (30, 90))
    first = [records.requests["first_token_s"].mean() for records in (tight, loose)]
    assert first[0] > first[1]
    assert longest_ms(tight) < longest_ms(loose)


def test_a_limit_below_what_decodes_take_leaves_prompts_the_least_chunk():
    records = run(step_limit_ms=1, least_chunk=64, record_steps=True)
    assert (records.requests["status"] == "finished").all()
    beside = records.steps[(records.steps["prefill_tokens"] > 0) & (records.steps["decode_batch"] > 0)]
    assert beside["prefill_tokens"].max() == 64
    more = run(step_limit_ms=1, least_chunk=128)
    assert more.totals["iterations"] < records.totals["iterations"]


def test_a_limit_from_the_experiments_slo_is_the_strictest():
    targets = (Target(itl_s=0.2), Target(itl_s=0.05))
    asked = run(token_budget=2048, limit_from_slo=True, targets=targets)
    assert asked.totals == run(token_budget=2048, step_limit_ms=50).totals
    unasked = run(token_budget=2048, limit_from_slo=True)
    assert unasked.totals == run(token_budget=2048).totals


def test_it_reads_only_its_belief():
    truth = {"token_budget": 2048, "step_limit_ms": 50}
    bold = run(estimator={"noisy": {"sigma": 0.0, "bias": -0.7}}, **truth)
    shy = run(estimator={"noisy": {"sigma": 0.0, "bias": 0.7}}, **truth)
    assert longest_ms(shy) < 50 < longest_ms(bold)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"one_prefill": True}, "policy 'pod' has no knob 'one_prefill'"),
        ({"variant": "fa2"}, "knob 'variant' is 'fa2'"),
        ({"tickets": "even"}, "knob 'tickets' is 'even'"),
        ({"ctas_per_sm": 3}, "ctas_per_sm is 3"),
        ({"speedup": -1}, "knob 'speedup' is -1; the least is 0"),
        ({"least_chunk": 0}, "knob 'least_chunk' is 0; the least is 1"),
        ({"step_limit_ms": 0}, "knob 'step_limit_ms' is 0; the least is 1"),
        ({"limit_from_slo": 1}, "knob 'limit_from_slo' is 1"),
    ],
)
def test_bad_knobs_are_told_in_one_sentence(knobs, sentence):
    with pytest.raises(SimctlError, match=sentence):
        make_policy({"name": "pod", **knobs})

"""The rules that tell the schedulers apart, each in a run small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stub_cost import TICK, plain_tables, real_cost, stub_cost
from workloads import workload

from sim.cost import load_cost
from sim.engine import RunRecords, simulate
from sim.policies import make_policy

STEP = 64 * TICK
COST = stub_cost(plain_tables(fixed_s=STEP))  # every step takes the same


def run(
    name: str,
    arrivals: list[int],
    prompts: list[int],
    outputs: list[int],
    blocks: int = 1000,
    size: int = 1,
    asked: list[int] | None = None,
    ranks: list[int] | None = None,
    **knobs: Any,
) -> RunRecords:
    """Arrivals count steps; `ranks` are priorities, lower ones first."""
    load = workload([n * STEP for n in arrivals], prompts, outputs)
    if ranks:
        load = replace(load, priority=np.array(ranks, np.int16))
    if asked:
        load = replace(load, max_new_tokens=np.array(asked, np.int32))
    policy = make_policy({"name": name, **knobs})
    return simulate(
        load, policy, COST, num_gpu_blocks=blocks, block_size=size, jitter=False, record_steps=True
    )


def shapes(records: RunRecords) -> list[tuple[int, int, int]]:
    """(prompt tokens, chunks, decodes) of each step."""
    assert records.steps is not None
    columns = (records.steps[c].tolist() for c in ("prefill_tokens", "chunks", "decode_batch"))
    return list(zip(*columns, strict=True))


def test_vllm_lets_decodes_sit_out_when_the_budget_is_gone() -> None:
    # four decode; a budget of 3 serves the first three admitted
    records = run("vllm", [0] * 4, [1] * 4, [9, 9, 9, 2], max_num_batched_tokens=3, max_num_seqs=4)
    assert shapes(records)[0] == (3, 3, 0)
    # the fourth starts only when one of the three has finished
    assert records.requests["first_scheduled_s"][3] == records.requests["finish_s"][0]


def test_vllm_caps_long_prompts_and_gives_the_rest_to_others() -> None:
    knobs = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "long_prefill_token_threshold": 4}
    records = run("vllm", [0, 0], [10, 3], [1, 1], **knobs)
    assert shapes(records) == [(7, 2, 0), (4, 1, 0), (2, 1, 0)]


def test_vllm_takes_blocks_as_it_computes_and_sarathi_for_the_whole_prompt() -> None:
    # 8 + 8 tokens in a pool of 12: only vLLM starts both
    knobs = {"vllm": {"max_num_batched_tokens": 10}, "sarathi": {"token_budget": 10}}
    starts = {
        name: run(name, [0, 0], [8, 8], [1, 1], blocks=12, max_num_seqs=4, **knobs[name])
        .requests["first_scheduled_s"]
        .tolist()
        for name in knobs
    }
    assert starts == {"vllm": [0.0, 0.0], "sarathi": [0.0, STEP]}


def test_the_whole_prompt_gate_of_vllm() -> None:
    records = run(
        *("vllm", [0, 0], [8, 8], [1, 1]),
        12,
        max_num_batched_tokens=10,
        max_num_seqs=4,
        whole_prompt_gate=True,
    )
    assert records.requests["first_scheduled_s"].tolist() == [0.0, STEP]


def test_vllm_evicts_the_last_admitted_and_admits_nobody_in_that_step() -> None:
    # 4 + 4 prompt tokens, 10 blocks: the third decode step finds none left
    records = run(
        "vllm", [0, 0, 1], [4, 4, 1], [6, 6, 1], blocks=10, max_num_batched_tokens=64, max_num_seqs=2
    )
    assert shapes(records)[:3] == [(8, 2, 0), (0, 0, 2), (0, 0, 1)]
    assert records.requests["preemptions"].tolist() == [0, 1, 0]
    # it goes back to the front: before the one that came later
    # with its prompt and both tokens that it had made; then the third request's prompt
    assert shapes(records)[6] == (4 + 2 + 1, 2, 0)
    assert records.requests["first_scheduled_s"][2] == records.requests["finish_s"][0] == 6 * STEP


def test_vllm_serves_the_urgent_first_and_equals_by_arrival() -> None:
    knobs = {"max_num_batched_tokens": 64, "max_num_seqs": 1}
    ranks = [0, 2, 1, 1, 0]
    fcfs = run("vllm", [0, 1, 1, 2, 3], [4] * 5, [5] * 5, ranks=ranks, **knobs)
    urgent = run(
        "vllm", [0, 1, 1, 2, 3], [4] * 5, [5] * 5, ranks=ranks, scheduling_policy="priority", **knobs
    )
    assert fcfs.requests["first_scheduled_s"].argsort().tolist() == [0, 1, 2, 3, 4]
    assert urgent.requests["first_scheduled_s"].argsort().tolist() == [0, 4, 2, 3, 1]


def test_vllm_evicts_the_least_urgent_even_if_it_came_first() -> None:
    # 4 + 4 prompt tokens, 9 blocks: one new block for the two decodes; the first request is the less urgent
    knobs = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "ranks": [1, 0], "blocks": 9}
    fcfs = run("vllm", [0, 0], [4, 4], [5, 5], **knobs)
    urgent = run("vllm", [0, 0], [4, 4], [5, 5], scheduling_policy="priority", **knobs)
    assert fcfs.requests["preemptions"].tolist() == [0, 1]
    # it had been given the last block in this very step: the other takes it over
    assert urgent.requests["preemptions"].tolist() == [1, 0]
    assert shapes(urgent)[:3] == [(8, 2, 0), (0, 0, 1), (0, 0, 1)]


def test_an_urgent_arrival_evicts_nobody() -> None:
    # vLLM v1 evicts for a running request only
    knobs = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "scheduling_policy": "priority"}
    records = run("vllm", [0, 1], [8, 8], [5, 5], blocks=14, ranks=[1, 0], **knobs)
    assert records.requests["preemptions"].sum() == 0
    assert records.requests["first_scheduled_s"][1] == records.requests["finish_s"][0]


def test_vllm_v0_runs_whole_prompts_alone_and_first() -> None:
    # budget 10: the second prompt does not fit beside the first, the third must not pass it
    records = run("vllm-v0", [0, 1, 1, 1], [4, 6, 7, 2], [9, 1, 1, 1], max_num_batched_tokens=10)
    assert shapes(records)[:4] == [(4, 1, 0), (6, 1, 0), (9, 2, 0), (0, 0, 1)]
    assert records.requests["max_itl_s"][0] == 3 * STEP


def test_vllm_v0_wants_a_free_block_for_each_decode_and_evicts_the_youngest() -> None:
    # blocks of 4, 4 in all: both prompts take two, and the first decode asks for a free one that it does not need
    records = run(
        "vllm-v0", [0, 0], [5, 5], [3, 3], blocks=4, size=4, watermark=0.0, max_num_batched_tokens=64
    )
    assert shapes(records)[:3] == [(10, 2, 0), (0, 0, 1), (6, 1, 0)]
    first, second = records.requests["preemptions"]
    assert first == 0 < second


def test_vllm_v0_recomputes_what_has_outgrown_its_budget_in_pieces() -> None:
    # 6 prompt tokens within the budget of 6; evicted with 2 more
    records = run("vllm-v0", [0, 0], [6, 6], [5, 5], blocks=17, max_num_batched_tokens=6, watermark=0.0)
    assert (records.requests["status"] == "finished").all()
    assert (6, 1, 0) in shapes(records)[2:]
    assert records.requests["preemptions"].tolist() == [0, 1]
    again = shapes(records)[2:].index((6, 1, 0))
    assert shapes(records)[2:][again + 1][0] < 6


def test_vllm_v0_swaps_out_and_comes_back_before_any_prompt() -> None:
    # 8 of 11 blocks hold the prompts; one decode each, and the next step finds one block for two
    knobs = {"max_num_batched_tokens": 64, "watermark": 0.0, "preemption_mode": "swap", "swap_gb_s": 1e6}
    records = run("vllm-v0", [0, 0, 3], [4, 4, 1], [4, 5, 2], blocks=11, **knobs)
    # the third request waits although it would fit: the second is on the host until the first has finished
    assert shapes(records)[:6] == [(8, 2, 0), (0, 0, 2), (0, 0, 1), (0, 0, 1), (0, 0, 1), (1, 1, 0)]
    assert records.requests["preemptions"].tolist() == [0, 1, 0]
    # nothing is computed twice
    assert sum(tokens for tokens, _, _ in shapes(records)) == 9


def test_vllm_v0_waits_for_the_copies_of_a_swap() -> None:
    knobs = {"max_num_batched_tokens": 64, "watermark": 0.0, "preemption_mode": "swap"}
    block_s = 131072 / (2.0 * 1e9)
    fast, slow = (
        run("vllm-v0", [0, 0], [4, 4], [4, 4], blocks=10, **knobs, swap_gb_s=rate) for rate in (2.0, 1.0)
    )
    assert fast.requests["preemptions"].sum() == slow.requests["preemptions"].sum() == 1
    # 5 blocks go and come back: at half the rate each copy takes a block's time more
    assert slow.end_s - fast.end_s == pytest.approx(10 * block_s, rel=1e-9)


def test_static_batches_wait_for_their_last_member() -> None:
    # the second and third arrive while the first batch decodes: they start together when it is over
    records = run("static-batch", [0, 1, 2], [4, 4, 4], [6, 2, 4], max_batch_size=2)
    assert shapes(records) == [(4, 1, 0), *[(0, 0, 1)] * 5, (8, 2, 0), (0, 0, 2), (0, 0, 1), (0, 0, 1)]


def test_a_static_batch_runs_its_prompts_in_passes_and_nobody_joins_in_between() -> None:
    records = run("static-batch", [0, 0, 1], [4, 7, 1], [3, 3, 3], max_batch_size=4, max_prefill_tokens=8)
    assert shapes(records)[:5] == [(4, 1, 0), (7, 1, 0), (0, 0, 2), (0, 0, 2), (1, 1, 0)]


def test_a_static_batch_reserves_what_its_requests_may_ask_for() -> None:
    # 4 + 9 - 1 of 20 blocks are set aside for the first: the second does not fit though it would
    small = run("static-batch", [0, 0], [4, 4], [3, 3], blocks=20, asked=[9, 9])
    large = run("static-batch", [0, 0], [4, 4], [3, 3], blocks=24, asked=[9, 9])
    assert (shapes(small)[0], shapes(large)[0]) == ((4, 1, 0), (8, 2, 0))


def test_continuous_static_batches_take_prompts_aboard() -> None:
    # Orca: the second joins the first's decode step, whole; the third when a slot is free
    records = run("static-batch", [0, 1, 1], [4, 7, 3], [4, 2, 2], max_batch_size=2, continuous=True)
    assert shapes(records) == [(4, 1, 0), (7, 1, 1), (0, 0, 2), (3, 1, 1), (0, 0, 1)]


def test_sarathi_puts_decodes_before_an_older_prompt() -> None:
    # budget 4: the long prompt gets what the decode leaves; the decode never waits
    records = run("sarathi", [0, 1], [1, 12], [9, 1], token_budget=4, max_num_seqs=4)
    assert shapes(records)[:5] == [(1, 1, 0), (3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 1, 1)]
    assert records.requests["max_itl_s"][0] == STEP


def test_sarathi_gives_one_prompt_a_batch_on_request() -> None:
    knobs = {"token_budget": 16, "max_num_seqs": 4}
    many = run("sarathi", [0, 0, 0], [5, 5, 5], [1, 1, 1], **knobs)
    one = run("sarathi", [0, 0, 0], [5, 5, 5], [1, 1, 1], one_prefill=True, **knobs)
    assert shapes(many) == [(15, 3, 0)]
    assert shapes(one) == [(5, 1, 0)] * 3


def test_sarathi_keeps_a_watermark_free_at_admission() -> None:
    # 10 blocks, 20 % of them kept: 4 + 4 fit, 4 + 5 do not
    fits = run("sarathi", [0, 0], [4, 4], [1, 1], blocks=10, watermark=0.2)
    waits = run("sarathi", [0, 0], [4, 5], [1, 1], blocks=10, watermark=0.2)
    assert fits.requests["first_scheduled_s"].tolist() == [0.0, 0.0]
    assert waits.requests["first_scheduled_s"].tolist() == [0.0, STEP]


def test_sarathi_takes_an_evicted_request_back_at_once_if_it_fits_again() -> None:
    # blocks of 4, 4 in all: no free block when the first decodes, though it needs none
    records = run("sarathi", [0, 0], [5, 5], [3, 3], blocks=4, size=4, watermark=0.0, token_budget=64)
    assert shapes(records)[:2] == [(10, 2, 0), (6, 1, 1)]
    assert records.requests["preemptions"][1] > 0


def test_sglang_runs_prompts_alone_and_all_chunks_in_a_row() -> None:
    records = run("sglang", [0, 2], [4, 20], [9, 1], chunked_prefill_size=8, max_running_requests=4)
    assert shapes(records)[:6] == [(4, 1, 0), (0, 0, 1), (8, 1, 0), (8, 1, 0), (4, 1, 0), (0, 0, 1)]
    assert records.requests["max_itl_s"][0] == 4 * STEP


def test_sglang_mixed_takes_decodes_aboard_out_of_the_chunks_budget() -> None:
    knobs = {"chunked_prefill_size": 8, "max_running_requests": 4, "mixed_chunk": True}
    records = run("sglang", [0, 2], [4, 20], [9, 1], **knobs)
    assert shapes(records)[:5] == [(4, 1, 0), (0, 0, 1), (7, 1, 1), (7, 1, 1), (6, 1, 1)]
    assert records.requests["max_itl_s"][0] == STEP


def test_sglang_has_one_chunked_request_and_fills_its_last_chunk_with_others() -> None:
    records = run("sglang", [0, 0, 0], [12, 2, 9], [1, 1, 1], chunked_prefill_size=8)
    assert shapes(records) == [(8, 1, 0), (8, 3, 0), (7, 1, 0)]


def test_sglang_reserves_new_tokens_by_its_ratio() -> None:
    # 60 tokens: the first holds 10 and may still ask for 19 x ratio; the second wants 28 + 6
    knobs = {"chunked_prefill_size": 64, "max_running_requests": 4, "blocks": 60}
    low = run("sglang", [0, 1], [10, 28], [20, 6], init_new_token_ratio=0.5, **knobs)
    high = run("sglang", [0, 1], [10, 28], [20, 6], init_new_token_ratio=1.0, **knobs)
    # 34 < 60 - 10 - 9.5, but not < 60 - 10 - 19
    assert low.requests["first_scheduled_s"][1] == STEP
    assert high.requests["first_scheduled_s"][1] == high.requests["finish_s"][0] == 20 * STEP


def test_sglang_stays_full_until_somebody_leaves() -> None:
    # the ratio falls at once, so the second would fit one step later; the flag keeps it out
    knobs = {
        "chunked_prefill_size": 64,
        "max_running_requests": 4,
        "new_token_ratio_decay_steps": 1,
        "blocks": 60,
    }
    full = run("sglang", [0, 1], [10, 28], [20, 6], init_new_token_ratio=1.0, **knobs)
    assert full.requests["first_scheduled_s"][1] == full.requests["finish_s"][0] == 20 * STEP
    later = run("sglang", [0, 2], [10, 28], [20, 6], init_new_token_ratio=1.0, **knobs)
    assert later.requests["first_scheduled_s"][1] == 2 * STEP


def test_sglang_retracts_those_with_the_fewest_tokens_then_the_longest_prompts() -> None:
    knobs = {
        "chunked_prefill_size": 64,
        "max_running_requests": 4,
        "init_new_token_ratio": 0.0,
        "clip_max_new_tokens": 1,
        "retract_decode_steps": 1,
    }
    records = run("sglang", [0, 0, 0], [5, 9, 7], [12, 12, 12], blocks=30, **knobs)
    assert shapes(records)[0] == (21, 3, 0)
    # 30 - 21 = 9 free: three steps of three; then the longest prompt goes
    assert shapes(records)[1:5] == [(0, 0, 3)] * 3 + [(0, 0, 2)]
    assert records.requests["preemptions"].tolist()[1] == 1
    assert records.requests["preemptions"].tolist()[0] == 0


def test_sglangs_last_decode_beside_a_greedy_chunk_survives() -> None:
    # mixed chunks of a long prompt take everything that the one decode still needs
    knobs = {
        "chunked_prefill_size": 4,
        "max_running_requests": 2,
        "mixed_chunk": True,
        "clip_max_new_tokens": 4,
        "init_new_token_ratio": 0.0,
    }
    records = run("sglang", [0, 1], [4, 20], [20, 1], blocks=29, **knobs)
    assert (records.requests["status"] == "finished").all()
    assert records.requests["preemptions"].tolist() == [0, 1]


def test_pages_are_never_split_between_requests() -> None:
    # pages of 16: 17 tokens are two of them, so two such prompts fill a pool of 4 and the third waits
    knobs = {"chunked_prefill_size": 64, "max_running_requests": 4, "page_size": 16}
    records = run("sglang", [0] * 3, [17] * 3, [1] * 3, blocks=4, size=16, **knobs)
    assert shapes(records)[0] == (34, 2, 0)
    assert (records.requests["status"] == "finished").all()


def test_sglang_unmixed_against_mixed_at_high_concurrency() -> None:
    """Equal requests in a closed loop stay in step unless chunks are mixed with decodes.

    A mocker of SGLang that mixed them had 961 ms mean TTFT and 552 ms p99 ITL where the rule, and the real
    server, gave 4.5 s and 30 ms at the same throughput (dynamo PR 12884).
    """
    n = 256
    load = replace(workload([0.0] * n, [4000] * n, [500] * n), max_concurrency=64)
    cost = load_cost("llama-3.1-8b", "h100-sxm")
    found = {}
    for mixed in (False, True):
        records = simulate(load, make_policy({"name": "sglang", "mixed_chunk": mixed}), cost, jitter=False)
        ttft = (records.requests["first_token_s"] - records.requests["arrival_s"]).mean()
        order = np.argsort(records.itl_s)
        share = np.cumsum(records.itl_count[order]) / records.itl_count.sum()
        p99 = records.itl_s[order][np.searchsorted(share, 0.99)]
        found[mixed] = (ttft, p99, records.itl_count.sum() / records.end_s)
    (plain_ttft, plain_p99, plain_rate), (mixed_ttft, mixed_p99, mixed_rate) = found[False], found[True]
    assert plain_ttft > 3 * mixed_ttft
    assert plain_p99 < mixed_p99 / 5
    assert plain_rate == pytest.approx(mixed_rate, rel=0.05)


@pytest.mark.parametrize("name", ["static-batch", "vllm-v0", "vllm", "sarathi", "sglang"])
def test_a_real_model_under_load(name: str) -> None:
    """Default knobs at a rate that the GPU can hold: all is served, and sooner when less comes."""
    rng = np.random.default_rng(0)
    n = 200
    gaps = rng.exponential(1.0, n)
    prompts, outputs = rng.integers(100, 3000, n).tolist(), rng.integers(10, 300, n).tolist()
    means = []
    for rate in (2.0, 20.0):
        load = workload((np.cumsum(gaps) / rate).tolist(), prompts, outputs)
        records = simulate(load, make_policy(name), real_cost())
        assert (records.requests["status"] == "finished").all()
        means.append((records.requests["finish_s"] - records.requests["arrival_s"]).mean())
    assert means[0] < means[1]

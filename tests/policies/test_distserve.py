"""DistServe: queueing formulas, dispatch, batch limits, the pull rule, pressure, and its paper's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stub_cost import StubCost, plain_tables, stub_cost
from workloads import workload

from sim.cost import load_cost
from sim.cost.model import load_model
from sim.engine import RunRecords, simulate
from sim.engine.link import Link
from sim.engine.pools import Pool
from sim.policies import make_policy
from sim.units import GIB
from sim.workload.build import build_workload
from sim.workload.workload import Workload

INSTANT = Link(float("inf"), 0.0)
PROMPT_S, TOKEN_S = 1e-3, 10e-3  # per prompt token; per decode in a step
COST = stub_cost(plain_tables(0.0, PROMPT_S, TOKEN_S), max_context=8192)


def run(
    work: Workload,
    *,
    cost: StubCost = COST,
    prefills: int = 1,
    decodes: int = 1,
    link: Link = INSTANT,
    blocks: int = 10_000,
    **knobs: Any,
) -> RunRecords:
    return simulate(
        work,
        make_policy({"name": "distserve", **knobs}),
        cost,
        pools=[Pool("prefill", prefills, cost), Pool("decode", decodes, cost)],
        link=link,
        num_gpu_blocks=blocks,
        jitter=False,
        record_steps=True,
    )


def ttft(records: RunRecords) -> np.ndarray[Any, Any]:
    return (records.requests["first_token_s"] - records.requests["arrival_s"]).to_numpy()


def e2el(records: RunRecords) -> np.ndarray[Any, Any]:
    return (records.requests["finish_s"] - records.requests["arrival_s"]).to_numpy()


def constant(arrivals: Any, prompt: int, output: int) -> Workload:
    n = len(arrivals)
    return workload(list(arrivals), [prompt] * n, [output] * n)


ONE_AT_A_TIME = {"max_prefill_seqs": 1, "max_decode_seqs": 1}


def test_evenly_spaced_requests_pass_two_servers_without_waiting() -> None:
    work = constant(np.arange(200) * 0.2, 100, 11)  # 0.1 s of prefill, 10 steps of 0.01 s
    records = run(work, **ONE_AT_A_TIME)
    assert ttft(records) == pytest.approx(np.full(200, 0.1), rel=1e-9)
    assert e2el(records) == pytest.approx(np.full(200, 0.2), rel=1e-9)


@pytest.mark.parametrize(("prompt", "output"), [(100, 6), (60, 11), (100, 11)])
def test_poisson_arrivals_pass_two_queues_in_tandem(prompt: int, output: int) -> None:
    """M/D/1 in front (DistServe section 3.1); behind it a request waits as in one queue with the longer service."""
    first, second = prompt * PROMPT_S, (output - 1) * TOKEN_S
    slower = max(first, second)
    rate = 0.4 / slower
    n = 6_000
    # exact quantiles in random order: less noise than as many independent draws
    gaps = np.random.default_rng(3).permutation(-np.log1p(-(np.arange(n) + 0.5) / n)) / rate
    records = run(constant(np.cumsum(gaps), prompt, output), **ONE_AT_A_TIME)

    def waits(service: float) -> float:
        return rate * service**2 / (2 * (1 - rate * service))

    assert ttft(records).mean() == pytest.approx(first + waits(first), rel=0.02)
    assert e2el(records).mean() == pytest.approx(first + second + waits(slower), rel=0.02)


def test_tandem_times_are_those_of_lindleys_recursion() -> None:
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(0.12, 500))
    prompts, outputs = rng.integers(1, 200, 500), rng.integers(2, 20, 500)
    records = run(workload(arrivals.tolist(), prompts.tolist(), outputs.tolist()), **ONE_AT_A_TIME)
    out = done = 0.0
    for arrival, prompt, output, token, finish in zip(
        arrivals,
        prompts,
        outputs,
        records.requests["first_token_s"],
        records.requests["finish_s"],
        strict=True,
    ):
        out = max(out, arrival) + prompt * PROMPT_S
        done = max(done, out) + (output - 1) * TOKEN_S
        assert (token, finish) == pytest.approx((out, done), rel=1e-9)


def test_prompts_go_to_the_shortest_queue_and_tokens_to_the_fewest_requests() -> None:
    work = workload([0.0, 0.01, 0.02, 0.11], [100, 10, 10, 10], [50, 50, 50, 50])
    frame = run(work, prefills=2, decodes=2).requests
    # the second server is free when the third comes; the first one is when the fourth does
    assert frame["replica"].tolist() == [0, 1, 1, 0]
    # prompts end at 0.1, 0.02, 0.03 and 0.12
    assert frame["decode_replica"].tolist() == [2, 2, 3, 3]


def test_a_batch_ends_at_its_tokens_or_its_prompts_and_a_long_one_runs_alone() -> None:
    work = workload([0.0] * 6, [60, 30, 30, 200, 10, 10], [1] * 6)
    batches = run(work, max_prefill_tokens=100, max_prefill_seqs=2).steps
    assert batches is not None
    assert batches["prefill_tokens"].tolist() == [90, 30, 200, 20]


def test_kv_stays_on_the_prefill_gpu_until_it_is_pulled_and_counts_there() -> None:
    # 10 blocks: the prompts of 5 blocks fill the prefill GPU; the third can start only when the first has left
    slow = Link(5 * 16 * COST.kv_bytes_per_token / 1.0, 0.0, "fifo")  # a second for a prompt of 5 blocks
    work = workload([0.0] * 3, [80] * 3, [3] * 3)
    records = run(work, blocks=10, link=slow, max_prefill_seqs=1, waiting_block_threshold=1.0)
    frame = records.requests
    assert frame["first_token_s"].tolist()[:2] == pytest.approx([0.08, 0.16])
    # the first arrives at 0.08 + 1 and frees 5 blocks
    assert frame["first_scheduled_s"].tolist()[2] == pytest.approx(1.08)
    prefill, decode = records.pools
    # one block stays free on the decode GPU: it pulls when the one before has finished, 0.02 s after its arrival
    held = 5 * ((1.08 - 0.0) + (2.10 - 0.08) + (3.12 - 1.08))
    assert prefill.totals["kv_block_s"] == pytest.approx(held, rel=1e-6)
    # claimed at the pull, not at the arrival; a sixth block from the second token on
    assert decode.totals["kv_block_s"] == pytest.approx(3 * (5 * 1.0 + 6 * 0.02), rel=1e-6)


def test_pulling_stops_while_enough_blocks_wait_for_the_batch() -> None:
    # 100 blocks: at 5 % one prompt of 6 blocks waits, no second one; the batch takes one at a time
    work = workload([0.0] * 4, [96] * 4, [40] * 4)
    waits = {
        share: run(work, blocks=100, waiting_block_threshold=share, max_decode_seqs=1).requests["pull_wait_s"]
        for share in (0.05, 0.5)
    }
    assert (waits[0.5] == 0).all()
    # pulled at its first token, at once, when the first has finished, when the second has
    assert waits[0.05].tolist() == pytest.approx([0.0, 0.0, 0.39, 0.78], abs=0.3)
    assert waits[0.05].iloc[3] > waits[0.05].iloc[2] > 0.1


def crowd(output: int = 60) -> Workload:
    """Ten requests whose KV outgrows a decode pool of 60 blocks: 10 x 9 blocks at their ends."""
    return workload([0.0] * 10, [80] * 10, [output] * 10)


def test_the_last_of_the_batch_is_swapped_and_computes_nothing_again() -> None:
    records = run(crowd(), blocks=60, waiting_block_threshold=1.0, swap_gb_s=64.0)
    frame, steps = records.requests, records.steps
    assert steps is not None
    assert frame["preemptions"].sum() > 0
    assert (frame["status"] == "finished").all()
    assert steps["prefill_tokens"].sum() == 800
    assert steps["decode_batch"].sum() == 10 * 59
    # the youngest suffer, the oldest never
    assert frame["preemptions"].iloc[0] == 0
    assert frame["finish_s"].iloc[0] == frame["finish_s"].min()


def test_swapping_waits_for_the_copies() -> None:
    """A block of 2 MiB at 1 GB/s takes 2.1 ms; the same steps at 64 GB/s differ by the copies alone."""
    slow, fast = (
        run(crowd(), blocks=60, waiting_block_threshold=1.0, swap_gb_s=rate) for rate in (1.0, 64.0)
    )
    gap = slow.totals["busy_s"] - fast.totals["busy_s"]
    assert gap > 0.05
    assert slow.requests["finish_s"].max() > fast.requests["finish_s"].max()


def test_recomputing_computes_again() -> None:
    records = run(crowd(), blocks=60, waiting_block_threshold=1.0, pressure="recompute")
    steps = records.steps
    assert steps is not None
    assert (records.requests["status"] == "finished").all()
    assert steps["prefill_tokens"].sum() > 800
    # whole prompts and tokens of the evicted, on the decode replica
    assert (steps.loc[steps["replica"] == 1, "prefill_tokens"] > 80).any()


# --- every knob moves what it is said to move ---


def tokens_computed(records: RunRecords) -> float:
    return records.totals["dense_tokens"]


@pytest.mark.parametrize(
    ("knob", "low", "high", "metric"),
    [
        ("max_prefill_tokens", 160, 8192, lambda r: -r.totals["launches_eager"]),
        ("max_prefill_seqs", 1, 8, lambda r: -r.totals["launches_eager"]),
        ("max_decode_seqs", 2, 64, lambda r: -float(e2el(r).mean())),
        ("max_prompt_tokens", 79, 80, lambda r: (r.requests["status"] == "finished").sum()),
        ("waiting_block_threshold", 0.05, 1.0, lambda r: -r.requests["pull_wait_s"].mean()),
        ("pressure", "swap", "recompute", tokens_computed),
        ("swap_space_gib", 16.0, 0.01, tokens_computed),
        ("swap_gb_s", 1.0, 50.0, lambda r: -r.totals["busy_s"]),
    ],
)
def test_every_knob_moves_its_metric(knob: str, low: Any, high: Any, metric: Any) -> None:
    fixed = stub_cost(plain_tables(2e-3, PROMPT_S, 1e-3), max_context=8192)
    cramped = {"waiting_block_threshold": 0.3}
    few, many = (
        metric(run(crowd(), cost=fixed, blocks=60, **{**cramped, knob: value})) for value in (low, high)
    )
    assert many > few


# --- its paper's numbers ---


def test_kv_of_opt_66b_is_the_papers() -> None:
    """Section 3.3: 512 tokens of OPT-66B take 1.13 GB, which is the formula's 1.125 GiB."""
    assert 512 * load_model("opt-66b").kv_bytes_per_token() == 1.125 * GIB
    assert load_cost("opt-66b", "a100-80gb-sxm", "spec", {"tp": 4}).kv_bytes_per_token == 1.125 * GIB / 512


def test_transfers_over_nvlink_are_a_thousandth_of_the_latency() -> None:
    """Section 6.3, OPT-175B on ShareGPT: under 0.1 % of the latency, 95 % of them below 30 ms. Shards of the same
    stage lie in one machine and go over its NVLink."""
    cost = load_cost("opt-175b", "a100-80gb-sxm", "spec", {"tp": 8})
    lengths = {"prompt_tokens": {"quantiles": "sharegpt-8k"}, "output_tokens": {"quantiles": "sharegpt-8k"}}
    work = build_workload(
        {"num_prompts": 400, "arrivals": "poisson", **lengths, "on_overlength": "truncate"},
        seed=0,
        request_rate=0.5,
        context_limit=cost.model.max_context,
        base_dirs=(),
    )
    records = simulate(
        work, make_policy("distserve"), cost, link=Link(8 * 300e9, 10e-6), gpu_memory_utilization=0.95
    )
    frame = records.requests[records.requests["transfer_s"].notna()]
    assert len(frame) > 300
    share = frame["transfer_s"].sum() / (frame["finish_s"] - frame["arrival_s"]).sum()
    assert share < 1e-3
    assert frame["transfer_s"].quantile(0.95) < 30e-3


def test_a_request_of_one_token_hands_nothing_over() -> None:
    records = run(workload([0.0, 0.0], [16, 16], [1, 2]), link=Link(1e9, 0.0, "fair", "layer"))
    assert records.requests["decode_replica"].iloc[1] == 1
    assert records.requests["transfer_s"].isna().tolist() == [True, False]


def test_layers_travel_while_the_prompt_is_computed() -> None:
    """Visible: the last layer's bytes where the link keeps up, else what it could not carry beside the prompt."""
    size, layers = 100 * COST.kv_bytes_per_token, COST.model.layers
    prompt_s = 0.1
    for rate in (size / 0.05, size / 0.8):
        serial, early = (
            run(workload([0.0], [100], [2]), link=Link(rate, 1e-3, "fair", overlap)).requests["transfer_s"][0]
            for overlap in ("none", "layer")
        )
        alone = size / rate
        assert serial == pytest.approx(alone + 1e-3, rel=1e-9)
        left = max(alone / layers, alone - prompt_s * (layers - 1) / layers)
        assert early == pytest.approx(left + 1e-3, rel=1e-9)


def test_unlike_pools_price_their_own_steps() -> None:
    slow = stub_cost(plain_tables(0.0, 2 * PROMPT_S, TOKEN_S))
    work = workload([0.0], [100], [11])
    records = simulate(
        work,
        make_policy("distserve"),
        COST,
        pools=[Pool("prefill", 1, slow), Pool("decode", 1, COST)],
        link=INSTANT,
        jitter=False,
    )
    assert records.requests["first_token_s"][0] == pytest.approx(0.2)
    assert records.requests["finish_s"][0] == pytest.approx(0.3)


def test_a_request_that_neither_pool_can_hold_is_refused_with_the_arithmetic() -> None:
    work = workload([0.0] * 3, [200, 32, 32], [1, 200, 3])
    frame = run(work, blocks=10).requests
    assert frame["reason"].tolist() == [
        "200 + 1 tokens need 13 KV blocks of 16; the prefill pool has 10",
        "32 + 200 tokens need 15 KV blocks of 16; the decode pool has 10",
        "",
    ]


def test_a_closed_loop_goes_through_both_pools() -> None:
    work = replace(constant(np.zeros(40), 50, 5), max_concurrency=4)
    frame = run(work).requests
    assert (frame["status"] == "finished").all()
    assert set(frame["arrival_s"][4:]) <= set(frame["finish_s"])

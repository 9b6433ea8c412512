"""Runs whose result theory or a pencil gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stub_cost import plain_tables, stub_cost
from workloads import workload

from sim.cost import load_cost
from sim.cost.prices import UNBOUNDED
from sim.engine import RunRecords, simulate
from sim.policies import make_policy

Floats = NDArray[np.float64]
POLICIES = {
    "vllm": {"max_num_batched_tokens": 4096, "max_num_seqs": 4},
    "sarathi": {"token_budget": 4096, "max_num_seqs": 4},
    "sglang": {"chunked_prefill_size": 4096, "max_running_requests": 4},
}
SERVER = {
    "vllm": {"max_num_batched_tokens": 16384, "max_num_seqs": 1},
    "sarathi": {"token_budget": 16384, "max_num_seqs": 1},
    "sglang": {"chunked_prefill_size": 16384, "max_running_requests": 1},
}
TOKEN_S = 1e-4


def served_alone(name: str, arrivals: Floats, prompts: NDArray[np.int64]) -> Floats:
    """Waits of requests of one output token that a policy serves one at a time."""
    load = workload(arrivals.tolist(), prompts.tolist(), [1] * len(prompts))
    cost = stub_cost(plain_tables(prompt_token_s=TOKEN_S), max_context=32768)
    records = simulate(
        load, make_policy({"name": name, **SERVER[name]}), cost, num_gpu_blocks=40_000, jitter=False
    )
    service = records.requests["finish_s"] - records.requests["first_scheduled_s"]
    np.testing.assert_allclose(service, TOKEN_S * prompts, rtol=1e-6)
    return (records.requests["first_scheduled_s"] - records.requests["arrival_s"]).to_numpy()


def lindley(arrivals: Floats, service: Floats) -> Floats:
    """Waits in a queue of one server, first come first served: W' = max(0, W + S - A)."""
    waits = np.zeros(len(arrivals))
    for n in range(1, len(arrivals)):
        waits[n] = max(0.0, waits[n - 1] + service[n - 1] - (arrivals[n] - arrivals[n - 1]))
    return waits


def standard_error(waits: Floats, batches: int = 25) -> float:
    """Of the mean of a correlated series, from the means of long batches."""
    means = waits[: len(waits) // batches * batches].reshape(batches, -1).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(batches))


def prompts_of(kind: str, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Lengths of mean about 400 tokens: constant, exponential, lognormal."""
    if kind == "M/D/1":
        return np.full(n, 400)
    if kind == "M/M/1":
        return np.ceil(rng.exponential(400.0, n)).astype(np.int64)
    return np.clip(rng.lognormal(np.log(300.0), 0.75, n), 1, 16000).astype(np.int64)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", ["M/D/1", "M/M/1", "M/G/1"])
def test_mean_waits_are_those_of_queueing_theory(kind: str, load: float) -> None:
    """Pollaczek-Khinchine: W = rate x E[S^2] / (2 (1 - load)); field simulators were 28-71 % below it."""
    rng = np.random.default_rng(5)
    n = 60_000
    prompts = prompts_of(kind, n, rng)
    service = TOKEN_S * prompts
    second_moment = {
        "M/D/1": (TOKEN_S * 400) ** 2,
        # a rounded-up exponential is geometric: E[k^2] = (2 - p) / p^2
        "M/M/1": TOKEN_S**2 * (2 - (p := 1 - np.exp(-1 / 400))) / p**2,
        "M/G/1": float(np.mean(service**2)),
    }[kind]
    mean = {"M/D/1": TOKEN_S * 400, "M/M/1": TOKEN_S / p, "M/G/1": float(service.mean())}[kind]
    rate = load / mean
    waits = served_alone("vllm", np.cumsum(rng.exponential(1 / rate, n)), prompts)
    theory = rate * second_moment / (2 * (1 - load))
    error = standard_error(waits)
    assert error < 0.2 * theory
    assert abs(waits.mean() - theory) < 3 * error


@pytest.mark.parametrize("name", list(SERVER))
def test_every_wait_in_a_queue_of_one_server(name: str) -> None:
    rng = np.random.default_rng(11)
    prompts = prompts_of("M/G/1", 3000, rng)
    arrivals = np.cumsum(rng.exponential(TOKEN_S * 480, 3000))
    waits = served_alone(name, arrivals, prompts)
    np.testing.assert_allclose(waits, lindley(arrivals, TOKEN_S * prompts), rtol=0, atol=1e-8)
    assert waits.max() > 10 * TOKEN_S * 400


def run(name: str, load: Any, tables: Any, **knobs: Any) -> RunRecords:
    policy = make_policy({"name": name, **{**POLICIES[name], **knobs}})
    cost = stub_cost(tables, max_context=32768)
    return simulate(load, policy, cost, num_gpu_blocks=40_000, jitter=False, record_steps=True)


def shapes(records: RunRecords) -> list[tuple[int, int, int]]:
    """(prompt tokens, chunks, decodes) of each step."""
    assert records.steps is not None
    columns = (records.steps[c].tolist() for c in ("prefill_tokens", "chunks", "decode_batch"))
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("name", list(POLICIES))
def test_one_request_alone(name: str) -> None:
    load = workload([0.5], [10], [3])
    records = run(name, load, plain_tables(fixed_s=2**-6, prompt_token_s=2**-10, decode_token_s=2**-7))
    row = records.requests.iloc[0]
    assert row["first_scheduled_s"] == 0.5
    assert row["first_token_s"] == 0.5 + 2**-6 + 10 * 2**-10
    assert row["finish_s"] == row["first_token_s"] + 2 * (2**-6 + 2**-7)
    assert row["max_itl_s"] == 2**-6 + 2**-7
    assert records.end_s == row["finish_s"]
    assert records.itl_count.sum() == 2
    assert records.totals["iterations"] == 3
    assert records.totals["decode_kv_tokens"] == 11 + 12
    assert records.totals["prefill_pairs"] == 55


FIXED, PROMPT, DECODE = 2**-6, 2**-10, 2**-7


@pytest.mark.parametrize("name", ["vllm", "sarathi"])
def test_two_requests_where_decodes_ride_along(name: str) -> None:
    # the second arrives within the first step; budget 8
    budget = {"vllm": "max_num_batched_tokens", "sarathi": "token_budget"}[name]
    load = workload([0.0, 2**-8], [8, 8], [3, 2])
    records = run(name, load, plain_tables(FIXED, PROMPT, DECODE), **{budget: 8})
    assert shapes(records) == [(8, 1, 0), (7, 1, 1), (1, 1, 1), (0, 0, 1)]
    eager = FIXED + 8 * PROMPT
    last_chunk = FIXED + 2 * PROMPT
    assert records.requests["first_token_s"].tolist() == [eager, 2 * eager + last_chunk]
    assert records.requests["finish_s"].tolist() == [
        2 * eager + last_chunk,
        2 * eager + last_chunk + FIXED + DECODE,
    ]
    assert records.requests["first_scheduled_s"].tolist() == [0.0, eager]


def test_two_requests_where_prompts_go_first() -> None:
    load = workload([0.0, 2**-8], [8, 8], [3, 2])
    records = run("sglang", load, plain_tables(FIXED, PROMPT, DECODE), chunked_prefill_size=8)
    assert shapes(records) == [(8, 1, 0), (8, 1, 0), (0, 0, 2), (0, 0, 1)]
    prefill = FIXED + 8 * PROMPT
    assert records.requests["first_token_s"].tolist() == [prefill, 2 * prefill]
    both = 2 * prefill + FIXED + 2 * DECODE
    assert records.requests["finish_s"].tolist() == [both + FIXED + DECODE, both]
    # the first request's second token waited for the other's prompt
    assert records.requests["max_itl_s"][0] == prefill + FIXED + 2 * DECODE


@pytest.mark.parametrize(
    ("name", "knob"),
    [("vllm", "max_num_batched_tokens"), ("sarathi", "token_budget"), ("sglang", "chunked_prefill_size")],
)
def test_prompts_fill_the_budget_before_the_last_is_cut(name: str, knob: str) -> None:
    load = workload([0.0, 0.0], [4, 8], [1, 1])
    records = run(name, load, plain_tables(FIXED, PROMPT, DECODE), **{knob: 8})
    assert shapes(records) == [(8, 2, 0), (4, 1, 0)]


@pytest.mark.parametrize(
    ("name", "knob"),
    [("vllm", "max_num_batched_tokens"), ("sarathi", "token_budget"), ("sglang", "chunked_prefill_size")],
)
def test_chunks_read_the_cache_again_but_compute_no_more_pairs(name: str, knob: str) -> None:
    load = workload([0.0], [16384], [1])
    tables = plain_tables(FIXED, PROMPT, DECODE)
    chunked, whole = run(name, load, tables, **{knob: 1024}), run(name, load, tables, **{knob: 16384})
    pieces = 16
    assert shapes(chunked) == [(1024, 1, 0)] * pieces
    assert shapes(whole) == [(16384, 1, 0)]
    assert chunked.totals["prefill_kv_tokens"] == 1024 * pieces * (pieces + 1) // 2
    assert whole.totals["prefill_kv_tokens"] == 16384
    assert chunked.totals["prefill_pairs"] == whole.totals["prefill_pairs"] == 16384 * 16385 // 2


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("bursts", [True, False])
def test_an_arrival_on_a_boundary_is_seen_by_that_boundarys_plan(name: str, bursts: bool) -> None:
    step = FIXED + DECODE
    first_token = FIXED + 8 * PROMPT
    boundary = first_token + 3 * step
    assert boundary == first_token + step + step + step
    policy = make_policy({"name": name, **POLICIES[name]})
    cost = stub_cost(plain_tables(FIXED, PROMPT, DECODE))

    def second_start(arrival: float) -> float:
        load = workload([0.0, arrival], [8, 8], [10, 1])
        records = simulate(load, policy, cost, num_gpu_blocks=99, jitter=False, bursts=bursts)
        return float(records.requests["first_scheduled_s"][1])

    assert second_start(boundary) == boundary
    assert second_start(np.nextafter(boundary, 9.0)) == boundary + step
    assert second_start(np.nextafter(boundary, 0.0)) == boundary


@pytest.mark.parametrize("name", list(POLICIES))
def test_equal_arrivals_are_served_in_the_workloads_order(name: str) -> None:
    n = 12
    load = workload([1.0] * n, [4096] * n, [1] * n)
    records = run(name, load, plain_tables(FIXED, PROMPT, DECODE))
    assert records.requests["finish_s"].is_monotonic_increasing
    assert records.requests["finish_s"].is_unique


@pytest.mark.parametrize("name", list(POLICIES))
def test_time_is_the_longer_of_host_and_gpu_plus_what_cannot_be_hidden(name: str) -> None:
    def tables(max_tokens: int, max_seqs: int, replica: int) -> dict[str, Any]:
        made = plain_tables(fixed_s=2.0)(max_tokens, max_seqs, replica)
        rows = np.arange(max_seqs + 1)
        return {
            **made,
            "host_graph_s": 0.5 * rows,
            "host_eager_s": 3.0 * rows,
            "gap_graph_s": np.full(max_seqs + 1, 0.125),
            "gap_eager_s": np.full(max_seqs + 1, 0.25),
        }

    records = run(name, workload([0.0], [10], [3]), tables)
    assert records.requests["first_token_s"][0] == 3.25
    assert records.requests["finish_s"][0] == 3.25 + 2 * 2.125
    assert records.totals["host_bound_s"] == 1.0
    assert records.totals["gpu_s"] == 6.0
    assert records.totals["busy_s"] == records.end_s


@pytest.mark.parametrize(
    ("limit", "flagged"),
    [
        ({}, 0),
        ({"cover_tokens": 7}, 1),
        ({"cover_chunk": 7}, 1),
        ({"cover_batch": 0}, 2),
        ({"cover_context": 9}, 1),
    ],
)
def test_steps_beyond_the_profiles_coverage_are_counted(limit: dict[str, int], flagged: int) -> None:
    # one prompt of 8 in one pass, then decodes on contexts of 9 and 10
    unbounded = dict.fromkeys(
        ("cover_tokens", "cover_chunk", "cover_history", "cover_batch", "cover_context"), UNBOUNDED
    )
    plain = plain_tables(1.0)
    cost = stub_cost(lambda tokens, seqs, replica: {**plain(tokens, seqs, replica), **unbounded, **limit})
    records = simulate(workload([0.0], [8], [3]), make_policy("vllm"), cost, jitter=False)
    assert records.totals["flagged"] == flagged


def test_coverage_of_a_measured_profile_reaches_the_tables() -> None:
    wide = {"max_tokens": 65536, "max_seqs": 1024, "max_context": 131072}
    measured = load_cost("llama-3.1-8b", "h200-sxm").compile(**wide)
    assert 8192 <= measured.cover_tokens < 65536
    assert 256 <= measured.cover_batch < 1024
    assert 4096 <= measured.cover_history < 131072
    # other shapes were not measured at all, and a data sheet claims everything
    assert load_cost("qwen3-8b", "h200-sxm").compile(**wide).cover_tokens == 0
    assert load_cost("llama-3.1-8b", "h200-sxm", "spec").compile(**wide).cover_tokens == UNBOUNDED

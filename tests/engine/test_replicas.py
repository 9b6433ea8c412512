"""Routers, closed loops and windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fingerprint import fingerprint
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_cost import TICK, plain_tables, real_cost, rough_tables, stub_cost
from workloads import workload, workloads

from sim.engine import RunRecords, simulate
from sim.engine.outlook import least_step_s
from sim.errors import SimctlError
from sim.policies import make_policy
from sim.workload.workload import Workload

ENTRIES: list[dict[str, Any]] = [
    {"name": "vllm", "max_num_batched_tokens": 64, "max_num_seqs": 8},
    {"name": "sarathi", "token_budget": 64, "max_num_seqs": 8},
    {"name": "sglang", "chunked_prefill_size": 64, "max_running_requests": 8},
]
COST = stub_cost(rough_tables(TICK))
COLUMNS = ["first_scheduled_s", "first_token_s", "finish_s", "max_itl_s", "preemptions", "generated_tokens"]
every_policy = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: str(e["name"]))


def load(n: int = 120, seed: int = 1, mean_gap_s: float = 0.004) -> Workload:
    rng = np.random.default_rng(seed)
    return workload(
        np.cumsum(rng.exponential(mean_gap_s, n)).tolist(),
        rng.integers(1, 150, n).tolist(),
        rng.integers(1, 60, n).tolist(),
    )


def run(work: Workload, entry: dict[str, Any], **options: Any) -> RunRecords:
    size = 1 if entry["name"] == "sglang" else 16
    settings = {"num_gpu_blocks": 60 * 16 // size, "jitter": False, **options}
    return simulate(work, make_policy(entry), COST, **settings)


def part(work: Workload, rows: Any) -> Workload:
    return workload(
        work.arrival_s[rows].tolist(), work.prompt_tokens[rows].tolist(), work.output_tokens[rows].tolist()
    )


@every_policy
def test_round_robin_is_so_many_separate_runs(entry: dict[str, Any]) -> None:
    work = load()
    together = run(work, entry, replicas=3)
    sums = dict.fromkeys(("iterations", "dense_tokens", "decode_kv_tokens", "prefill_pairs"), 0)
    for k in range(3):
        rows = np.arange(k, len(work), 3)
        alone = run(part(work, rows), entry)
        mine = together.requests.iloc[rows]
        assert (mine["replica"] == k).all()
        assert mine[COLUMNS].reset_index(drop=True).equals(alone.requests[COLUMNS])
        for name in sums:
            sums[name] += alone.totals[name]
    assert sums == {name: together.totals[name] for name in sums}


@every_policy
def test_one_replica_needs_no_router(entry: dict[str, Any]) -> None:
    turns, least = (run(load(), entry, router=router) for router in ("round-robin", "least-outstanding"))
    assert fingerprint(turns) == fingerprint(least)


@every_policy
@pytest.mark.parametrize("bursts", [True, False])
def test_least_outstanding_takes_the_least_loaded_and_of_equals_the_lowest(
    entry: dict[str, Any], bursts: bool
) -> None:
    work = load()
    frame = run(work, entry, replicas=3, router="least-outstanding", bursts=bursts).requests
    for i in range(len(work)):
        before = frame.iloc[:i]
        now = frame["arrival_s"][i]
        # what finishes at this very moment has left
        inside = before[before["finish_s"] > now]
        loads = [int((inside["replica"] == k).sum()) for k in range(3)]
        assert frame["replica"][i] == loads.index(min(loads)), f"request {i} with {loads}"
    assert frame["replica"].nunique() == 3


@every_policy
def test_a_request_that_leaves_as_another_comes_no_longer_counts(entry: dict[str, Any]) -> None:
    cost = stub_cost(plain_tables(fixed_s=1.0))
    # replica 0 is free again at 1.0 exactly
    work = workload([0.0, 1.0, 1.0], [4, 4, 4], [1, 1, 1])
    records = simulate(
        work,
        make_policy(entry),
        cost,
        replicas=2,
        router="least-outstanding",
        num_gpu_blocks=99,
        jitter=False,
    )
    assert records.requests["replica"].tolist() == [0, 0, 1]


def occupancy(records: RunRecords) -> list[tuple[float, int]]:
    """(time, requests issued and not finished) after each change; a finish comes before an issue."""
    frame = records.requests
    changes = [(t, 0, -1) for t in frame["finish_s"]] + [(t, 1, 1) for t in frame["arrival_s"]]
    changes.sort()
    level, seen = 0, []
    for n, (t, _, change) in enumerate(changes):
        level += change
        if n + 1 == len(changes) or changes[n + 1][0] > t:
            seen.append((t, level))
    return seen


@every_policy
@pytest.mark.parametrize("concurrency", [1, 5, 40])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_closed_loop_keeps_its_concurrency(entry: dict[str, Any], concurrency: int, replicas: int) -> None:
    n = 60
    work = replace(load(n), arrival_s=np.zeros(n), max_concurrency=concurrency)
    records = run(work, entry, replicas=replicas)
    frame = records.requests
    last_issue = frame["arrival_s"].max()
    for time_s, level in occupancy(records):
        assert level <= concurrency
        if time_s < last_issue:
            assert level == concurrency
    assert (frame["status"] == "finished").all()
    assert frame["arrival_s"].is_monotonic_increasing
    assert set(frame["arrival_s"][concurrency:]) <= set(frame["finish_s"])


def test_a_closed_loop_waits_for_the_earliest_time_of_a_request() -> None:
    work = replace(workload([0.0, 50.0], [4, 4], [2, 2]), max_concurrency=1)
    frame = run(work, ENTRIES[0]).requests
    assert frame["arrival_s"].tolist() == [0.0, 50.0]


@every_policy
def test_a_closed_loop_goes_on_past_rejected_requests(entry: dict[str, Any]) -> None:
    work = replace(workload([0.0] * 4, [4, 3000, 3000, 4], [2, 2, 2, 2]), max_concurrency=1)
    frame = run(work, entry).requests
    assert frame["status"].tolist() == ["finished", "rejected", "rejected", "finished"]


@every_policy
def test_nothing_happens_after_the_horizon(entry: dict[str, Any]) -> None:
    whole = run(load(), entry)
    horizon = float(np.quantile(whole.requests["finish_s"], 0.4))
    cut = run(load(), entry, horizon_s=horizon)
    assert cut.end_s == horizon
    early = whole.requests["finish_s"] <= horizon
    assert (cut.requests["status"] == np.where(early, "finished", "unfinished")).all()
    for name in ("first_scheduled_s", "first_token_s", "finish_s"):
        expected = whole.requests[name].where(whole.requests[name] <= horizon)
        if name == "first_scheduled_s":
            # a step that starts within the horizon has started; one that starts at it has not
            expected = whole.requests[name].where(whole.requests[name] < horizon)
        assert cut.requests[name].equals(expected), name
    assert cut.totals["busy_s"] <= horizon
    kept = whole.itl_end_s <= horizon
    assert cut.itl_count.sum() == whole.itl_count[kept].sum()


@every_policy
def test_counters_of_unfinished_requests_stand_at_the_horizon(entry: dict[str, Any]) -> None:
    work = load(20)
    horizon = float(work.arrival_s[-1])
    records = run(work, entry, horizon_s=horizon, record_steps=True)
    frame = records.requests
    assert (frame["status"] == "unfinished").any()
    tokens = records.itl_count.sum() + frame["first_token_s"].notna().sum()
    assert frame["generated_tokens"].sum() == tokens
    # the longest gap of all is somebody's
    assert frame["max_itl_s"].max() == records.itl_s.max()


def test_a_request_that_had_no_time_to_arrive_was_never_routed() -> None:
    frame = run(workload([0.0, 0.5], [4, 4], [2, 2]), ENTRIES[0], horizon_s=0.25).requests
    assert frame["replica"].tolist() == [0, -1]
    assert frame["status"].tolist() == ["finished", "unfinished"]


@every_policy
def test_without_drain_the_run_stops_at_the_last_arrival(entry: dict[str, Any]) -> None:
    work = load()
    records = run(work, entry, drain=False)
    assert records.end_s == work.arrival_s[-1]
    assert fingerprint(records) == fingerprint(run(work, entry, horizon_s=float(work.arrival_s[-1])))
    sooner = run(work, entry, drain=False, horizon_s=0.1)
    assert sooner.end_s == 0.1


def test_a_run_of_no_length() -> None:
    records = run(workload([0.0, 0.0], [4, 4], [1, 1]), ENTRIES[0], drain=False)
    assert records.end_s == 0.0
    assert (records.requests["status"] == "unfinished").all()


@every_policy
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_window_is_the_whole_less_the_warm_up(entry: dict[str, Any], replicas: int) -> None:
    warmup = 0.2
    whole = run(load(), entry, replicas=replicas, warmup_s=warmup)
    before = run(load(), entry, replicas=replicas, horizon_s=warmup)
    assert whole.window_s == (warmup, whole.end_s)
    assert fingerprint(replace(whole, window_s=(0.0, 0.0), window_totals={})) == fingerprint(
        replace(run(load(), entry, replicas=replicas), window_s=(0.0, 0.0), window_totals={})
    )
    for name, total in whole.totals.items():
        if name == "decisions":
            continue
        part = whole.window_totals[name]
        expected = total - before.totals[name]
        if name in ("prefill_pairs", "prefill_kv_tokens"):
            # counted at launch: a step in flight belongs to the part that launched it
            assert part == expected
        assert part == pytest.approx(expected, rel=1e-9, abs=1e-12), name


def test_without_warm_up_the_window_is_everything() -> None:
    records = run(load(), ENTRIES[1])
    assert records.window_s == (0.0, records.end_s)
    assert records.window_totals == records.totals


def test_an_unknown_router_is_named_with_the_nearest() -> None:
    with pytest.raises(SimctlError, match=r"unknown router 'round-robbin'.*round-robin"):
        run(load(3), ENTRIES[0], router="round-robbin")


@given(
    load=workloads(most=40),
    replicas=st.integers(2, 5),
    blocks=st.sampled_from([40, 400]),
    warmup=st.sampled_from([0.0, 0.01]),
    entry=st.sampled_from(
        [{"name": "sarathi", "token_budget": 24}, {"name": "vllm-v0"}, {"name": "streams"}]
    ),
)
@settings(max_examples=40)
def test_what_the_router_counts_is_what_is_there(
    load: Workload, replicas: int, blocks: int, warmup: float, entry: dict[str, Any]
) -> None:
    # replicas are left alone for as long as nobody can leave them: the counts must not show it
    frame = run(
        load, entry, replicas=replicas, router="least-outstanding", num_gpu_blocks=blocks, warmup_s=warmup
    ).requests
    served = frame[frame["status"] == "finished"].reset_index(drop=True)
    for i, row in served.iterrows():
        before = served.iloc[:i]
        inside = before[before["finish_s"] > row["arrival_s"]]
        held = [int((inside["replica"] == k).sum()) for k in range(replicas)]
        assert row["replica"] == held.index(min(held)), f"request {i} with {held}"


def test_no_step_is_shorter_than_the_least() -> None:
    for name in ("sarathi-512", "vllm-v0", "pod"):
        cost = real_cost()
        records = simulate(load(), make_policy(name), cost, record_steps=True)
        p = cost.compile(max_tokens=512, max_seqs=128, max_context=8192, jitter=True)
        steps = records.steps
        assert steps is not None
        least = least_step_s(p)
        assert 0 < least <= float((steps["end_s"] - steps["start_s"]).min())

"""The executor's serving loop on a device that takes exactly what the price tables say: it must be the simulation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lane_cost import lane_cost, lane_tables
from stub_cost import TICK, rough_tables, stub_cost
from workloads import workload

from calib.executor.dry import DryDevice
from calib.executor.serve import serve
from sim.engine import simulate
from sim.engine.cluster import open_cluster
from sim.engine.layout import METER_CAP
from sim.policies import make_policy

ENTRIES: list[dict[str, Any]] = [
    {"name": "vllm", "max_num_batched_tokens": 64, "max_num_seqs": 8},
    {"name": "sarathi", "token_budget": 64, "max_num_seqs": 8},
    {"name": "sglang", "chunked_prefill_size": 64, "max_running_requests": 8},
    {"name": "static-split", "max_prefill_tokens": 96, "max_num_seqs": 8, "layer_step": 8},
    # attention of mixed steps in one kernel, which one with several chunks does not take; half the time is exact
    {
        "name": "pod",
        "label": "fused",
        "token_budget": 64,
        "max_num_seqs": 8,
        "speedup": 2,
        "shape_aware": False,
    },
    {
        **{"name": "pod", "label": "fallbacks", "token_budget": 64, "max_num_seqs": 8, "speedup": 2},
        **{"shape_aware": False, "variant": "flashinfer"},
    },
    # decode steps launched ahead; passes that wait half-way for a shorter prompt; both with much longer prompts
    {"name": "duetserve", "token_budget": 2048, "max_num_seqs": 8, "tbt_ms": 1, "max_lookahead": 5},
    {"name": "muxwise", "max_prefill_tokens": 2048, "max_num_seqs": 16, "tbt_slo_ms": 1, "preempt": True},
    {"name": "bullet", "max_num_seqs": 8, "layer_step": 4},
]
LONG = ("duetserve", "muxwise")


def load(entry: dict[str, Any] | None = None, n: int = 60) -> Any:
    rng = np.random.default_rng(5)
    gaps = rng.exponential(0.02, n)
    gaps[n // 2] = 3.0  # an idle stretch: the loop has to wait for an arrival
    prompts, outputs = rng.integers(1, 150, n), rng.integers(1, 40, n)
    if entry is not None and entry["name"] in LONG:
        prompts, gaps = np.where(rng.random(n) < 0.3, 1800, prompts), gaps / 40
    return workload(np.cumsum(gaps).tolist(), prompts.tolist(), outputs.tolist())


def options(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["name"] in LONG:
        return {"num_gpu_blocks": 2000, "jitter": False, "estimator": "oracle"}
    size = make_policy(entry).block_size or 16
    return {"num_gpu_blocks": 40 * 16 // size, "jitter": False}


def cost(entry: dict[str, Any]) -> Any:
    if entry["name"] in LONG:
        return lane_cost(lane_tables(4 * TICK, 64 * TICK))
    return (lane_cost if make_policy(entry).lanes == 2 else stub_cost)(rough_tables(TICK))


def title(entry: dict[str, Any]) -> str:
    return str(entry.get("label") or entry["name"])


@pytest.mark.parametrize("entry", ENTRIES, ids=title)
def test_a_device_true_to_the_tables_gives_the_simulation(entry: dict[str, Any]) -> None:
    policy = make_policy(entry)
    expected = simulate(load(entry), policy, cost(entry), **options(entry))
    cluster = open_cluster(load(entry), make_policy(entry), cost(entry), bursts=False, **options(entry))
    trail = serve(cluster.replicas[0], DryDevice(), policy.lanes, load(entry).arrival_s)
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    columns = ["first_token_s", "finish_s", "max_itl_s", "preemptions", "status"]
    pd.testing.assert_frame_equal(records.requests[columns], expected.requests[columns])
    assert records.totals["iterations"] == expected.totals["iterations"] == len(trail.rows)


@pytest.mark.parametrize("entry", ENTRIES, ids=title)
def test_a_slow_device_moves_every_decision(entry: dict[str, Any]) -> None:
    """Ends are the device's, not the tables'; no token is lost by it, and logged launches follow one another."""
    policy = make_policy(entry)
    cluster = open_cluster(load(entry), policy, cost(entry), bursts=False, **options(entry))
    trail = serve(
        cluster.replicas[0],
        DryDevice(lambda work: 3.0 * work.solo_s + 1e-4),
        policy.lanes,
        load(entry).arrival_s,
    )
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    assert (records.requests["status"] == "finished").all()
    made = {row["end_s"] for row in trail.rows}
    assert set(records.requests["finish_s"]) <= made
    for lane in range(policy.lanes):
        rows = [row for row in trail.rows if row["lane"] == lane]
        assert all(a["end_s"] <= b["start_s"] for a, b in pairwise(rows))


def test_a_run_of_half_an_hour_goes_on_when_the_logs_are_full() -> None:
    """The meter is read at both ends of every idle gap: more often than it has room for between two drains."""
    requests = METER_CAP // 2
    slow = workload(np.arange(float(requests)).tolist(), [20] * requests, [2] * requests)
    cluster = open_cluster(
        slow, make_policy(ENTRIES[0]), cost(ENTRIES[0]), bursts=False, num_gpu_blocks=40, jitter=False
    )
    trail = serve(cluster.replicas[0], DryDevice(), 1, slow.arrival_s)
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    assert (records.requests["status"] == "finished").all()
    assert len(records.readings[0]) > METER_CAP


def test_logged_work_adds_up_to_the_requests() -> None:
    entry = ENTRIES[1]
    cluster = open_cluster(
        load(entry), make_policy(entry), cost(entry), bursts=False, num_gpu_blocks=400, jitter=False
    )
    trail = serve(cluster.replicas[0], DryDevice(), 1, load(entry).arrival_s)
    prompt = sum(tokens for work in trail.works for _, tokens, _ in work.chunks)
    assert prompt == int(load().prompt_tokens.sum())
    decoded = sum(len(work.decodes) for work in trail.works)
    assert decoded == int(load().output_tokens.sum()) - len(load())
    for work in trail.works:
        assert all(context > 1 for _, context in work.decodes)


def test_an_end_seen_after_an_arrival_before_it_is_not_moved_by_what_starts_then() -> None:
    """A device that reports late: arrivals come between a launch's end and its report, and each launch runs once."""

    class Late(DryDevice):
        def wait(self, until_s: float) -> list[tuple[int, float]]:
            return super().wait(until_s if until_s == np.inf else until_s + 3e-3)

    entry = ENTRIES[3]
    policy = make_policy(entry)
    prices = lane_cost(rough_tables(TICK), factors=(2.0, 1.5))
    cluster = open_cluster(load(entry), policy, prices, bursts=False, **options(entry))
    trail = serve(
        cluster.replicas[0], Late(lambda work: 2.0 * work.solo_s), policy.lanes, load(entry).arrival_s
    )
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    assert (records.requests["status"] == "finished").all()
    assert records.totals["iterations"] == len(trail.rows)
    assert len({(work.lane, work.start_s) for work in trail.works}) == len(trail.rows)


def served(entry: dict[str, Any], seconds: Any = None) -> tuple[Any, Any]:
    policy = make_policy(entry)
    cluster = open_cluster(load(entry), policy, cost(entry), bursts=False, **options(entry))
    device = DryDevice(seconds) if seconds else DryDevice()
    return serve(cluster.replicas[0], device, policy.lanes, load(entry).arrival_s), cluster


def entry_of(name: str) -> dict[str, Any]:
    return next(entry for entry in ENTRIES if title(entry) == name)


def test_mixed_steps_are_fused_or_say_why_not() -> None:
    for name, reasons in (("fused", {0}), ("fallbacks", {0, 1})):
        trail, cluster = served(entry_of(name))
        totals = cluster.close(trail.rows[-1]["end_s"]).totals
        mixed = [work for work in trail.works if work.chunks and work.decodes]
        assert {work.fallback for work in mixed} == reasons
        assert all(work.fused == (work.fallback == 0) for work in mixed)
        assert not any(work.fused for work in trail.works if not (work.chunks and work.decodes))
        assert sum(work.fused for work in mixed) == totals["fast_path_steps"]
        assert sum(row["fused"] for row in trail.rows) == totals["fast_path_steps"]


def test_steps_launched_ahead_keep_their_members_to_the_end() -> None:
    entry = entry_of("duetserve")
    trail, cluster = served(entry)
    assert cluster.close(trail.rows[-1]["end_s"]).totals["iterations"] == len(trail.rows)
    steps = [work for work in trail.works if work.lane == 1]
    first, last, overrun = steps[0], steps[0].steps - 1, 0
    for work in steps:
        if work.ahead == 0:
            assert last == first.steps - 1
            first = work
        else:
            assert [i for i, _ in work.decodes] == [i for i, _ in first.decodes]
            assert [c for _, c in work.decodes] == [c + work.ahead for _, c in first.decodes]
            outputs = load(entry).output_tokens + load(entry).prompt_tokens
            overrun += sum(context >= outputs[i] + 1 for i, context in work.decodes)
        last = work.ahead
    assert max(work.ahead for work in steps) == 4
    assert overrun > 0


def test_pages_of_who_is_done_are_kept_while_steps_ahead_write_to_them() -> None:
    class Watched(DryDevice):
        chain: frozenset[int] = frozenset()

        def launch(self, work: Any, released: list[int]) -> None:
            if work.lane == 1:
                self.chain = frozenset(work.requests) if work.steps > 1 or work.ahead else frozenset()
            flying = self.chain if 1 in self._ends or work.lane == 1 else frozenset()
            assert not flying & set(released)
            super().launch(work, released)

    entry = entry_of("duetserve")
    policy = make_policy(entry)
    cluster = open_cluster(load(entry), policy, cost(entry), bursts=False, **options(entry))
    trail = serve(cluster.replicas[0], Watched(), policy.lanes, load(entry).arrival_s)
    assert any(work.ahead for work in trail.works)


def test_a_parked_pass_goes_on_where_it_was() -> None:
    trail, _ = served(entry_of("muxwise"))
    passes = [work for work in trail.works if work.lane == 0]
    assert any(work.aside for work in passes)
    done: dict[tuple[int, ...], int] = {}
    for work in passes:
        batch = tuple(i for i, *_ in work.chunks)
        assert done.get(batch, 0) == work.layers[0]
        done[batch] = 0 if work.whole else work.layers[1]
        if work.aside:
            assert any(layer > 0 for other, layer in done.items() if other != batch)
    assert set(done.values()) == {0}

"""The Perfetto timeline against the run that it shows."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_records import records, request
from result_folder import run_once
from workloads import workload

from sim.cost import load_cost
from sim.engine import RunRecords, simulate
from sim.engine.link import Link
from sim.engine.pools import Pool
from sim.policies import make_policy
from sim.report.timeline import events, write_timeline

NAN = float("nan")


@pytest.fixture(scope="module")
def run() -> RunRecords:
    """Two replicas, some requests queued, two lanes not needed."""
    return run_once("sarathi-512", 40.0, requests=40, record_steps=True, replicas=2)[1]


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a written file."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def test_the_file_is_the_same_every_time(run: RunRecords, tmp_path: Path) -> None:
    assert run.steps is not None
    for name in ("a.json.gz", "b.json.gz"):
        write_timeline(run.steps, run.requests, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz"]
    assert read(tmp_path / "a.json.gz")


def test_slices_are_the_launches(run: RunRecords) -> None:
    assert run.steps is not None
    found = list(events(run.steps, run.requests))
    slices = [e for e in found if e["ph"] == "X"]
    assert len(slices) == len(run.steps)
    assert {e["pid"] for e in slices} == {1, 2}
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {1: "replica 0", 2: "replica 1"}
    steps = run.steps
    kinds = Counter(e["name"] for e in slices)
    both = (steps["prefill_tokens"] > 0) & (steps["decode_batch"] > 0)
    assert kinds["mixed"] == both.sum() > 0
    assert kinds["decode"] == ((steps["prefill_tokens"] == 0) & ~both).sum()
    assert sum(e["args"]["prefill tokens"] for e in slices) == steps["prefill_tokens"].sum()
    busy_us = sum(e["dur"] for e in slices)
    assert busy_us == pytest.approx(1e6 * (steps["end_s"] - steps["start_s"]).sum(), rel=1e-6)
    assert slices[0]["args"]["SMs"] == 132
    for pid in (1, 2):  # launches of one lane do not overlap
        own = sorted((e["ts"], e["dur"]) for e in slices if e["pid"] == pid)
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in pairwise(own))


def test_spans_are_the_requests(run: RunRecords) -> None:
    assert run.steps is not None
    found = list(events(run.steps, run.requests))
    for phase, first, last in (
        ("queued", "arrival_s", "first_scheduled_s"),
        ("prefill", "first_scheduled_s", "first_token_s"),
        ("decode", "first_token_s", "finish_s"),
    ):
        begin = {e["id"]: e["ts"] for e in found if e["name"] == phase and e["ph"] == "b"}
        end = {e["id"]: e["ts"] for e in found if e["name"] == phase and e["ph"] == "e"}
        assert begin.keys() == end.keys()
        assert len(begin) == len(run.requests)
        shown = sum(end[key] - begin[key] for key in begin)
        assert shown == pytest.approx(1e6 * (run.requests[last] - run.requests[first]).sum(), abs=1)


def test_counters_start_and_end_at_nothing(run: RunRecords) -> None:
    assert run.steps is not None
    found = [e for e in events(run.steps, run.requests) if e["ph"] == "C"]
    for pid in (1, 2):
        for name in ("waiting", "running", "prefill tokens", "decode batch"):
            own = [(e["ts"], e["args"][name]) for e in found if e["pid"] == pid and e["name"] == name]
            assert own[-1][1] == 0
            assert min(value for _, value in own) >= 0
            assert [time for time, _ in own] == sorted({time for time, _ in own})
    area = 0.0
    for pid in (1, 2):
        own = [(e["ts"], e["args"]["waiting"]) for e in found if e["pid"] == pid and e["name"] == "waiting"]
        area += sum(v * (b - a) for (a, v), (b, _) in pairwise(own))
    queued = (run.requests["first_scheduled_s"] - run.requests["arrival_s"]).sum()
    assert area == pytest.approx(1e6 * queued, rel=1e-6)


def lane(number: int, start: float, end: float, **other: int) -> dict[str, Any]:
    """A launch on a lane of its own SMs."""
    row = {
        "replica": 0,
        "lane": number,
        "start_s": start,
        "end_s": end,
        "sms": 66,
        "layers": 32,
        "prefill_tokens": 0,
        "chunks": 0,
        "history_tokens": 0,
        "decode_batch": 0,
        "context_sum": 0,
        "slowdown": 1.25,
        "graph": False,
    }
    return row | other


def test_lanes_are_tracks_and_counters_sum_over_them() -> None:
    steps = pd.DataFrame([lane(0, 0, 2, prefill_tokens=512, chunks=1), lane(1, 1, 3, decode_batch=4)])
    steps = pd.concat([steps, pd.DataFrame([lane(0, 2, 4, prefill_tokens=256, chunks=1)])])
    rows = [request(0, 2, 4), request(0, NAN, NAN, status="unfinished", first_scheduled_s=1.0)]
    rows.append(request(1, NAN, NAN, status="rejected", replica=-1, reason="too long"))
    found = list(events(steps, records(rows).requests))
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert tracks == {1: "prefill lane", 2: "decode lane"}
    slices = [(e["tid"], e["name"], e["args"]["slowdown"]) for e in found if e["ph"] == "X"]
    assert slices == [(1, "prefill", 1.25), (2, "decode", 1.25), (1, "prefill", 1.25)]
    tokens = [(e["ts"], e["args"]["prefill tokens"]) for e in found if e["name"] == "prefill tokens"]
    assert tokens == [(0, 512), (2e6, 256), (4e6, 0)]
    rejected = [e for e in found if e["name"] == "rejected"]
    assert [(e["ts"], e["args"]["reason"]) for e in rejected] == [(1e6, "too long")]
    cut = [e["ts"] for e in found if e.get("id") == "1.1" and e["ph"] == "e"]
    assert cut == [1e6, 4e6]  # its prefill lasts until the end of the run


def test_runs_in_one_frame_become_processes_of_their_own(run: RunRecords) -> None:
    assert run.steps is not None
    frames = []
    for frame in (run.steps, run.requests):
        parts = [frame.assign(run=k, policy=name, request_rate=np.nan, seed=0) for k, name in enumerate("ab")]
        frames.append(pd.concat(parts, ignore_index=True))
    found = list(events(frames[0], frames[1]))
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == ["a, replica 0", "a, replica 1", "b, replica 0", "b, replica 1"]
    assert sum(e["ph"] == "X" for e in found) == 2 * len(run.steps)
    ids = Counter(e["id"] for e in found if e["ph"] == "b" and e["name"] == "queued")
    assert set(ids.values()) == {1}


def test_columns_of_other_runs_are_left_out(run: RunRecords) -> None:
    """A policy that tells the reason of its splits, beside one that has none."""
    assert run.steps is not None
    told = run.steps.assign(run=0, policy="a", split_reason="fits", lent_sm_s=0.0)
    frames = [told, run.steps.assign(run=1, policy="b")]
    requests = [run.requests.assign(run=k, policy=name) for k, name in enumerate("ab")]
    found = list(events(pd.concat(frames), pd.concat(requests)))
    slices = [e["args"] for e in found if e["ph"] == "X"]
    first, second = slices[: len(run.steps)], slices[len(run.steps) :]
    assert {args.pop("split") for args in first} == {"fits"}
    assert second == first


def test_a_failure_leaves_no_file(run: RunRecords, tmp_path: Path) -> None:
    assert run.steps is not None
    with pytest.raises(KeyError):
        write_timeline(run.steps.drop(columns="decode_batch"), run.requests, tmp_path / "t.json.gz")
    assert list(tmp_path.iterdir()) == []


def test_a_slice_tells_where_its_sm_time_went() -> None:
    steps = pd.DataFrame(
        {
            "replica": 0,
            "start_s": [0.0, 0.0],
            "end_s": [2.0, 1.0],
            "lane": [0, 1],
            "sms": [60, 40],
            "prefill_tokens": [10, 0],
            "decode_batch": [0, 3],
            "reason": [7, 0],
            "active_sm_s": [60.0, 30.0],
            "tail_sm_s": [30.0, 0.0],
            "lent_sm_s": [30.0, 0.0],
            "contention_sm_s": [0.0, 10.0],
            "attention_sm_s": [0.0, 20.0],
        }
    )
    found = list(events(steps, records([request(0.0, 1.0, 2.0)]).requests))
    prefill, decode = (e["args"] for e in found if e["ph"] == "X")
    assert prefill["reason"] == 7
    assert {k: v for k, v in prefill.items() if "%" in k} == {"active %": 50, "tail %": 25, "lent %": 25}
    assert {k: v for k, v in decode.items() if "%" in k} == {
        "active %": 75,
        "contention %": 25,
        "attention %": 50,
    }
    names = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert names == ["prefill lane", "decode lane"]
    levels = [(e["ts"], e["args"]["SMs active"]) for e in found if e["name"] == "SMs active"]
    assert levels == [(0.0, 75), (1e6, 45), (2e6, 0)]


@pytest.mark.parametrize(("name", "sharing"), [("distserve", "fair"), ("splitwise", "fifo")])
def test_the_links_show_each_transfer(name: str, sharing: str) -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    n = 30
    load = workload(
        [0.02 * i for i in range(n)], [900 + 40 * i for i in range(n)], [5 + i % 7 for i in range(n)]
    )
    pools = [Pool("prefill", 2, cost), Pool("decode", 2, cost)]
    link = Link(2e9, 1e-5, sharing)
    records = simulate(load, make_policy(name), cost, pools=pools, link=link, record_steps=True)
    assert records.steps is not None
    found, frame = list(events(records.steps, records.requests)), records.requests
    moved = frame[frame["transfer_s"].notna()]
    slices = [e for e in found if e.get("cat") == "transfer"]
    assert len(slices) == len(moved) > 10
    (links,) = {e["pid"] for e in slices}
    assert {e["args"]["name"] for e in found if e["name"] == "process_name" and e["pid"] == links} == {
        "links"
    }
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == links}
    for event in slices:
        row = frame.loc[event["args"]["request"]]
        assert names[event["tid"]].startswith(f"replica {row['replica']} to {row['decode_replica']}")
        assert event["dur"] == pytest.approx(1e6 * row["transfer_s"], abs=2e-3)
        end_s = 1e-6 * (event["ts"] + event["dur"])
        assert row["first_token_s"] <= end_s + 1e-8
        assert end_s <= row["finish_s"] + 1e-8  # the second token comes after the KV
    for thread in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(a[1] <= b[0] + 1e-2 for a, b in pairwise(own))
    level = [e["args"]["transfers"] for e in found if e["name"] == "transfers"]
    assert level[-1] == 0
    assert max(level) >= 1


def test_a_run_without_pools_has_no_links(run: RunRecords) -> None:
    assert run.steps is not None
    assert not [e for e in events(run.steps, run.requests) if e.get("cat") == "transfer"]

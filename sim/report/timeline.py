"""A run as a trace for Perfetto or chrome://tracing: who ran on which SMs when, and what each request waited for.

The format is the Trace Event JSON of Chromium ("Trace Event Format"): a process per replica, a thread per lane,
asynchronous spans per request, counters. Times are in microseconds. The same run gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.report.transfers import handed_over, transfers
from sim.report.words import rate_name

RUN = ("run", "policy", "request_rate", "seed")
ARGS = {
    "prefill_tokens": "prefill tokens",
    "chunks": "prefill chunks",
    "history_tokens": "history tokens",
    "decode_batch": "decode batch",
    "context_sum": "decode context tokens",
    "layers": "layers",
    "sms": "SMs",
    "reason": "reason",
    "split_reason": "split",
    "fallback": "fallback",
}
# SM-seconds of a launch by class, shown as per cent of what it held; the last two are parts of the active ones
CLASSES = ("active", "tail", "host", "contention", "switch", "lent")
PARTS = ("attention", "lockstep")
LANES = {0: "prefill lane", 1: "decode lane"}
Event = dict[str, Any]


def write_timeline(steps: pd.DataFrame, requests: pd.DataFrame, path: Path) -> None:
    """Write the launches and requests of one run, or of several told apart by their run columns.

    `steps` and `requests` are frames as in `steps.parquet` and `requests.parquet` (or `RunRecords`), times in
    seconds. The file appears whole or not at all.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with (
            part.open("wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        ):
            packed.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            for number, event in enumerate(events(steps, requests)):
                line = json.dumps(event, separators=(",", ":"), allow_nan=False)
                packed.write(f"{',' if number else ''}\n{line}".encode())
            packed.write(b"\n]}\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def events(steps: pd.DataFrame, requests: pd.DataFrame) -> Iterator[Event]:
    """All events; process ids count replicas over the runs, from 1."""
    pid = 0
    for title, own_steps, own_requests in _runs(steps, requests):
        replicas = sorted({*own_steps["replica"].unique(), *own_requests["replica"].unique()} - {-1})
        end_s = _end(own_steps, own_requests)
        rejected = own_requests[own_requests["replica"] == -1]
        for replica in replicas or [0]:
            pid += 1
            name = f"{title}replica {replica}"
            yield _meta("process_name", pid, 0, name=name)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
            launches = own_steps[own_steps["replica"] == replica].sort_values(
                ["start_s", "lane"], kind="stable"
            )
            lanes = sorted(launches["lane"].unique())
            for lane in lanes:
                name = LANES[lane] if len(lanes) > 1 else "lane 0"
                yield _meta("thread_name", pid, int(lane) + 1, name=name)
                yield _meta("thread_sort_index", pid, int(lane) + 1, sort_index=int(lane) + 1)
            yield from _slices(launches, pid)
            mine = own_requests[own_requests["replica"] == replica]
            yield from _spans(mine, pid, end_s)
            yield from _request_counters(mine, pid)
            yield from _step_counters(launches, pid)
            if replica == (replicas or [0])[0]:
                yield from _rejections(rejected, pid)
        if handed_over(own_requests).any():
            pid += 1
            yield _meta("process_name", pid, 0, name=f"{title}links")
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
            yield from transfers(own_requests[handed_over(own_requests)], pid)


def _runs(steps: pd.DataFrame, requests: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """(prefix for process names, steps, requests) of each run, in order of appearance."""
    keys = [key for key in RUN if key in steps.columns and key in requests.columns]
    if not keys:
        yield "", steps, requests
        return
    # NaN is the rate of a run without one, and equal to itself here
    parts = dict(list(steps.groupby(keys, sort=False, dropna=False)))
    # columns that only other runs have are NaN here
    of_run = {_same(key): frame.dropna(axis="columns", how="all") for key, frame in parts.items()}
    for key, own in requests.groupby(keys, sort=False, dropna=False):
        first = own.iloc[0]
        title = ""
        if "policy" in keys:
            title = f"{first['policy']}, "
            if "request_rate" in keys and not pd.isna(first["request_rate"]):
                title += f"{rate_name(float(first['request_rate']))}, "
            if "seed" in keys and requests["seed"].nunique() > 1:
                title += f"seed {first['seed']}, "
        yield title, of_run.get(_same(key), steps.iloc[:0]), own


def _same(key: Any) -> tuple[Any, ...]:
    return tuple(None if pd.isna(part) else part for part in (key if isinstance(key, tuple) else (key,)))


def _end(steps: pd.DataFrame, requests: pd.DataFrame) -> float:
    last = [steps["end_s"].max(), *(requests[c].max() for c in ("arrival_s", "first_token_s", "finish_s"))]
    return float(np.nanmax([value for value in last if not pd.isna(value)] or [0.0]))


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond."""
    return round(seconds * 1e6, 3)


def _meta(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slices(launches: pd.DataFrame, pid: int) -> Iterator[Event]:
    """A slice per launch, named by its kind."""
    named = {column: name for column, name in ARGS.items() if column in launches.columns}
    slowdown = "slowdown" in launches.columns
    for row in launches.to_dict("records"):
        prefill, decode = row["prefill_tokens"] > 0, row["decode_batch"] > 0
        kind = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        args: dict[str, Any] = {name: _plain(row[column]) for column, name in named.items()}
        if slowdown and np.isfinite(row["slowdown"]):
            args["slowdown"] = round(float(row["slowdown"]), 6)
        if "graph" in row:
            args["launch"] = "graph" if row["graph"] else "eager"
        args |= _classes(row)
        start = _us(row["start_s"])
        yield {
            "ph": "X",
            "name": kind,
            "cat": "step",
            "pid": pid,
            "tid": int(row["lane"]) + 1,
            "ts": start,
            "dur": round(_us(row["end_s"]) - start, 3),
            "args": args,
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else int(value)


def _classes(row: dict[Any, Any]) -> dict[str, float]:
    """Per cent of the SM time that a launch held, by class; classes that took nothing are left out."""
    held = sum(row.get(f"{name}_sm_s", 0.0) for name in CLASSES)
    if not held > 0:
        return {}
    shares = {name: row.get(f"{name}_sm_s", 0.0) / held for name in (*CLASSES, *PARTS)}
    return {f"{name} %": round(100 * share, 3) for name, share in shares.items() if share > 0}


def _spans(requests: pd.DataFrame, pid: int, end_s: float) -> Iterator[Event]:
    """Queued, prefill and decode of every request; a phase that the run's end cut off lasts until then."""
    marks = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
    for row in requests.to_dict("records"):
        if row["status"] == "rejected":
            yield _rejected(row, pid)
            continue
        args = {
            "request": int(row["request_id"]),
            "prompt tokens": int(row["prompt_tokens"]),
            "output tokens": int(row["output_tokens"]),
            "preemptions": int(row.get("preemptions", 0)),
            "status": str(row["status"]),
        }
        for phase, first, last in zip(("queued", "prefill", "decode"), marks, marks[1:], strict=False):
            if pd.isna(row[first]):
                break
            end = end_s if pd.isna(row[last]) else row[last]
            shared = {
                "name": phase,
                "cat": "request",
                "id": f"{pid}.{row['request_id']}",
                "pid": pid,
                "tid": 0,
            }
            yield {"ph": "b", **shared, "ts": _us(row[first]), "args": args}
            yield {"ph": "e", **shared, "ts": _us(end)}


def _rejections(requests: pd.DataFrame, pid: int) -> Iterator[Event]:
    for row in requests.to_dict("records"):
        yield _rejected(row, pid)


def _rejected(row: dict[Any, Any], pid: int) -> Event:
    args = {"request": int(row["request_id"]), "reason": str(row.get("reason", ""))}
    return {
        "ph": "n",
        "name": "rejected",
        "cat": "request",
        "id": f"{pid}.{row['request_id']}",
        "pid": pid,
        "tid": 0,
        "ts": _us(row["arrival_s"]),
        "args": args,
    }


def _request_counters(requests: pd.DataFrame, pid: int) -> Iterator[Event]:
    """Requests waiting (arrived, never scheduled) and running (scheduled, not finished)."""
    accepted = requests[requests["status"] != "rejected"]
    times = {
        column: accepted[column].to_numpy(np.float64)
        for column in ("arrival_s", "first_scheduled_s", "finish_s")
    }
    yield from _counter("waiting", times["arrival_s"], times["first_scheduled_s"], 1, pid)
    yield from _counter("running", times["first_scheduled_s"], times["finish_s"], 1, pid)


def _step_counters(launches: pd.DataFrame, pid: int) -> Iterator[Event]:
    """Tokens and sequences in flight, summed over the lanes."""
    start, end = (launches[column].to_numpy(np.float64) for column in ("start_s", "end_s"))
    for column, name in (("prefill_tokens", "prefill tokens"), ("decode_batch", "decode batch")):
        yield from _counter(name, start, end, launches[column].to_numpy(np.int64), pid)
    if {"active_sm_s", "lent_sm_s"} <= set(launches.columns):
        active = (launches["active_sm_s"] + launches["lent_sm_s"]).to_numpy(np.float64)
        # the mean over each launch, to the whole SM
        yield from _counter("SMs active", start, end, np.rint(active / (end - start)).astype(np.int64), pid)
    for column, name, unit in (("joules", "watts above idle", 1.0), ("hbm_bytes", "HBM GB/s", 1e9)):
        if column in launches.columns and launches[column].notna().all():
            mean = launches[column].to_numpy(np.float64) / (end - start) / unit
            yield from _counter(name, start, end, np.rint(mean).astype(np.int64), pid)


def _counter(
    name: str,
    begin_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    weight: NDArray[np.int64] | int,
    pid: int,
) -> Iterator[Event]:
    """The level of what begins and ends with a weight; one event wherever the level changes."""
    weights = np.broadcast_to(np.asarray(weight, np.int64), begin_s.shape)
    times = np.concatenate([begin_s, end_s])
    changes = np.concatenate([weights, -weights])
    known = ~np.isnan(times)
    at, where = np.unique(times[known], return_inverse=True)
    level = np.cumsum(np.bincount(where, changes[known], len(at)).astype(np.int64)) if len(at) else at
    previous = None
    for time, value in zip(at.tolist(), level.tolist(), strict=True):
        if value != previous:
            yield {"ph": "C", "name": name, "pid": pid, "ts": _us(time), "args": {name: int(value)}}
            previous = value

"""KV on its way from a prefill to a decode replica, as tracks of a timeline: what a request waited for it.

Of a transfer that begins while its prompt is being computed only the part after the first token is known to the
result files, and that is what is drawn: the time that handing over costs the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

COLUMNS = {"decode_replica", "transfer_s", "pull_wait_s"}


def handed_over(requests: pd.DataFrame) -> NDArray[np.bool_]:
    """Which requests decoded elsewhere than where their prompt was computed."""
    if not set(requests.columns) >= COLUMNS:
        return np.zeros(len(requests), np.bool_)
    return requests["transfer_s"].notna().to_numpy()


def transfers(requests: pd.DataFrame, pid: int) -> Iterator[dict[str, Any]]:
    """A slice per transfer on a track for its pair of replicas, more tracks where several share a link, and how many
    are under way. `requests`: those that were handed over, times in seconds."""
    starts = (requests["first_token_s"] + requests["pull_wait_s"]).to_numpy(np.float64)
    ends = starts + requests["transfer_s"].to_numpy(np.float64)
    order = np.argsort(starts, kind="stable").tolist()
    tracks: dict[tuple[int, int], list[tuple[int, float]]] = {}  # pair -> (thread, until when it is taken)
    rows = requests.to_dict("records")
    threads = 0
    for at in order:
        row, pair = rows[at], (int(rows[at]["replica"]), int(rows[at]["decode_replica"]))
        taken = tracks.setdefault(pair, [])
        lane = next((n for n, (_, until) in enumerate(taken) if until <= starts[at]), len(taken))
        if lane == len(taken):
            threads += 1
            taken.append((threads, 0.0))
            name = f"replica {pair[0]} to {pair[1]}" + (f" ({lane + 1})" if lane else "")
            yield _about("thread_name", pid, threads, name=name)
            yield _about("thread_sort_index", pid, threads, sort_index=threads)
        taken[lane] = taken[lane][0], float(ends[at])
        start_us = _us(starts[at])
        yield {
            "ph": "X",
            "name": "KV transfer",
            "cat": "transfer",
            "pid": pid,
            "tid": taken[lane][0],
            "ts": start_us,
            "dur": round(_us(ends[at]) - start_us, 3),
            "args": {
                "request": int(row["request_id"]),
                "tokens": int(row["prompt_tokens"]),
                "waited for the pull ms": round(1e3 * float(row["pull_wait_s"]), 6),
            },
        }
    yield from _under_way(starts, ends, pid)


def _under_way(starts: NDArray[np.float64], ends: NDArray[np.float64], pid: int) -> Iterator[dict[str, Any]]:
    times, where = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    level = np.cumsum(np.bincount(where, changes, len(times)))
    for time_s, count in zip(times.tolist(), level.tolist(), strict=True):
        yield {
            "ph": "C",
            "name": "transfers",
            "pid": pid,
            "ts": _us(time_s),
            "args": {"transfers": int(count)},
        }


def _about(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond."""
    return round(float(seconds) * 1e6, 3)

"""Readings of the work counters while a run goes on, from which watts over time are made when it is over.

Work is linear in the counters (`sim.cost.work.joules_per`), so that two readings tell the joules between them. One is
taken with the first completion at or after each multiple of METER_S of simulated time, and at both ends of an idle gap
before its launch: between two readings the GPU draws evenly or not at all. Where readings
are taken depends on when launches end, not on who asks or on bursts.
"""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    DECODE_ITEM,
    DECODE_KV,
    DENSE_TOKENS,
    EAGER_LAUNCHES,
    GPU_S,
    GRAPH_LAUNCHES,
    HEAD_ROWS,
    IN_CHUNKS,
    IN_TOKENS,
    LANE_BATCH,
    LANE_BUSY,
    LANE_CONTEXT,
    LANE_FACTOR,
    LANE_FLOATS,
    LANE_GPU,
    LANE_INTEGERS,
    LANE_KIND,
    LANE_LAYERS,
    LANE_LEFT,
    LANE_SINCE,
    LANE_SOLO,
    LANES,
    LANES_F,
    LAYERS_DONE,
    METER_DUE,
    METER_END,
    METER_WIDTH,
    MODEL_LAYERS,
    N_METER,
    NOW,
    PAIRS,
    PARKED,
    PARKED_LAYERS,
    PARKED_TOKENS,
    PREFILL_ITEM,
    PREFILL_KV,
    PREFILL_LANE,
)
from sim.jit import jit

METER_S = 0.05


@jit
def read_meter(r: Any, at: float) -> None:
    """A reading of the counters as they are, at a time."""
    iv = r.iv
    row = iv[N_METER] * METER_WIDTH
    r.meter[row] = at
    r.meter[row + 1] = r.fv[GPU_S]
    r.meter[row + 2] = float(iv[GRAPH_LAUNCHES] + iv[EAGER_LAUNCHES])
    r.meter[row + 3] = float(iv[DENSE_TOKENS])
    r.meter[row + 4] = float(iv[HEAD_ROWS])
    r.meter[row + 5] = float(iv[PAIRS])
    r.meter[row + 6] = float(iv[PREFILL_KV])
    r.meter[row + 7] = float(iv[DECODE_KV])
    iv[N_METER] += 1


@jit
def read_before(r: Any, start: float) -> None:
    """The launch from `start` after an idle gap is about to be counted: readings at both ends of the gap."""
    if start > r.fv[METER_END]:
        read_meter(r, r.fv[METER_END])
    read_meter(r, start)


@jit
def read_after(r: Any, end: float) -> None:
    """It has been counted: a reading where it ends, and when the next is due."""
    read_meter(r, end)
    r.fv[METER_DUE] = METER_S * float(int(end / METER_S) + 1)


@jit
def read_idle_lanes(r: Any) -> None:
    """Two lanes, both idle and about to launch: a reading now, and where what ran before ended."""
    read_before(r, r.fv[NOW])


@jit
def read_lanes(q: Any, r: Any, end: float) -> None:
    """Two lanes: a reading at `end`, which is now, with what is done of the work in flight."""
    iv, fv = r.iv, r.fv
    row = iv[N_METER] * METER_WIDTH
    read_after(r, end)
    progress = float(iv[LAYERS_DONE])
    for lane in range(2):
        n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
        if iv[n + LANE_BUSY] == 1:
            left = fv[f + LANE_LEFT] - (end - fv[f + LANE_SINCE]) / fv[f + LANE_FACTOR]
            done = min(1.0, max(0.0, 1.0 - left / fv[f + LANE_SOLO]))
            r.meter[row + 1] += done * fv[f + LANE_GPU]
            if lane == PREFILL_LANE:
                progress += done * iv[n + LANE_LAYERS]
            if iv[n + LANE_KIND] != PREFILL_ITEM:
                _add_work(
                    r,
                    row,
                    done * (1.0 if iv[n + LANE_KIND] == DECODE_ITEM else 0.0),
                    done * iv[n + LANE_BATCH],
                )
                r.meter[row + 7] += done * iv[n + LANE_CONTEXT]
    if iv[IN_CHUNKS] > 0:
        _add_pass(
            q, r, row, iv[IN_CHUNKS], iv[IN_TOKENS], progress / iv[MODEL_LAYERS], r.chunk_id, r.chunk_tokens
        )
    if iv[PARKED] > 0:
        share = iv[PARKED_LAYERS] / iv[MODEL_LAYERS]
        _add_pass(q, r, row, iv[PARKED], iv[PARKED_TOKENS], share, r.park_id, r.park_tokens)


@jit
def _add_work(r: Any, row: int, launches: float, tokens: float) -> None:
    r.meter[row + 2] += launches
    r.meter[row + 3] += tokens
    r.meter[row + 4] += tokens


@jit
def _add_pass(
    q: Any, r: Any, row: int, chunks: int, tokens: int, done: float, chunk_id: Any, chunk_tokens: Any
) -> None:
    """An open prefill batch: its tokens are counted when it ends, its attention was when it began."""
    _add_work(r, row, done, 0.0)
    r.meter[row + 3] += done * tokens
    for c in range(chunks):
        size, history = chunk_tokens[c], q.computed[chunk_id[c]]
        r.meter[row + 5] -= (1.0 - done) * (size * history + size * (size + 1) // 2)
        r.meter[row + 6] -= (1.0 - done) * (size + history)

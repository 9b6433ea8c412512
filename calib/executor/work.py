"""What is in flight on a lane, read off the engine's state, and how a measured end is put back into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.engine.cohort import computed_now
from sim.engine.layout import (
    BURST,
    BUSY,
    DECODE,
    IN_CHUNKS,
    IN_DECODE,
    LANE_BUSY,
    LANE_FLOATS,
    LANE_INTEGERS,
    LANE_KIND,
    LANE_LAYERS,
    LANE_LEFT,
    LANE_PART,
    LANE_SINCE,
    LANE_SOLO,
    LANE_START,
    LANES,
    LANES_F,
    LAYERS_DONE,
    MODEL_LAYERS,
    OVERHANG,
    PREFILL_ITEM,
    PREFILL_LANE,
    RUN_HEAD,
    SMS,
    STEP_START,
)

FAR_S = 1e15  # solo seconds left of a launch whose end only the device knows


@dataclass(frozen=True)
class Work:
    """One launch: prompt chunks (request, new tokens, tokens before them), decodes (request, context with the new
    token), the model's layers [first, last), the lane and its SMs. `solo_s` is what the tables say it takes alone;
    `overhang`: tokens by which the longest decode context stands out (`sim.engine.ragged`)."""

    lane: int
    sms: int
    layers: tuple[int, int]
    chunks: tuple[tuple[int, int, int], ...]
    decodes: tuple[tuple[int, int], ...]
    start_s: float
    solo_s: float
    whole: bool  # does it end at the model's last layer?
    overhang: int = 0

    @property
    def rows(self) -> int:
        """Rows of the linear layers."""
        return sum(tokens for _, tokens, _ in self.chunks) + len(self.decodes)


def on_one_lane(q: Any, r: Any) -> Work | None:
    """What a policy with one lane has in flight."""
    iv, fv = r.iv, r.fv
    if iv[BUSY] == 0:
        return None
    start = float(fv[STEP_START])
    layers = int(iv[MODEL_LAYERS])
    decodes = _members(q, r) if iv[IN_DECODE] == 1 else ()
    solo_s, over = float(r.ends[0]) - start, int(iv[OVERHANG]) if decodes else 0
    return Work(0, int(iv[SMS]), (0, layers), _chunks(q, r), decodes, start, solo_s, True, over)


def end_one_lane(r: Any, end_s: float) -> None:
    """The step in flight ends at `end_s`."""
    r.iv[BURST] = 1
    r.ends[0] = end_s


def on_lane(q: Any, r: Any, lane: int) -> Work | None:
    """What a policy with two lanes has in flight on `lane`."""
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    if iv[n + LANE_BUSY] == 0:
        return None
    prefill, alone = lane == PREFILL_LANE, iv[n + LANE_KIND] == PREFILL_ITEM
    first = int(iv[LAYERS_DONE]) if prefill else 0
    last = first + int(iv[n + LANE_LAYERS]) if prefill else int(iv[MODEL_LAYERS])
    return Work(
        lane,
        int(r.policy_sms[iv[n + LANE_PART]]),
        (first, last),
        _chunks(q, r) if prefill else (),
        () if alone else _members(q, r),
        float(fv[f + LANE_START]),
        float(fv[f + LANE_SOLO]),
        last == iv[MODEL_LAYERS],
        0 if alone else int(iv[OVERHANG]),
    )


def hold_lane(r: Any, lane: int) -> None:
    """The launch on `lane` ends when the device says so."""
    r.fv[LANES_F + lane * LANE_FLOATS + LANE_LEFT] = FAR_S


def end_lane(r: Any, lane: int, end_s: float) -> None:
    """The launch on `lane` ends at `end_s`."""
    f = LANES_F + lane * LANE_FLOATS
    r.fv[f + LANE_SINCE] = end_s
    r.fv[f + LANE_LEFT] = 0.0


def _chunks(q: Any, r: Any) -> tuple[tuple[int, int, int], ...]:
    ids = [int(i) for i in r.chunk_id[: int(r.iv[IN_CHUNKS])]]
    return tuple((i, int(r.chunk_tokens[c]), int(q.computed[i])) for c, i in enumerate(ids))


def _members(q: Any, r: Any) -> tuple[tuple[int, int], ...]:
    """The cohort in running order; each context includes the token that the step computes."""
    found, i = [], int(r.iv[RUN_HEAD])
    while i >= 0:
        if q.phase[i] == DECODE:
            found.append((i, int(computed_now(q, r, i)) + 1))
        i = int(q.next[i])
    return tuple(found)

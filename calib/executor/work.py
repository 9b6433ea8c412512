"""What is in flight on a lane, read off the engine's state, and how a measured end is put back into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sim.engine.cohort import computed_now
from sim.engine.layout import (
    BURST,
    BUSY,
    CHAIN_AT,
    CHAIN_LEFT,
    DECODE,
    IN_CHUNKS,
    IN_DECODE,
    IN_FALLBACK,
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
    PARKED,
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
    `overhang`: tokens by which the longest decode context stands out (`sim.engine.ragged`). `fused`: its attention
    runs as the mode of the mixed steps says; `fallback`: why by separate kernels after all (`sim.cost.fallbacks`).
    `steps`: decode steps that start at once, of which this is the first; `ahead`: this is the so-manieth behind such a
    first one, and has been launched with it. `aside`: it passes a prefill batch that is parked half-way."""

    lane: int
    sms: int
    layers: tuple[int, int]
    chunks: tuple[tuple[int, int, int], ...]
    decodes: tuple[tuple[int, int], ...]
    start_s: float
    solo_s: float
    whole: bool  # does it end at the model's last layer?
    overhang: int = 0
    fused: bool = False
    fallback: int = 0
    steps: int = 1
    ahead: int = 0
    aside: bool = False

    @property
    def rows(self) -> int:
        """Rows of the linear layers."""
        return sum(tokens for _, tokens, _ in self.chunks) + len(self.decodes)

    @property
    def requests(self) -> set[int]:
        """Whose KV it reads or writes."""
        return {i for i, *_ in (*self.chunks, *self.decodes)}

    def later(self, steps: int) -> Work:
        """The decode step `steps` steps on: who has all tokens by then is still in it."""
        return replace(self, decodes=tuple((i, context + steps) for i, context in self.decodes), ahead=steps)


def on_one_lane(q: Any, r: Any, mixes: bool = False) -> Work | None:
    """What a policy with one lane has in flight; `mixes`: mixed steps have a mode of attention of their own."""
    iv, fv = r.iv, r.fv
    if iv[BUSY] == 0:
        return None
    start = float(fv[STEP_START])
    layers = int(iv[MODEL_LAYERS])
    decodes = _members(q, r) if iv[IN_DECODE] == 1 else ()
    solo_s, over = float(r.ends[0]) - start, int(iv[OVERHANG]) if decodes else 0
    chunks = _chunks(q, r)
    fallback = int(iv[IN_FALLBACK]) if mixes and chunks and decodes else 0
    fused = mixes and bool(chunks and decodes) and fallback == 0
    return Work(0, int(iv[SMS]), (0, layers), chunks, decodes, start, solo_s, True, over, fused, fallback)


def end_one_lane(r: Any, end_s: float) -> None:
    """The step in flight ends at `end_s`."""
    r.iv[BURST] = 1
    r.ends[0] = end_s


def on_lane(q: Any, r: Any, lane: int, mixes: bool = False, chain: Work | None = None) -> Work | None:
    """What a policy with two lanes has in flight on `lane`; `chain`: the first of the decode steps launched at once."""
    iv, fv = r.iv, r.fv
    n, f = LANES + lane * LANE_INTEGERS, LANES_F + lane * LANE_FLOATS
    if iv[n + LANE_BUSY] == 0:
        return None
    start_s, solo_s, layers = float(fv[f + LANE_START]), float(fv[f + LANE_SOLO]), int(iv[MODEL_LAYERS])
    sms = int(r.policy_sms[iv[n + LANE_PART]])
    if lane == PREFILL_LANE:
        first = int(iv[LAYERS_DONE])
        last = first + int(iv[n + LANE_LAYERS])
        mixed = iv[n + LANE_KIND] != PREFILL_ITEM
        fallback = int(iv[IN_FALLBACK]) if mixes and mixed else 0
        return Work(
            *(lane, sms, (first, last), _chunks(q, r), _members(q, r) if mixed else (), start_s, solo_s),
            last == layers,
            int(iv[OVERHANG]) if mixed else 0,
            fused=mixes and mixed and fallback == 0,
            fallback=fallback,
            aside=iv[PARKED] > 0,
        )
    if iv[CHAIN_AT] > 0 and chain is not None:
        return replace(chain.later(int(iv[CHAIN_AT])), start_s=start_s, solo_s=solo_s, steps=1)
    steps = 1 + int(iv[CHAIN_LEFT])
    over = int(iv[OVERHANG])
    return Work(lane, sms, (0, layers), (), _members(q, r), start_s, solo_s, True, over, steps=steps)


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

"""Prefill attention as blocks of query rows dealt to SMs in turn: the SM with the longest block of each round is last.

Nothing evens the rounds out, whether blocks come longest or shortest first: 256 blocks of a causal prompt on 132 SMs
take as long as the longest and the one 132 places on (measured of FA2 and FA3 alike, for 8 to 32 heads). Libraries plan
for the whole GPU, whatever partition the kernel then runs on. FlashInfer's FA3 starts one persistent CTA an SM of the
whole GPU, each with a fixed share of the blocks: on 128 of 132 SMs the last four CTAs run behind all others, and the
kernel takes twice as long. Its FA2 splits keys among idle SMs and merges the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.gpu import GpuSpec
from sim.cost.measured_terms import Unbounded, read_terms
from sim.cost.operators import hbm_bytes
from sim.cost.shapes import Floats, PrefillAttention, Shape, Timing
from sim.errors import SimctlError

ROWS = 128
KEYS = 128  # keys of one step of a block's loop: work is done in whole steps
ROUNDS, TURNS = 32, 40  # blocks of a CTA, and CTAs of an SM, that are counted one by one


@dataclass(frozen=True)
class Blocks:
    """`fixed_s` a call; `efficiency`: share of peak FLOP/s within a block; `wave_s`: start and end of a block.

    `memory`: share of the bandwidth, drawn in full from the share `knee` of the SMs on. `packed`: 1 if a block's rows
    are those of all heads that share a KV head; `workers`: persistent CTAs, 0 if each block is a CTA; `split`: CTAs
    that keys are split for when blocks are fewer, at `split_s` a call and `merge_s` a token and query head on the whole
    GPU.
    """

    fixed_s: float
    efficiency: float
    wave_s: float
    memory: float
    knee: float
    packed: float
    workers: float
    split: float
    split_s: float
    merge_s: float

    @classmethod
    def from_data(cls, terms: Mapping[str, Any], where: str) -> Blocks:
        """Terms of a mapping; SimctlError names `where`."""
        return read_terms(cls, terms, where, positive=False)


@dataclass(frozen=True)
class BlocksCurve(Unbounded):
    """Prefill attention on one GPU by `Blocks`, without coverage limits of its own."""

    gpu: GpuSpec
    terms: Blocks
    label: str
    coverage: str = ""
    extrapolation: str = "flag"

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds of one call per array element."""
        if not isinstance(shape, PrefillAttention):
            raise SimctlError("The form 'blocks' is for prefill attention only.")
        t, share = self.terms, np.asarray(sms) / self.gpu.sms
        step_s = 4.0 * shape.head_dim * ROWS / (self.gpu.peak_flops * t.efficiency * clock / self.gpu.sms)
        plan = planned(shape, t)
        keys, waves = busiest(plan, sms, t)
        compute = keys * step_s + waves * t.wave_s
        rows = np.asarray(shape.q) * shape.q_heads
        merging = np.where(plan.pieces > 1, t.split_s + t.merge_s * rows / share, 0.0)
        memory = hbm_bytes(shape) / (t.memory * self.gpu.hbm_bytes_per_s * np.minimum(1.0, share / t.knee))
        seconds = np.asarray(t.fixed_s + np.maximum(compute, memory) + merging)
        active = np.minimum(1.0, plan.total / np.maximum(keys * sms, 1.0))
        return Timing(seconds=seconds, sm_s=active * seconds * sms)


@dataclass(frozen=True)
class Plan:
    """What a launch consists of, per array element: blocks (`units`) of `heads` alike, each in `pieces`; keys of all;
    `seen(i)`: keys of the i-th shortest row of blocks."""

    units: Any
    heads: int
    pieces: Any
    total: Floats
    seen: Callable[[Any], Any]


def planned(shape: PrefillAttention, t: Blocks) -> Plan:
    """Blocks of 128 rows: 128 / group tokens of a KV head's query heads, or 128 tokens of one query head.

    The block that ends at token e of the chunk sees h + e keys (or the window), in whole steps of `KEYS`.
    """
    q, h = np.asarray(shape.q, dtype=np.float64), np.asarray(shape.h, dtype=np.float64)
    group = shape.q_heads // shape.kv_heads
    tokens, heads = (max(1, ROWS // group), shape.kv_heads) if t.packed else (ROWS, shape.q_heads)

    def seen(row: Any) -> Floats:
        keys = np.minimum((row + 1.0) * tokens, q) + h
        if shape.window is not None:
            keys = np.minimum(keys, float(shape.window + tokens))
        return np.asarray(np.ceil(keys / KEYS) * KEYS)

    rows = np.ceil(q / tokens)
    longest = seen(rows - 1)
    units, pieces = rows * heads, np.ones(np.shape(rows))
    if t.split:
        pieces = np.clip(t.split // np.maximum(units, 1), 1, longest // KEYS)
    return Plan(units, heads, pieces, units * (seen(0) + longest) / 2.0, seen)


def busiest(plan: Plan, sms: Any, t: Blocks) -> tuple[Floats, Floats]:
    """(keys that the last SM to finish goes through, blocks that it runs), per array element.

    SMs take every so-manieth block; of persistent CTAs, which do that themselves, they take every so-manieth CTA.
    """
    count = plan.units * plan.pieces
    if not t.workers:
        return _dealt(plan, count, sms)
    turns = np.ceil(np.minimum(count, t.workers) / sms)

    def of_cta(turn: Any) -> Floats:
        return np.stack(np.broadcast_arrays(*_dealt(plan, count - turn * sms, t.workers)))

    keys, blocks = _summed(turns, TURNS, of_cta)
    return keys, blocks


def _dealt(plan: Plan, first: Any, workers: Any) -> tuple[Floats, Floats]:
    """Keys and number of every `workers`-th block from the `first`-shortest down."""
    rounds = np.asarray(np.ceil(np.maximum(first, 1) / workers))
    alike = plan.heads * plan.pieces

    def of_block(turn: Any) -> Floats:
        return np.asarray(
            plan.seen(np.floor(np.maximum(first - 1 - turn * workers, 0) / alike)) / plan.pieces
        )

    return _summed(rounds, ROUNDS, of_block), rounds


def _summed(turns: Floats, most: int, value: Callable[[Any], Floats]) -> Floats:
    """Sum of `value` over turns 0, 1, ...; those beyond `most` count as the mean of their first and last."""
    total = value(0.0 * turns)
    shown = min(int(np.max(turns)), most)
    for turn in range(1, shown):
        total = total + np.where(turn < turns, value(np.minimum(turn, turns - 1)), 0.0)
    rest = np.maximum(turns - shown, 0)
    if np.any(rest):
        total = total + rest * (value(np.minimum(shown, turns - 1)) + value(turns - 1)) / 2.0
    return np.asarray(total)

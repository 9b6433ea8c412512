"""Prefill attention as blocks of query rows on SMs: longest first, with the leftover of the last wave made explicit.

Libraries plan for the whole GPU, whatever partition the kernel then runs on. FlashInfer's FA3 starts one persistent
CTA an SM of the whole GPU, each with a fixed share of the blocks: on 128 of 132 SMs the last four CTAs run behind all
others, and the kernel takes twice as long. Its FA2 splits keys among idle SMs and merges the parts.
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
from sim.cost.waves import ceil_div
from sim.errors import SimctlError

ROWS = 128
KEYS = 128  # keys of one step of a block's loop: work is done in whole steps


@dataclass(frozen=True)
class Blocks:
    """`fixed_s` a call; `efficiency`: share of peak FLOP/s within a block; `wave_s`: start and end of a block.

    `tail`: how much of the longest leftover block stands behind the full waves (0 to 1), where the leftover blocks are
    the shortest, or with `in_order` 1 the longest (rows start in the order of the prompt); `memory`: share of the
    bandwidth, drawn in full from the share `knee` of the SMs on. `packed`: 1 if a block's rows are those of all heads
    that share a KV head; `workers`: persistent CTAs, 0 if each block is a CTA; `split`: CTAs that keys are split for
    when blocks are fewer, at `split_s` a call and `merge_s` a token on the whole GPU.
    """

    fixed_s: float
    efficiency: float
    wave_s: float
    tail: float
    memory: float
    knee: float
    packed: float
    workers: float
    in_order: float
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
        merging = np.where(plan.pieces > 1, t.split_s + t.merge_s * np.asarray(shape.q) / share, 0.0)
        memory = hbm_bytes(shape) / (t.memory * self.gpu.hbm_bytes_per_s * np.minimum(1.0, share / t.knee))
        seconds = np.asarray(t.fixed_s + np.maximum(compute, memory) + merging)
        active = np.minimum(1.0, plan.total / np.maximum(keys * sms, 1.0))
        return Timing(seconds=seconds, sm_s=active * seconds * sms)


@dataclass(frozen=True)
class Plan:
    """What a launch consists of, per array element: blocks (`units`) of `heads` alike, each in `pieces`; keys of the
    shortest and the longest block and of all; `seen(i)`: keys of the i-th shortest row of blocks."""

    units: Any
    heads: int
    pieces: Any
    total: Floats
    longest: Any
    seen: Callable[[Any], Any]


def planned(shape: PrefillAttention, t: Blocks) -> Plan:
    """Blocks of 128 rows: 128 / group tokens of a KV head's query heads, or 128 tokens of one query head.

    The block that ends at token e of the chunk sees h + e keys (or the window), in whole steps of `KEYS`.
    """
    q, h = np.asarray(shape.q, dtype=np.float64), np.asarray(shape.h, dtype=np.float64)
    group = shape.q_heads // shape.kv_heads
    tokens, heads = (max(1, ROWS // group), shape.kv_heads) if t.packed else (ROWS, shape.q_heads)
    most = np.inf if shape.window is None else float(shape.window + tokens)

    def seen(row: Any) -> Any:
        end = np.minimum((row + 1) * tokens, q)
        return ceil_div(np.minimum(h + end, most), KEYS) * KEYS

    units = ceil_div(np.asarray(shape.q), tokens) * heads
    longest = seen(units // heads - 1)
    pieces = np.ones(np.shape(units))
    if t.split:
        pieces = np.clip(t.split // np.maximum(units, 1), 1, longest // KEYS)
    return Plan(units, heads, pieces, units * (seen(0) + longest) / 2.0, longest, seen)


def busiest(plan: Plan, sms: Any, t: Blocks) -> tuple[Floats, Floats]:
    """(keys that the last SM to finish goes through, blocks that it runs), per array element."""
    if not t.workers:
        return _makespan(plan, sms, t)
    keys, waves = _makespan(plan, t.workers, t)
    rounds = ceil_div(np.minimum(plan.units, t.workers), sms)
    return keys * rounds, waves * rounds


def _makespan(plan: Plan, workers: Any, t: Blocks) -> tuple[Floats, Floats]:
    """Full waves even out, and the leftover blocks run behind them."""
    count = plan.units * plan.pieces
    over = count % workers
    row = over // (plan.heads * plan.pieces)
    if t.in_order:
        first, last = plan.longest / plan.pieces, plan.seen(plan.units // plan.heads - 1 - row) / plan.pieces
    else:
        first, last = plan.seen(row) / plan.pieces, plan.seen(0) / plan.pieces
    left = np.where(over > 0, over * (first + last) / 2.0, 0.0)
    full = (plan.total - left) / workers + np.where(over > 0, t.tail * first, 0.0)
    keys = np.maximum(np.maximum(full, plan.total / workers), plan.longest / plan.pieces)
    return np.asarray(keys), np.asarray(ceil_div(count, workers))

"""Attention of a mixed step by mode: separate kernels, two streams, or one fused kernel of one kind or another.

Every mode is one list schedule of CTAs (`sim.cost.cta_schedule`) over what the mode launches (`sim.cost.cta_grid`).
Base times come from kernels that ran alone, so published figures of fused kernels are checks, not inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import (
    Grid,
    MixedShape,
    artefact,
    flashinfer,
    one_prefill_kernel,
    serial_decode,
    serial_prefill,
)
from sim.cost.cta_schedule import PAIRS, PREFILL_FIRST, Schedule, run_schedule
from sim.cost.cta_terms import SPLIT, CtaTerms


@dataclass(frozen=True)
class FusedRun:
    """One layer's attention of a mixed step: `seconds` with fixed times; `virtual`: decode CTAs in one CTA;
    `occupancy`: CTAs resident on an SM on average; `waves` of CTAs; `busy`: share of SM time with a resident CTA."""

    seconds: float
    virtual: int
    tile: str
    occupancy: float
    waves: float
    busy: float
    prefill_splits: int
    decode_splits: int


def run_grid(terms: CtaTerms, grid: Grid, kernels: int = 1) -> tuple[Schedule, float]:
    """A launch's schedule, and its seconds with the fixed times of its kernels and merges."""
    if grid.slots < 1:
        return Schedule(0.0, 0.0, 0.0, 0.0, 0.0), float("inf")
    schedule = run_schedule(terms.machine, grid.prefill, grid.decode, grid.slots, grid.tickets)
    return schedule, schedule.seconds + kernels * terms.launch_s + grid.merges * terms.merge_s


@lru_cache(maxsize=4096)
def serial_prefill_s(
    terms: CtaTerms, q: int, h: int, q_heads: int, kv_heads: int, head_dim: int = 128
) -> float:
    """Seconds of the prefill kernel alone, one layer."""
    return run_grid(terms, serial_prefill(terms, MixedShape(q, h, 1, 1, q_heads, kv_heads, head_dim)))[1]


@lru_cache(maxsize=4096)
def serial_decode_s(
    terms: CtaTerms, batch: int, context: float, q_heads: int, kv_heads: int, head_dim: int = 128
) -> float:
    """Seconds of the decode kernel alone, one layer."""
    return run_grid(
        terms, serial_decode(terms, MixedShape(1, 0, batch, context, q_heads, kv_heads, head_dim))
    )[1]


def serial_s(terms: CtaTerms, shape: MixedShape) -> tuple[float, float]:
    """Seconds of separate prefill and decode kernels, one layer."""
    heads = (shape.q_heads, shape.kv_heads, shape.head_dim)
    prefill = serial_prefill_s(terms, shape.q, shape.h, *heads)
    return prefill, serial_decode_s(terms, shape.batch, shape.context, *heads)


def mode_grid(terms: CtaTerms, mode: AttentionMode, shape: MixedShape) -> Grid:
    """What the mode launches for a shape; ValueError for `serial`, which is two launches."""
    if mode.mode == "pod":
        variant = mode.kernel(terms.gpu.compute_capability)
        if variant == "artefact":
            return artefact(terms, shape, mode.ctas_per_sm, mode.tickets == "50:50", mode.split == "limited")
        return flashinfer(terms, shape, variant == "flashinfer-batch")
    if mode.mode == "batched":
        return one_prefill_kernel(terms, shape)
    prefill, decode = serial_prefill(terms, shape), serial_decode(terms, shape)
    tickets, slots = PREFILL_FIRST, 2
    if mode.mode == "hfuse":
        # 256 threads with all their registers fill an SM
        tickets, slots = PAIRS, 1
    elif mode.mode != "streams":
        raise ValueError(f"{mode.mode} attention is not one launch")
    return Grid(
        prefill.prefill,
        decode.decode,
        slots,
        tickets,
        prefill.merges + decode.merges,
        prefill.prefill_tile,
        decode.decode_tile or SPLIT,
        prefill.prefill_splits,
        decode.decode_splits,
    )


def fused_run(terms: CtaTerms, mode: AttentionMode, shape: MixedShape) -> FusedRun:
    """One layer's attention of a mixed step in a mode other than serial."""
    grid = mode_grid(terms, mode, shape)
    schedule, seconds = run_grid(terms, grid, 2 if mode.mode == "streams" else 1)
    ctas = grid.prefill.count + grid.decode.count
    tiles = [tile.name for tile in (grid.prefill_tile, grid.decode_tile) if tile is not None]
    return FusedRun(
        seconds=seconds,
        virtual=grid.virtual,
        tile=" + ".join(tiles),
        occupancy=schedule.resident,
        waves=ctas / (terms.sms * grid.slots) if grid.slots else 0.0,
        busy=schedule.busy,
        prefill_splits=grid.prefill_splits,
        decode_splits=grid.decode_splits,
    )

"""The analytic spec profile: a roofline with explicit tiles, waves and bandwidth that saturates over SMs.

Forms after public fits (sources in spec.yaml); every curve is an extrapolation from a data sheet and a few
measurements, and says so. All forms are monotone in tokens, context and SMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.experts import row_tiles
from sim.cost.gpu import GpuSpec
from sim.cost.operators import causal_pairs, decode_keys, hbm_bytes
from sim.cost.shapes import (
    DecodeAttention,
    Elementwise,
    Experts,
    Floats,
    Gemm,
    PrefillAttention,
    Shape,
    Timing,
)
from sim.cost.waves import ceil_div
from sim.errors import SimctlError

# CTA tiles (rows, columns) and their throughput relative to the largest: fits to public tables, see spec.yaml
GEMM_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (192, 128, 0.98),
    (128, 192, 0.98),
    (128, 128, 0.95),
    (64, 256, 0.92),
    (64, 128, 0.87),
    (64, 64, 0.78),
    (32, 128, 0.6),
    (16, 128, 0.35),
)
GEMM_SPLITS = (1, 2, 4, 8)
# one kernel for all experts, whose CTAs take tile after tile: no whole waves
GROUPED_TILE = (128, 128)
DECODE_SPLITS = (1, 2, 4, 8, 16, 32)
ROW_TILE = 128  # query rows of one attention CTA, the heads of a KV group packed
KEY_TILE = 128
DECODE_ROWS = 16  # query rows of a decode CTA are padded to one tensor-core tile


@dataclass(frozen=True)
class Roofline:
    """Parameters of one operator's form; see `sim/data/profiles/spec.yaml` for meanings and units."""

    launch_s: float
    idle_launch_s: float
    bandwidth_efficiency: float
    sm_bytes_per_clock: float
    bandwidth_p: float
    efficiency: float = 1.0
    wave_s: float = 0.0
    overlap_p: float = 4.0
    tail: float = 0.0
    split_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise SimctlError(f"'{name}' is a share of the peak, in (0, 1], not {getattr(self, name)}.")
        for name in ("launch_s", "wave_s", "tail", "split_s"):
            if getattr(self, name) < 0:
                raise SimctlError(f"'{name}' must not be negative, but is {getattr(self, name)}.")
        if not 0 <= self.idle_launch_s <= self.launch_s:
            raise SimctlError(f"'idle_launch_s' must lie within 0..launch_s, but is {self.idle_launch_s}.")


@dataclass(frozen=True)
class RooflineCurve:
    """One operator on one GPU by `Roofline`; without coverage limits, since nothing was measured."""

    gpu: GpuSpec
    terms: Roofline
    label: str
    coverage: str = ""
    extrapolation: str = "flag"

    def covered(self, shape: Shape, sms: int) -> bool:
        """True: the form claims every shape, by extrapolation."""
        return True

    def fixed_s(self, shape: Shape) -> float:
        """The fixed cost of a call."""
        return self.terms.launch_s

    def label_for(self, shape: Shape) -> str:
        """The label, whatever the shape."""
        return self.label

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds of one call per array element; see `Curve.timing`."""
        if isinstance(shape, Gemm):
            work, active = self._gemm(shape, sms, clock)
        elif isinstance(shape, Experts):
            work, active = self._experts(shape, sms, clock)
        elif isinstance(shape, PrefillAttention):
            work, active = self._prefill(shape, sms, clock)
        elif isinstance(shape, DecodeAttention):
            work, active = self._decode(shape, sms, clock)
        else:
            work, active = self._elementwise(shape, sms, clock)
        launch, resident = self.terms.launch_s, self.terms.launch_s - self.terms.idle_launch_s
        return Timing(seconds=launch + work, sm_s=(resident + work) * np.minimum(active, 1.0) * sms)

    def bandwidth(self, sms: Any, clock: float = 1.0) -> Any:
        """Bytes/s that `sms` SMs draw: linear while each SM is the limit, then flat; the whole GPU reaches
        `bandwidth_efficiency` of the data sheet."""
        reachable = self.gpu.hbm_bytes_per_s * self.terms.bandwidth_efficiency
        per_sm = self.terms.sm_bytes_per_clock * self.gpu.boost_mhz * 1e6 * clock
        p = self.terms.bandwidth_p

        def saturating(n: Any) -> Any:
            return (1.0 + (reachable / (per_sm * n)) ** p) ** (-1.0 / p)

        return reachable * saturating(sms) / saturating(self.gpu.sms)

    def sm_flops(self, clock: float) -> float:
        """FLOP/s of one SM at the best efficiency of this operator."""
        return self.gpu.peak_flops * self.terms.efficiency * clock / self.gpu.sms

    def tensor_flops(self, dtype_bytes: int, clock: float) -> float:
        """`sm_flops` of products of that type."""
        fast = self.gpu.fp8_tflops if dtype_bytes == 1 else None
        return self.sm_flops(clock) * (fast / self.gpu.bf16_tflops if fast else 1.0)

    def _both(self, compute: Floats, memory: Floats) -> Floats:
        p = self.terms.overlap_p
        low, high = np.minimum(compute, memory), np.maximum(compute, memory)
        return np.asarray(high * (1.0 + (low / high) ** p) ** (1.0 / p))

    def _gemm(self, shape: Gemm, sms: int, clock: float) -> tuple[Floats, Floats]:
        moved = hbm_bytes(shape)
        best = np.full(np.shape(moved), np.inf)
        active = np.zeros(np.shape(moved))
        for tile_m, tile_n, relative in GEMM_TILES:
            columns = ceil_div(shape.n, tile_n)
            for split in GEMM_SPLITS:
                units = ceil_div(np.asarray(shape.m), tile_m) * columns * split
                wave = ceil_div(units, sms)
                rate = self.tensor_flops(shape.dtype_bytes, clock) * relative
                tile = 2.0 * tile_m * tile_n * shape.k / split / rate
                compute = wave * (tile + self.terms.wave_s)
                # partial sums of a split go out and back in 32 bit
                partial = 8.0 * split * shape.m * shape.n if split > 1 else 0.0
                memory = (moved + partial) / self.bandwidth(np.minimum(sms, columns * split), clock)
                seconds = self._both(compute, memory)
                better = seconds < best
                best = np.where(better, seconds, best)
                active = np.where(better, units / (wave * sms), active)
        return best, active

    def _experts(self, shape: Experts, sms: int, clock: float) -> tuple[Floats, Floats]:
        tile_m, tile_n = GROUPED_TILE
        units = row_tiles(shape, tile_m) * ceil_div(shape.n, tile_n)
        tile = 2.0 * tile_m * tile_n * shape.k / self.tensor_flops(shape.dtype_bytes, clock)
        turns = np.maximum(units / sms, 1.0)
        busy = np.minimum(units / sms, 1.0)
        memory = hbm_bytes(shape) / self.bandwidth(np.minimum(sms, units), clock)
        return self._both(turns * (tile + self.terms.wave_s), memory), busy

    def _prefill(self, shape: PrefillAttention, sms: int, clock: float) -> tuple[Floats, Floats]:
        q, h = np.asarray(shape.q), np.asarray(shape.h)
        group = shape.q_heads // shape.kv_heads
        units = ceil_div(q * group, ROW_TILE) * shape.kv_heads
        mean_keys = causal_pairs(q, h, shape.window) / np.maximum(q, 1)
        last_keys = np.minimum(q + h, shape.window) if shape.window else q + h
        # an SM computes whole tiles: half a tile of keys past the diagonal on average
        row_s = 4.0 * shape.head_dim / self.sm_flops(clock) * ROW_TILE
        total = units * (mean_keys + KEY_TILE / 2) * row_s
        longest = (last_keys + KEY_TILE / 2) * row_s
        whole = np.maximum(total / sms, longest) + np.where(units > sms, self.terms.tail * longest, 0.0)
        splits = np.maximum(sms // np.maximum(units, 1), 1)
        makespan = np.minimum(whole, longest / splits + np.where(splits > 1, self.terms.split_s, 0.0))
        makespan = np.where(units > sms, whole, makespan)
        makespan = makespan + ceil_div(units, sms) * self.terms.wave_s
        memory = hbm_bytes(shape) / self.bandwidth(sms, clock)
        return self._both(makespan, memory), total / (sms * makespan)

    def _decode(self, shape: DecodeAttention, sms: int, clock: float) -> tuple[Floats, Floats]:
        units = np.asarray(shape.batch) * shape.kv_heads
        moved = hbm_bytes(shape)
        rows = max(DECODE_ROWS, shape.q_heads // shape.kv_heads)
        work = 4.0 * rows * shape.kv_heads * shape.head_dim * decode_keys(shape)
        best = np.full(np.shape(moved), np.inf)
        active = np.zeros(np.shape(moved))
        for split in DECODE_SPLITS:
            ctas = units * split
            busy = np.minimum(ctas, sms)
            streams = self._both(work / (busy * self.sm_flops(clock)), moved / self.bandwidth(busy, clock))
            wave = ceil_div(ctas, sms)
            combine = self.terms.split_s * (1.0 + 0.1 * split) if split > 1 else 0.0
            seconds = streams + (wave - 1) * self.terms.wave_s + combine
            better = seconds < best
            best = np.where(better, seconds, best)
            active = np.where(better, ctas / (wave * sms), active)
        return best, active

    def _elementwise(self, shape: Elementwise, sms: int, clock: float) -> tuple[Floats, Floats]:
        rows = np.asarray(shape.rows)
        return hbm_bytes(shape) / self.bandwidth(sms, clock), np.minimum(rows, sms) / sms


def roofline(terms: Mapping[str, Any], where: str) -> Roofline:
    """`Roofline` of a mapping read from a file; `where` is named in errors."""
    from dataclasses import fields

    from sim.suggest import nearest

    known = {field.name for field in fields(Roofline)}
    for key in terms:
        if key not in known:
            raise SimctlError(f"{where}: unknown key '{key}'.{nearest(key, known)}")
    try:
        return Roofline(**{key: float(value) for key, value in terms.items()})
    except (TypeError, ValueError, SimctlError) as error:
        raise SimctlError(f"{where}: {error}") from error

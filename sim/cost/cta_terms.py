"""What the CTA-level model knows of a GPU and of attention kernels' tiles, all of it from kernels that run alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from sim.cost.cta_schedule import Machine
from sim.cost.gpu import GpuSpec
from sim.cost.profile import spec_terms
from sim.cost.spec import RooflineCurve, roofline
from sim.errors import SimctlError

REGISTERS = 65536  # of an SM
REGISTERS_PER_THREAD = 255  # FlashAttention's kernels take all that a thread can have
RESERVED_BYTES = 1024  # shared memory that the system keeps of each CTA


@dataclass(frozen=True)
class Tile:
    """A CTA's tile of the score matrix: query rows x keys, and its warps. `speed`: arithmetic rate of an SM full of
    such CTAs against one full of `LARGE` ones; of `rows`, padding included."""

    name: str
    rows: int
    keys: int
    warps: int
    speed: float

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of the query, key and value tiles, 16 bit."""
        return (self.rows + 2 * self.keys) * head_dim * 2


# Speeds from serial measurements. SPLIT: 178 TFLOP/s of an A100 at long prompts (aiconfigurator-core 0.12.0, vLLM's
# FlashAttention 2 on paged KV, which is the 64 x 128 kernel) against 203 (65 %) of the 128 x 64 one.
# Others: as GEMM tiles of the same sizes do against each other (`sim.cost.spec.GEMM_TILES`): mean of the score tile
# (rows x keys) and the output tile (rows x head dim), one-warp and 16-row ones as the output tile.
LARGE = Tile("128x64", 128, 64, 4, 1.0)
SPLIT = Tile("64x128", 64, 128, 4, 0.88)
SMALL = Tile("64x32", 64, 32, 2, 0.83)
ONE_WARP = Tile("16x32", 16, 32, 1, 0.37)
FLASHINFER_DECODE = Tile("16x128", 16, 128, 4, 0.37)  # four warps, each with its own 32 keys
FLASHINFER_SMALL = Tile("64x64", 64, 64, 4, 0.88)


@dataclass(frozen=True, eq=False)  # one object a GPU, the key of caches
class CtaTerms:
    """Terms of one GPU, section `cta` of spec.yaml.

    `efficiency`: share of the peak FLOP/s that `LARGE` tiles reach; `alone`: share of an SM's rate that one CTA of four
    warps reaches by itself; `stage_s`: time in which a key or value tile of one warp comes from HBM; `serial`: `fa2` or
    `fa3`, the kernels of separate attention, the latter with `fa3_efficiency`; `launch_s`, `merge_s`: a kernel's
    fixed time, and that of merging splits.
    """

    gpu: GpuSpec
    machine: Machine
    serial: str
    efficiency: float
    fa3_efficiency: float
    alone: float
    stage_s: float
    launch_s: float
    merge_s: float

    @property
    def sms(self) -> int:
        """SMs of the GPU."""
        return self.gpu.sms

    @property
    def fa3_tile(self) -> Tile:
        """FlashAttention 3's CTA, which has an SM to itself."""
        return Tile("128x128 fa3", 128, 128, 12, self.fa3_efficiency / self.efficiency)

    def rate(self, tile: Tile) -> float:
        """FLOP/s of an SM full of CTAs of that tile."""
        return self.gpu.peak_flops / self.gpu.sms * self.efficiency * tile.speed

    def alone_rate(self, tile: Tile) -> float:
        """FLOP/s of one CTA that has an SM to itself."""
        if tile.warps > 4:
            return self.rate(tile)
        return self.rate(tile) * self.alone * tile.warps / 4.0

    def key_s(self, tile: Tile, head_dim: int) -> float:
        """Seconds that one decode CTA takes for a key at the least: its arithmetic, or the loads of its key and value
        tiles, each of which hides behind half of it. A warp has its own rows, those of a 16-row tile their own keys;
        its rate is that of the warps of `SPLIT`."""
        by_keys = tile.rows == 16
        warp_rows = 16 if by_keys else tile.rows / tile.warps
        warp_keys = tile.keys / tile.warps if by_keys else tile.keys
        arithmetic = 4.0 * head_dim * warp_rows * warp_keys / (self.alone_rate(SPLIT) / 4.0)
        return max(arithmetic, 2.0 * self.stage_s) / tile.keys

    def ctas_per_sm(self, smem_bytes: int, warps: int) -> int:
        """CTAs that fit on an SM by shared memory, registers and threads; 0 if not even one does."""
        by_smem = self.gpu.smem_per_sm_bytes // (smem_bytes + RESERVED_BYTES)
        by_registers = REGISTERS // (REGISTERS_PER_THREAD * 32 * warps)
        return min(by_smem, by_registers, self.gpu.threads_per_sm // (32 * warps))


@lru_cache(maxsize=16)
def cta_terms(gpu: GpuSpec) -> CtaTerms:
    """The terms of a GPU; SimctlError for a bad section of spec.yaml."""
    sections = spec_terms(gpu)
    terms: dict[str, Any] = dict(sections["cta"])
    curve = RooflineCurve(gpu, roofline(sections["decode_attention"], "spec.yaml, decode_attention"), "")
    known = {field.name for field in fields(CtaTerms)} - {"gpu", "machine"}
    if set(terms) != known:
        raise SimctlError(f"spec.yaml, cta of {gpu.name}: keys must be {', '.join(sorted(known))}.")
    machine = Machine(
        sms=gpu.sms,
        bandwidth=gpu.hbm_bytes_per_s * curve.terms.bandwidth_efficiency,
        sm_bandwidth=curve.terms.sm_bytes_per_clock * gpu.boost_mhz * 1e6,
        bandwidth_p=curve.terms.bandwidth_p,
        overlap_p=curve.terms.overlap_p,
    )
    return CtaTerms(gpu=gpu, machine=machine, **terms)

"""What POD-Attention and Sarathi-Serve published of attention kernels and chunks, against the model.

Inputs are serial: nothing here was fitted to a fused kernel. POD = arXiv:2410.18038, with the grids of its artefact
(microsoft/vattention pod_attn/tests); Sarathi = arXiv:2403.02310. One A100-80GB; head counts are those of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import MixedShape
from sim.cost.cta_terms import CtaTerms, cta_terms
from sim.cost.fused_modes import fused_run, serial_s
from sim.cost.gpu import load_gpu
from sim.cost.shapes import Launch

GPU = "a100-80gb-sxm"
GIB = 1 << 30
LAYERS = 32
# (query heads, KV heads, GiB of weights) of a GPU: Llama-3-8B at TP 1, 2, 4, 8; Yi-6B at TP 1, 2, 4 (attn_sweep.py)
SWEEP = ((32, 8, 16), (16, 4, 8), (8, 2, 4), (4, 1, 2), (32, 4, 12), (16, 2, 6), (8, 1, 3))
LEAST_SHARE = 0.2  # of the serial time, for either side of a batch that is counted


@dataclass(frozen=True)
class Check:
    """One published figure: `published` in words, the band `low`..`high` that counts as reproduced, and `ours`."""

    name: str
    source: str
    published: str
    low: float
    high: float
    ours: float

    @property
    def holds(self) -> bool:
        """Is ours within the band?"""
        return self.low <= self.ours <= self.high


def sweep_shapes() -> Iterator[MixedShape]:
    """The hybrid batches of figure 11: every chunk of a prompt beside decodes that fill the memory."""
    for q_heads, kv_heads, weights in SWEEP:
        room = 0.9 * (80 - weights) * GIB
        for chunk in (512, 1024, 2048):
            for context in (4096, 8192, 12288, 16384, 20480):
                most = int(room // (kv_heads * 128 * 4 * LAYERS * context))
                for history in range(0, context - chunk + 1, chunk):
                    for batch in (int(most * 0.9), int(most * 0.95), most):
                        yield MixedShape(chunk, history, batch, context, q_heads, kv_heads)


def best_pod_s(terms: CtaTerms, shape: MixedShape, tickets: str = "proportional") -> float:
    """Seconds of the faster of 2 and 4 CTAs an SM, as the paper's sweeps take it."""
    modes = (AttentionMode("pod", "artefact", tickets, ctas_per_sm=ctas) for ctas in (2, 4))
    return min(fused_run(terms, mode, shape).seconds for mode in modes)


@dataclass(frozen=True)
class Sweep:
    """Speed-ups over separate kernels of the counted batches of figure 11, and the share of overlap's limit."""

    speedup: np.ndarray
    of_ideal: np.ndarray


def run_sweep(terms: CtaTerms) -> Sweep:
    """POD over all batches of figure 11 in which both sides matter; ideal: the longer of both sides."""
    speedup, ideal = [], []
    for shape in sweep_shapes():
        sides = serial_s(terms, shape)
        if min(sides) >= LEAST_SHARE * sum(sides):
            fused = best_pod_s(terms, shape)
            speedup.append(sum(sides) / fused)
            ideal.append(max(sides) / fused)
    return Sweep(np.array(speedup), np.array(ideal))


def mode_speedups(terms: CtaTerms, mode: str) -> np.ndarray:
    """Speed-ups of another mode over a third of the batches (those that fill the memory)."""
    found = []
    for shape in islice(sweep_shapes(), 2, None, 3):
        sides = serial_s(terms, shape)
        if min(sides) >= LEAST_SHARE * sum(sides):
            found.append(sum(sides) / fused_run(terms, AttentionMode(mode), shape).seconds)
    return np.array(found)


def sweep_checks(terms: CtaTerms) -> list[Check]:
    """P1 and P2: the distribution of speed-ups, and how many come near the limit; other modes beside it."""
    found, source = run_sweep(terms), "POD 5.1, figure 11"
    hfuse, streams = mode_speedups(terms, "hfuse"), mode_speedups(terms, "streams")
    batched = mode_speedups(terms, "batched")
    near = float(np.mean(found.of_ideal > 1 / 1.1))
    return [
        Check("P1-mean", source, "mean 1.28", 1.23, 1.33, float(found.speedup.mean())),
        Check("P1-max", source, "max 1.59", 1.5, 1.7, float(found.speedup.max())),
        Check("P1-min", source, "never slower", 0.99, np.inf, float(found.speedup.min())),
        Check("P2", source, "25 % within 10 % of the ideal", 0.15, 0.35, near),
        Check("hfuse-median", "POD 5.1", "median 1.11", 1.01, 1.21, float(np.median(hfuse))),
        Check("hfuse-min", "POD 5.1", "worst 0.87", 0.77, 0.97, float(hfuse.min())),
        Check("streams-max", "POD 5.1", "up to 1.20", 1.05, 1.30, float(streams.max())),
        Check("batched-min", "POD 3.2", "down to 0.60", 0.50, 0.75, float(batched.min())),
    ]


def split_checks(terms: CtaTerms) -> list[Check]:
    """P3 and P4: table 8, chunks 28 to 31 of a 16K prompt beside 64 decodes, heads of Llama-3-8B at TP 2."""
    published = {28: (1.93, 1.45), 29: (1.96, 1.45), 30: (1.98, 1.45), 31: (1.99, 1.46)}
    checks, better = [], []
    for chunk, (serial_ms, limited_ms) in published.items():
        shape = MixedShape(512, 512 * chunk, 64, 16384, 16, 4)
        serial = sum(serial_s(terms, shape))
        limited, vanilla = (
            fused_run(terms, AttentionMode("pod", "artefact", split=split), shape).seconds
            for split in ("limited", "vanilla")
        )
        better.append(1 - limited / vanilla)
        row, words = f"table 8, chunk {chunk}", f"{limited_ms / serial_ms:.2f} of serial"
        checks += [
            Check(
                f"P3-serial-{chunk}", f"POD {row}", f"{serial_ms} ms", 0.85, 1.15, 1e3 * serial / serial_ms
            ),
            Check(f"P3-ratio-{chunk}", f"POD {row}", words, 0.68, 0.80, limited / serial),
        ]
    mean = float(np.mean(better))
    return [*checks, Check("P4", "POD table 8", "limited 0.75, vanilla 0.87 of serial", 0.08, 0.16, mean)]


def wave_checks(terms: CtaTerms) -> list[Check]:
    """P5: one decode past whole waves, Yi-6B at 16K (figure 6)."""
    full, past = (serial_s(terms, MixedShape(512, 512 * 31, batch, 16384, 32, 4)) for batch in (54, 55))
    return [
        Check("P5-decode", "POD 3.2, figure 6", "decode +25 % and more", 0.15, np.inf, past[1] / full[1] - 1),
        Check("P5-total", "POD 3.2, figure 6", "total up to +17 %", 0.08, 0.26, sum(past) / sum(full) - 1),
    ]


def cta_checks(terms: CtaTerms) -> list[Check]:
    """P6: 2 or 4 CTAs an SM, Llama-3-8B, the whole prompt beside decodes (figure 13; nothing was said of 2K)."""
    right, worst, best = 0, 0.0, 0.0
    for context in (1024, 4096, 8192, 16384):
        for batch in (8, 16, 32, 64, 128):
            shape = MixedShape(context, 0, batch, context, 32, 8)
            two, four = (
                fused_run(terms, AttentionMode("pod", "artefact", ctas_per_sm=ctas), shape).seconds
                for ctas in (2, 4)
            )
            right += (four < two) == (context == 1024)
            if context == 1024:
                best = max(best, two / four - 1)
            if context == 16384:
                worst = max(worst, four / two - 1)
    source = "POD 4.2.2, figure 13"
    return [
        Check("P6-signs", source, "4 CTAs win at 1K, 2 from 4K on", 16, 20, right),
        Check("P6-1K", source, "4 CTAs up to 14 % better", 0.04, 0.20, best),
        Check("P6-16K", source, "4 CTAs 13 to 17 % worse", 0.08, 0.25, worst),
    ]


def ticket_checks(terms: CtaTerms) -> list[Check]:
    """P7: proportional against 50:50 tickets, an 8K prompt beside decodes of 8K (figure 14)."""
    gaps = []
    for kv_heads in (8, 4):
        shapes = [MixedShape(8192, 0, batch, 8192, 32, kv_heads) for batch in (32, 64, 96, 128, 192)]
        gaps.append([best_pod_s(terms, one, "50:50") / best_pod_s(terms, one) - 1 for one in shapes])
    rises = sum(b >= a for row in gaps for a, b in pairwise(row))
    source = "POD 4.2.1, figure 14"
    return [
        Check("P7-max", source, "up to 14 % better", 0.08, 0.20, max(max(row) for row in gaps)),
        Check("P7-grows", source, "the gap grows with the batch (8 steps)", 6, 8, rises),
    ]


def chunk_checks() -> list[Check]:
    """S4 and S5: what cutting a prompt into chunks costs, and one token past a row of tiles."""
    from sim.cost import load_cost

    cost = load_cost("yi-34b", GPU, "spec", parallel={"tp": 2})

    def seconds(q: int, h: int) -> float:
        return cost.solo(Launch(((q, h),))).gpu_s

    prompt = 4096
    whole = seconds(prompt, 0)
    over = {c: sum(seconds(c, h) for h in range(0, prompt, c)) / whole - 1 for c in (512, 2048)}
    edge = seconds(257, 0) / seconds(256, 0) - 1
    return [
        Check("S4-512", "Sarathi 5.4.1, figure 14", "at most 25 %", 0.10, 0.30, over[512]),
        Check("S4-2048", "Sarathi 5.4.1, figure 14", "next to nothing", -0.01, 0.04, over[2048]),
        Check("S5", "Sarathi 4.3", "+32 % from 256 to 257 tokens", 0.15, 0.40, edge),
    ]


def all_checks() -> list[Check]:
    """Every check, in order; a second or two."""
    terms = cta_terms(load_gpu(GPU))
    groups = (sweep_checks, split_checks, wave_checks, cta_checks, ticket_checks)
    return [*(check for group in groups for check in group(terms)), *chunk_checks()]

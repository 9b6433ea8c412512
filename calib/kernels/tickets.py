"""Synthetic CTAs that compute or stream, in one grid, by each rule that says which CTA does what (`csrc/tickets.cu`).

A mix is run with its jobs in their places counted: whatever the rule and the number of SMs, each job runs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calib.measure import Sample
from sim.errors import CalibrationError

if TYPE_CHECKING:
    from calib.lab import GpuLab

# how `tickets` numbers its rules; the other two are kernels of their own
TICKETED = {"proportional": 0, "half": 1, "cta_parallel": 2}
RULES = (*TICKETED, "intra_thread", "horizontal")
ALONE = ("compute_alone", "bandwidth_alone")
THREADS = 128
LOOP_BYTES = 8 * 16 * THREADS  # that a loop of a bandwidth job reads
LOOP_FLOPS = 2 * 4 * 64 * THREADS  # of a loop of a compute job
RESERVED_BYTES = 1024  # of shared memory that the system keeps for each CTA
REPEATS = 9
SHIFT_BYTES = 4 << 20  # between repeats; more than a job reads, less than lies between two jobs
WATCHED = 0x7FFFFFF1  # no thread's sum: a quiet NaN's bits
KIND, JOB, SM, START, END = range(5)  # columns of a CTA's log, times in ns


@dataclass(frozen=True)
class Mix:
    """`computes` jobs of `compute_work` loops and `bandwidths` jobs of `bandwidth_work` loops, work spread
    lognormally by `spread`, `ctas_per_sm` at a time on an SM, dealt out by `rule`."""

    rule: str
    computes: int
    bandwidths: int
    compute_work: int
    bandwidth_work: int
    ctas_per_sm: int = 2
    spread: float = 0.0
    seed: int = 0

    def columns(self) -> dict[str, Any]:
        return {
            "kind": "tickets",
            "label": self.rule,
            "compute_ctas": self.computes,
            "bandwidth_ctas": self.bandwidths,
            "compute_work": self.compute_work,
            "bandwidth_work": self.bandwidth_work,
            "spread": self.spread,
            "ctas_per_sm": self.ctas_per_sm,
        }

    def loops(self) -> tuple[list[int], list[int]]:
        """Loops of every compute and every bandwidth job."""
        return (
            works(self.seed, self.computes, self.compute_work, self.spread),
            works(self.seed + 1, self.bandwidths, self.bandwidth_work, self.spread),
        )

    @property
    def bytes(self) -> float:
        return float(sum(self.loops()[1]) * LOOP_BYTES)

    @property
    def flops(self) -> float:
        return float(sum(self.loops()[0]) * LOOP_FLOPS)


@dataclass(frozen=True)
class Ran:
    """Times of a mix: launch to end by events, first start to last end by the GPU's clock; the last run's log."""

    sample: Sample
    span_s: float
    log: Any


def works(seed: int, count: int, work: int, spread: float) -> list[int]:
    """Loops of `count` jobs: `work` each, or lognormal around it with sigma `spread`; at least one."""
    if not spread:
        return [work] * count
    drawn = work * np.exp(spread * np.random.default_rng(seed).standard_normal(count))
    return [max(1, int(value)) for value in drawn]


def run_mix(lab: GpuLab, mix: Mix, sms: int) -> Ran:
    """Run `mix` on a partition of `sms` SMs. Raises CalibrationError if a job did not run exactly once."""
    import cupy

    from calib import cuda

    stream = lab.partition(sms).stream()
    computes, bandwidths = mix.loops()
    with cuda.on_stream(stream.cuda_stream):
        held = [cupy.asarray(np.array(loops or [0], np.int32)) for loops in (computes, bandwidths)]
        jobs = len(computes) + len(bandwidths)
        rows, done = cupy.zeros((jobs, 5), np.int64), cupy.zeros(jobs, np.uint32)
        counters, sink = cupy.zeros(lab.probe.nsmid() + 2, np.uint32), cupy.zeros(2, np.uint32)
        launch = _launcher(lab, mix, (held, rows, done, counters, sink), (len(computes), len(bandwidths)))
        spans, times = [], []
        start, end = lab.events(2)
        for repeat in range(REPEATS):
            counters.fill(0)
            done.fill(0)
            start.record(stream)
            launch(repeat)
            end.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
            log = cupy.asnumpy(rows)
            log = log[log[:, END] > 0]
            spans.append(float(log[:, END].max() - log[:, START].min()) / 1e9)
            counts = cupy.asnumpy(done)
            if not (counts == 1).all():
                raise CalibrationError(f"{mix}: {int((counts != 1).sum())} jobs did not run exactly once.")
        reading = lab.meter.read()
    return Ran(Sample(times[1:], "eager", readings=[reading]), float(np.median(spans[1:])), log)


def _launcher(lab: GpuLab, mix: Mix, buffers: tuple[Any, ...], counts: tuple[int, int]) -> Any:
    """A function of the repeat that launches the mix's kernel on CuPy's current stream."""
    from calib import cuda

    held, rows, done, counters, sink = buffers
    ticketed = mix.rule not in ("intra_thread", "horizontal")
    entry = cuda.function("tickets", "tickets" if ticketed else mix.rule)
    double = mix.rule == "horizontal"  # such a CTA holds the threads and the memory of two
    resident = max(1, mix.ctas_per_sm // 2) if double else mix.ctas_per_sm
    room = lab.facts.smem_per_sm_bytes
    shared = min(room // resident - RESERVED_BYTES - 64, room - 2 * RESERVED_BYTES)
    entry.max_dynamic_shared_size_bytes = shared
    grid = sum(counts) if ticketed else max(counts)
    base, size = lab.arena.kv.data_ptr(), lab.arena.kv.numel()  # half of the cache in bytes
    nsmid = np.uint32(len(counters) - 2)

    def launch(repeat: int) -> None:
        # another stretch of memory at each repeat, so that none finds the last one's in L2
        offset = repeat * SHIFT_BYTES
        arguments: list[Any] = [
            *(held[0], np.int32(counts[0]), held[1], np.int32(counts[1])),
            *(np.uint64(base + offset), np.uint64((size - offset) // 16), np.uint32(WATCHED), sink),
            *(np.float32(0.999), rows, done),
        ]
        if ticketed:
            rule = TICKETED.get(mix.rule, TICKETED["proportional"])
            arguments += [np.int32(rule), counters, nsmid]
        entry((grid,), (THREADS * (2 if double else 1),), tuple(arguments), shared_mem=shared)

    return launch

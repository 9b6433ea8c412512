"""A bench without a GPU: analytic times with seeded noise on a simulated clock, for tests and dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calib.analytic import expected_s, peaks
from calib.bench import Pair, Side, Stagger
from calib.corun import MODES
from calib.device import DeviceFacts, Reading
from calib.energy import REST_S, Drawn, Phased, Turn
from calib.kernels.base import Kernel
from calib.kernels.tickets import Mix, Ran
from calib.measure import Protocol, Sample
from calib.models import ModelShape
from calib.partition import NORMAL, LeakError, legal_sizes
from sim.errors import CalibrationError

FACTS = DeviceFacts(
    name="Fake H200",
    sms=132,
    capability=(9, 0),
    memory_bytes=141 << 30,
    l2_bytes=60 << 20,
    smem_per_sm_bytes=228 << 10,
    max_sm_mhz=1980,
    power_limit_w=700.0,
    driver="fake",
    cuda="fake",
)
NOISE = 0.01
SET_UP_S = 0.01  # preparing and capturing a point


class FakeLab:
    """The surface of `calib.lab.GpuLab`; `clock()` advances by what each measurement would take."""

    def __init__(self, model: ModelShape, protocol: Protocol, seed: int, leaks: bool = False) -> None:
        if leaks:
            raise LeakError("Partition a64 promised 64 SMs, but its kernels ran on 132.")
        self.facts, self.model, self.protocol = FACTS, model, protocol
        self._noise = np.random.default_rng(seed)
        self._now = 0.0
        self._power = 100.0
        self.broken = False

    def clock(self) -> float:
        return self._now

    def sizes(self) -> list[int]:
        splits = legal_sizes(self.facts.sms, 8, 8)
        return sorted({*splits, *(self.facts.sms - size for size in splits), self.facts.sms})

    def splits(self) -> list[int]:
        return legal_sizes(self.facts.sms, 8, 8)

    def proofs(self) -> list[dict[str, Any]]:
        return [
            {"partition": f"{size}/{self.facts.sms - size}", "sms": size, "shared": 0}
            for size in self.splits()
        ]

    def description(self) -> dict[str, Any]:
        return {"mechanism": "fake", "minimum_sms": 8, "alignment_sms": 8}

    def healthy(self) -> bool:
        return not self.broken

    def _reading(self, kernel: Kernel, busy_s: float) -> Reading:
        # power follows the load with a time constant of a second; the clock falls at the limit
        compute = kernel.flops / peaks(self.facts.name)[0] / max(expected_s(kernel, self.facts, 132), 1e-9)
        target = 250.0 + 500.0 * min(1.0, compute)
        self._power += (target - self._power) * (1.0 - np.exp(-busy_s))
        throttled = self._power > self.facts.power_limit_w
        return Reading(1600.0 if throttled else 1980.0, float(self._power), bool(throttled))

    def _sample(self, kernel: Kernel, sms: int, slow: float, launch: str, count: int) -> Sample:
        base = expected_s(kernel, self.facts, sms) * slow
        host = 8e-6 * kernel.launches
        once = max(base, host) if launch == "eager" else base
        times = once * np.exp(NOISE * self._noise.standard_normal(count))
        self._now += SET_UP_S + float(times.sum())
        reading = self._reading(kernel, float(times.sum()))
        return Sample([float(t) for t in times], launch, host if launch == "eager" else None, [reading])

    def time(self, kernel: Kernel, sms: int, launch: str = "graph", priority: str = NORMAL) -> Sample:
        if sms not in self.sizes():
            raise CalibrationError(f"No partition has {sms} SMs; the sizes are {self.sizes()}.")
        count = self.protocol.samples(expected_s(kernel, self.facts, sms))
        return self._sample(kernel, sms, 1.0, launch, count)

    def error(self, kernel: Kernel) -> float:
        return 2e-3

    def replayed_error(self, kernel: Kernel) -> float:
        return self.error(kernel)

    def pair(self, a: Side, b: Side, mode: str) -> Pair:
        if mode not in MODES:
            raise CalibrationError(f"Co-run mode '{mode}' is not one of {', '.join(MODES)}.")
        total = self.facts.sms
        shared = total if mode == "streams" else max(0, a.sms + b.sms - total)
        slow = 1.05 + shared / total
        alone = [self._sample(side.kernel, side.sms, 1.0, "graph", 5) for side in (a, b)]
        beside = [self._sample(side.kernel, side.sms, slow, "graph", 8) for side in (a, b)]
        return Pair(*beside, *alone, shared)

    def stagger(self, a: Side, b: Side, mode: str, delay_s: float, share: float) -> Stagger:
        alone = self._sample(a.kernel, a.sms, 1.0, "graph", 5)
        slow = 1.0 + 0.05 * share
        sample = self._sample(a.kernel, a.sms, slow, "graph", 3)
        return Stagger(sample, alone, delay_s, delay_s + share * alone.median_s, 1)

    def sustained(self, kernel: Kernel, sms: int, launch: str, seconds: float) -> list[tuple[float, Sample]]:
        start, samples = self._now, []
        while (elapsed := self._now - start) < seconds:
            count = max(2, int(0.25 / expected_s(kernel, self.facts, sms)))
            sample = self._sample(kernel, sms, 1.0, launch, count)
            samples.append((elapsed, sample))
        return samples

    def draw(self, sides: Sequence[Side], mode: str, seconds: float, rest_s: float = REST_S) -> Drawn:
        slow = 1.0 if len(sides) == 1 else 1.2
        cold = [self._sample(side.kernel, side.sms, 1.0, "graph", 5) for side in sides]
        hot = [self._sample(side.kernel, side.sms, 1.1 * slow, "graph", 50) for side in sides]
        self._now += seconds
        return Drawn(cold, hot, self._power, hot[0].readings, {"sm_active": 0.9}, seconds)

    def paced(self, side: Side, gap_s: float, seconds: float) -> Drawn:
        drawn = self.draw((side,), "", seconds, 0.0)
        drawn.gap_s = gap_s + 2e-5
        return drawn

    def phases(self, sides: Sequence[Side], order: Sequence[tuple[int, float]]) -> Phased:
        turns, readings, now = [], [], 0.0
        for phase, (which, seconds) in enumerate(order):
            sample = self._sample(sides[which].kernel, sides[which].sms, 1.0, "graph", 5)
            for time_s in (seconds / 10,) * 10:
                turns.append(Turn(phase, which, now, now + time_s, max(1, int(time_s / sample.median_s))))
                readings.append((now, sample.readings[0]))
                now += time_s
        self._now += now
        return Phased(turns, readings)

    def mix(self, mix: Mix, sms: int) -> Ran:
        slots = sms * mix.ctas_per_sm
        work = sum(mix.loops()[0]) * 0.15e-6 + sum(mix.loops()[1]) * 0.5e-6
        span = work / slots + 2e-6
        times = [span + 2e-6 * float(self._noise.random()) for _ in range(8)]
        self._now += SET_UP_S + sum(times)
        return Ran(Sample(times, "eager"), span, None)

    def host_costs(self, label: str, batch: int) -> tuple[dict[str, Any], Sample]:
        times = 2e-5 * (1 + 0.01 * batch) * np.exp(0.1 * self._noise.standard_normal(30))
        self._now += SET_UP_S + float(times.sum())
        return {"kind": "host", "label": label, "decode_batch": batch}, Sample(
            [float(t) for t in times], "host"
        )

    def launched(self, kernels: list[Kernel]) -> list[list[dict[str, Any]]]:
        self._now += 1e-3 * len(kernels)
        return [
            [{"kernel": f"fake_{k.kind}", "grid": "1x1x1", "block": "128x1x1", "smem_bytes": 0}]
            for k in kernels
        ]

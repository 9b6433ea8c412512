"""Watts and clocks of sustained work: NVML's energy counter read from the side while the GPU is kept busy."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from calib.bench import Side
from calib.device import Meter, Reading
from calib.measure import Sample, overlapped

if TYPE_CHECKING:
    from calib.lab import GpuLab

EVERY_S = 0.02
SETTLE_SHARE = 0.4  # of a run that is left out: clocks and the counter lag
REST_S = 0.4  # before the cold time, so that the clock is at its top


@dataclass
class Drawn:
    """What a run drew once settled: `cold` and `hot` times of each side, board watts by the energy counter, clocks,
    and shares of performance counters where permitted."""

    cold: list[Sample]
    hot: list[Sample]
    power_w: float | None
    readings: list[Reading] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Watch(threading.Thread):
    """Reads the energy counter, power, clock and, at both ends of the settled part, the performance counters."""

    def __init__(self, meter: Meter, seconds: float) -> None:
        super().__init__(daemon=True)
        self._meter, self._seconds, self._ended = meter, seconds, threading.Event()
        self.seen: list[tuple[float, float, Reading]] = []
        self.samples: list[Any] = [None, None]

    def run(self) -> None:
        start = time.perf_counter()
        while not self._ended.is_set():
            elapsed = time.perf_counter() - start
            self.seen.append((elapsed, self._meter.energy_j(), self._meter.read()))
            if elapsed > SETTLE_SHARE * self._seconds and self.samples[0] is None:
                self.samples[0] = self._meter.gpm_sample()
            if elapsed > 0.95 * self._seconds and self.samples[1] is None:
                self.samples[1] = self._meter.gpm_sample()
            self._ended.wait(EVERY_S)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def power_w(self) -> float | None:
        """Slope of the counter over the settled part."""
        kept = [(t, e) for t, e, _ in self.seen if self._settled(t) and np.isfinite(e)]
        if len(kept) < 5:
            return None
        return float(np.polyfit([t for t, _ in kept], [e for _, e in kept], 1)[0])

    def readings(self) -> list[Reading]:
        return [reading for t, _, reading in self.seen if self._settled(t)]

    def _settled(self, elapsed: float) -> bool:
        return SETTLE_SHARE * self._seconds <= elapsed <= 0.95 * self._seconds


def alone(lab: GpuLab, side: Side, seconds: float) -> Drawn:
    """Time a kernel rested, then run it for `seconds` without a pause and see what it draws."""
    time.sleep(REST_S)
    launch = getattr(side.kernel, "launch", "graph")
    cold = lab.time(side.kernel, side.sms, launch)
    watch = Watch(lab.meter, seconds)
    watch.start()
    samples = lab.sustained(side.kernel, side.sms, launch, seconds)
    watch.stop()
    late = [t for elapsed, sample in samples if elapsed >= SETTLE_SHARE * seconds for t in sample.times_s]
    return _drawn(lab, watch, [cold], [late or samples[-1][1].times_s], seconds)


def beside(lab: GpuLab, a: Side, b: Side, mode: str, seconds: float) -> Drawn:
    """The same for two sides at a time; only fully overlapped iterations count."""
    from calib import corun

    partitions = corun.sets(lab, a, b, mode)
    sides = [
        corun.Running(lab, side, part, i)
        for i, (side, part) in enumerate(zip((a, b), partitions, strict=True))
    ]
    time.sleep(REST_S)
    cold = [side.alone() for side in sides]
    counts = [int(seconds / side.replay_s) + 2 for side in sides]
    watch = Watch(lab.meter, seconds)
    watch.start()
    boundaries, _ = corun.together(lab, sides, counts)
    watch.stop()
    kept = [overlapped(boundaries[i], boundaries[1 - i])[0] for i in (0, 1)]
    hot = [[t / side.launches for t in times] for side, times in zip(sides, kept, strict=True)]
    return _drawn(lab, watch, cold, hot, seconds)


def _drawn(lab: GpuLab, watch: Watch, cold: list[Sample], hot: list[list[float]], seconds: float) -> Drawn:
    readings = watch.readings()
    samples = [Sample(times, "graph", readings=readings) for times in hot]
    counters = lab.meter.gpm_between(*watch.samples)
    return Drawn(cold, samples, watch.power_w(), readings, counters, seconds)

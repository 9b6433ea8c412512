"""Watts and clocks of sustained work: NVML's energy counter read from the side while the GPU is kept busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from calib.bench import Side
from calib.device import Meter, Reading
from calib.measure import Sample, overlapped

if TYPE_CHECKING:
    from calib.lab import GpuLab

EVERY_S = 0.02
FAST_S = 0.001  # between readings of a run of phases: as fast as the driver answers
SETTLE_SHARE = 0.4  # of a run that is left out: clocks and the counter lag
REST_S = 0.4  # before the cold time, so that the clock is at its top
SPIN_S = 0.002  # pauses shorter than this are spun: sleeping overshoots


@dataclass
class Drawn:
    """What a run drew once settled: `cold` and `hot` times of each side, board watts by the energy counter, clocks,
    shares of performance counters where permitted, and the GPU's mean pause a launch, waiting for the host."""

    cold: list[Sample]
    hot: list[Sample]
    power_w: float | None
    readings: list[Reading] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    gap_s: float = 0.0


@dataclass
class Turn:
    """One replay of a run of phases: which phase and which kernel, start and end in seconds, launches in it."""

    phase: int
    which: int
    start_s: float
    end_s: float
    launches: int


@dataclass
class Phased:
    """Replays of several kernels in turn without a pause, and the readings beside them on the same clock."""

    turns: list[Turn]
    readings: list[tuple[float, Reading]]


class Watch(threading.Thread):
    """Reads the energy counter, power, clock and, at both ends of the settled part, the performance counters."""

    def __init__(self, meter: Meter, seconds: float, every_s: float = EVERY_S) -> None:
        super().__init__(daemon=True)
        self._meter, self._seconds, self._every_s = meter, seconds, every_s
        self._ended = threading.Event()
        self.seen: list[tuple[float, float, Reading]] = []
        self.samples: list[Any] = [None, None]
        self.started_s = time.perf_counter()

    def run(self) -> None:
        self.started_s = start = time.perf_counter()
        while not self._ended.is_set():
            elapsed = time.perf_counter() - start
            self.seen.append((elapsed, self._meter.energy_j(), self._meter.read()))
            if elapsed > SETTLE_SHARE * self._seconds and self.samples[0] is None:
                self.samples[0] = self._meter.gpm_sample()
            if elapsed > 0.95 * self._seconds and self.samples[1] is None:
                self.samples[1] = self._meter.gpm_sample()
            self._ended.wait(self._every_s)

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


def alone(lab: GpuLab, side: Side, seconds: float, rest_s: float = REST_S) -> Drawn:
    """Time a kernel rested, then run it for `seconds` without a pause and see what it draws."""
    time.sleep(rest_s)
    launch = getattr(side.kernel, "launch", "graph")
    cold = lab.time(side.kernel, side.sms, launch)
    watch = Watch(lab.meter, seconds)
    watch.start()
    samples = lab.sustained(side.kernel, side.sms, launch, seconds)
    watch.stop()
    late = [t for elapsed, sample in samples if elapsed >= SETTLE_SHARE * seconds for t in sample.times_s]
    return _drawn(lab, watch, [cold], [late or samples[-1][1].times_s], seconds)


def beside(lab: GpuLab, a: Side, b: Side, mode: str, seconds: float, rest_s: float = REST_S) -> Drawn:
    """The same for two sides at a time; only fully overlapped iterations count."""
    from calib import corun

    partitions = corun.sets(lab, a, b, mode)
    sides = [
        corun.Running(lab, side, part, i)
        for i, (side, part) in enumerate(zip((a, b), partitions, strict=True))
    ]
    time.sleep(rest_s)
    cold = [side.alone() for side in sides]
    counts = [int(seconds / side.replay_s) + 2 for side in sides]
    watch = Watch(lab.meter, seconds)
    watch.start()
    boundaries, _ = corun.together(lab, sides, counts)
    watch.stop()
    kept = [overlapped(boundaries[i], boundaries[1 - i])[0] for i in (0, 1)]
    hot = [[t / side.launches for t in times] for side, times in zip(sides, kept, strict=True)]
    return _drawn(lab, watch, cold, hot, seconds)


def paced(lab: GpuLab, side: Side, gap_s: float, seconds: float) -> Drawn:
    """A kernel that waits for the host before every launch: `gap_s` seconds and what a synchronisation takes."""
    stream = lab.partition(side.sms).stream()
    with lab.torch.cuda.stream(stream):
        lab.ready(side.kernel, side.sms, 0, padded=True)
        graph, launches, replay_s = lab.graphed(side.kernel, side.sms, 0, stream)
        cold = lab.replays(graph, stream, lab.protocol.least, launches)
        count = max(3, int(seconds / (replay_s + gap_s)))
        events = lab.events(2 * count)
        watch = Watch(lab.meter, seconds)
        watch.start()
        start = time.perf_counter()
        for first, last in zip(events[::2], events[1::2], strict=True):
            first.record(stream)
            graph.replay()
            last.record(stream)
            stream.synchronize()
            _pause(gap_s)
        elapsed = time.perf_counter() - start
        watch.stop()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
    hot = [t / launches for t in times[int(SETTLE_SHARE * count) :]]
    drawn = _drawn(lab, watch, [cold], [hot], seconds)
    drawn.gap_s = (elapsed - sum(times)) / count / launches
    return drawn


def _pause(seconds: float) -> None:
    if seconds >= SPIN_S:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def phases(lab: GpuLab, sides: Sequence[Side], order: Sequence[tuple[int, float]]) -> Phased:
    """Run kernels in turn on the whole GPU, without a pause: (which of `sides`, for how many seconds) each."""
    stream = lab.whole[0].stream()
    with lab.torch.cuda.stream(stream):
        held = []
        for slot, side in enumerate(sides):
            lab.ready(side.kernel, side.sms, slot, padded=True)
            held.append(lab.graphed(side.kernel, side.sms, slot, stream))
        lab.torch.cuda.synchronize()
        time.sleep(REST_S)
        counts = [max(1, round(seconds / held[which][2])) for which, seconds in order]
        events = lab.events(sum(counts) + 1)
        watch = Watch(lab.meter, sum(seconds for _, seconds in order), FAST_S)
        watch.start()
        events[0].record(stream)
        began_s, done = time.perf_counter(), 0
        for (which, _), count in zip(order, counts, strict=True):
            for _ in range(count):
                held[which][0].replay()
                done += 1
                events[done].record(stream)
        stream.synchronize()
        watch.stop()
    at = [events[0].elapsed_time(event) / 1e3 for event in events[: done + 1]]
    ran = [
        (phase, which)
        for phase, ((which, _), n) in enumerate(zip(order, counts, strict=True))
        for _ in range(n)
    ]
    turns = [Turn(phase, which, at[i], at[i + 1], held[which][1]) for i, (phase, which) in enumerate(ran)]
    offset = began_s - watch.started_s
    return Phased(turns, [(t - offset, reading) for t, _, reading in watch.seen])


def _drawn(lab: GpuLab, watch: Watch, cold: list[Sample], hot: list[list[float]], seconds: float) -> Drawn:
    readings = watch.readings()
    samples = [Sample(times, "graph", readings=readings) for times in hot]
    counters = lab.meter.gpm_between(*watch.samples)
    return Drawn(cold, samples, watch.power_w(), readings, counters, seconds)

"""Two kernels at a time on two sets of SMs: steady side by side, and staggered starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calib import cuda
from calib.bench import Pair, Side, Stagger
from calib.measure import Sample, overlapped
from calib.partition import Partition
from sim.errors import CalibrationError

if TYPE_CHECKING:
    from calib.lab import GpuLab

MODES = ("disjoint", "half", "whole", "streams")
ITERATIONS = 8  # of the slower side at least
LONGEST_S = 4.0
MOST_REPLAYS = 600
ENOUGH = 3  # fully overlapped iterations of each side
STAGGER_REPEATS = 3


def sets(lab: GpuLab, a: Side, b: Side, mode: str) -> tuple[Partition, Partition]:
    """The two partitions: a from the near end of the GPU, b from the far end, so that they overlap as sizes say."""
    if mode not in MODES:
        raise CalibrationError(f"Co-run mode '{mode}' is not one of {', '.join(MODES)}.")
    total = lab.facts.sms
    shared = a.sms + b.sms - total
    if mode == "streams":
        return lab.whole
    if (mode == "disjoint") != (shared <= 0) or (mode == "whole") != (b.sms == total):
        raise CalibrationError(f"{a.sms} and {b.sms} of {total} SMs are not a '{mode}' co-run.")
    return lab.partition(a.sms), lab.partition(b.sms, remainder=True)


class Running:
    """One side, captured on its stream."""

    def __init__(self, lab: GpuLab, side: Side, partition: Partition, slot: int) -> None:
        self.lab, self.slot = lab, slot
        self.stream = partition.stream(side.priority)
        with lab.torch.cuda.stream(self.stream):
            lab.ready(side.kernel, side.sms, slot, padded=True)
            self.graph, self.launches, self.replay_s = lab.graphed(side.kernel, side.sms, slot, self.stream)

    def alone(self) -> Sample:
        """A short run with the other side idle."""
        count = min(self.lab.protocol.samples(self.replay_s), 8)
        with self.lab.torch.cuda.stream(self.stream):
            for _ in range(2):
                self.graph.replay()
            sample = self.lab.replays(self.graph, self.stream, count, self.launches)
        self.replay_s = sample.median_s * self.launches
        return sample

    def replay(self) -> None:
        with self.lab.torch.cuda.stream(self.stream):
            self.graph.replay()


def pair(lab: GpuLab, a: Side, b: Side, mode: str) -> Pair:
    """Time both sides alone, then beside each other; only fully overlapped iterations count."""
    partitions = sets(lab, a, b, mode)
    sides = [
        Running(lab, side, part, i) for i, (side, part) in enumerate(zip((a, b), partitions, strict=True))
    ]
    alone = [side.alone() for side in sides]
    window = max(lab.protocol.corun_s, ITERATIONS * max(side.replay_s for side in sides))
    if window > LONGEST_S:
        raise CalibrationError(f"One iteration takes {window / ITERATIONS:.2f} s, too long for a co-run.")
    counts = [min(MOST_REPLAYS, int(window / side.replay_s) + 2) for side in sides]
    for _ in range(2):
        boundaries, reading = together(lab, sides, counts)
        kept = [overlapped(boundaries[i], boundaries[1 - i])[0] for i in (0, 1)]
        if min(map(len, kept)) >= ENOUGH:
            break
        # a side that the other starves sees too few whole iterations: let the other go on for longer
        for i in (0, 1):
            if len(kept[i]) < ENOUGH:
                counts[1 - i] = min(MOST_REPLAYS, 4 * counts[1 - i])
    samples = [
        Sample([t / side.launches for t in times], "graph", readings=[reading])
        for side, times in zip(sides, kept, strict=True)
    ]
    shared = [part.smids or frozenset(range(lab.facts.sms)) for part in partitions]
    return Pair(*samples, *alone, len(shared[0] & shared[1]))


def together(lab: GpuLab, sides: list[Running], counts: list[int]) -> tuple[list[list[float]], Any]:
    """Enqueue both sides in the order of their expected times; returns each side's iteration boundaries (s)."""
    total = counts[0] + 1
    events = [lab.events(total), lab.events(counts[1] + 1, first=total)]
    lab.torch.cuda.synchronize()
    events[0][0].record(sides[0].stream)
    sides[1].stream.wait_event(events[0][0])
    events[1][0].record(sides[1].stream)
    due, done = [0.0, 0.0], [0, 0]
    reading = None
    while done[0] < counts[0] or done[1] < counts[1]:
        open_sides = [i for i in (0, 1) if done[i] < counts[i]]
        i = min(open_sides, key=lambda side: due[side])
        sides[i].replay()
        done[i] += 1
        events[i][done[i]].record(sides[i].stream)
        due[i] += sides[i].replay_s
    reading = lab.meter.read()
    lab.torch.cuda.synchronize()
    base = events[0][0]
    return [[base.elapsed_time(event) / 1e3 for event in side] for side in events], reading


def stagger(lab: GpuLab, a: Side, b: Side, mode: str, delay_s: float, share: float) -> Stagger:
    """Side a once, beside a burst of side b that starts `delay_s` later; the median of three repeats."""
    partitions = sets(lab, a, b, mode)
    sides = [
        Running(lab, side, part, i) for i, (side, part) in enumerate(zip((a, b), partitions, strict=True))
    ]
    alone = sides[0].alone()
    sides[1].alone()
    count = max(1, int(share * sides[0].replay_s / sides[1].replay_s))
    clock = (lab.meter.read().sm_mhz or 1700.0) * 1e6
    times, spans = [], []
    for _ in range(STAGGER_REPEATS):
        start, end, first, last = lab.events(4)
        lab.torch.cuda.synchronize()
        start.record(sides[0].stream)
        sides[1].stream.wait_event(start)
        sides[0].replay()
        end.record(sides[0].stream)
        cuda.hold(sides[1].stream.cuda_stream, int(delay_s * clock))
        first.record(sides[1].stream)
        for _ in range(count):
            sides[1].replay()
        last.record(sides[1].stream)
        reading = lab.meter.read()
        lab.torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / sides[0].launches)
        spans.append((start.elapsed_time(first) / 1e3, start.elapsed_time(last) / 1e3))
    span = sorted(spans)[len(spans) // 2]
    return Stagger(Sample(times, "graph", readings=[reading]), alone, span[0], span[1], count)

"""How work of several GPUs is timed: every sample starts behind a barrier on the devices, and counts are agreed.

A sample's time on a rank lies between two CUDA events on the stream of the work, the first behind a tiny all-reduce
that ends on all ranks within a few microseconds; the sample's time is the longest of the ranks' (`calib.collectives.
crew` takes it). Before the barrier the stream is held while the host enqueues, so that replays do not wait for it;
eager launches are not held: theirs is the time per call as the host can feed them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from calib.collectives.team import Team
from calib.measure import Protocol as Timing

HOLD_S = 150e-6
LONG_S = 0.1  # a first run of this length has warmed everything
FEW = 3  # samples of what takes longer than the window


class Work(Protocol):
    """What is timed: `run(i)` is one call, `calls` of them are one sample, `refresh()` prepares a sample."""

    calls: int

    def run(self, i: int = 0) -> Any: ...
    def refresh(self) -> None: ...


@dataclass
class Piece:
    """What one rank measured of one row: seconds a call, sample by sample, and columns of the row."""

    columns: dict[str, Any]
    times_s: list[float]
    launch: str = "graph"
    host_s: float | None = None
    readings: list[Any] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def timed(
    team: Team,
    work: Work,
    launch: str,
    protocol: Timing,
    meter: Any = None,
    together: bool = True,
    stream: Any = None,
    hold_s: float = HOLD_S,
) -> Piece:
    """Time `work` on `stream`, launched as a CUDA graph or eagerly; `together`: every rank takes part."""
    stage = team.stage
    with stage.on(stream):
        for i in range(min(2, work.calls)):  # lazy loading and connections stay out of the capture
            work.run(i)
        stage.sync()

        def calls() -> None:
            for i in range(work.calls):
                work.run(i)

        replay = stage.capture(calls) if launch == "graph" else calls
        sampler = _Sampler(team, work, replay, launch, together, hold_s)
        once = max(sampler.take(1)[0])  # uploads the graph
        if together:
            once = team.agree(once)[0]
        if once < LONG_S:
            once = max(sampler.take(2)[0])
            once = team.agree(once)[0] if together else once
        times, host_s = sampler.take(samples(protocol, once), meter)
    per_call = [t / work.calls for t in times]
    return Piece({}, per_call, launch, host_s if launch == "eager" else None, sampler.readings)


def samples(protocol: Timing, once_s: float) -> int:
    """Samples to take of what takes `once_s`: fewer than the protocol's least where they would last for seconds."""
    if once_s * protocol.least > 20 * protocol.window_s:
        return FEW
    return protocol.samples(once_s)


class _Sampler:
    def __init__(
        self,
        team: Team,
        work: Work,
        replay: Callable[[], Any],
        launch: str,
        together: bool,
        hold_s: float,
    ) -> None:
        self.team, self.work, self.replay, self.launch = team, work, replay, launch
        self.together, self.hold_s = together, hold_s
        self.readings: list[Any] = []

    def take(self, count: int, meter: Any = None) -> tuple[list[float], float]:
        """Seconds of `count` samples, and host seconds to launch one call."""
        stage = self.team.stage
        events, spent = stage.events(2 * count), 0.0
        for start, end in zip(events[::2], events[1::2], strict=True):
            self.work.refresh()
            if self.launch == "graph":
                stage.hold(self.hold_s)
            if self.together:
                self.team.barrier()
            stage.record(start)
            before = time.perf_counter()
            self.replay()
            spent += time.perf_counter() - before
            stage.record(end)
            if self.launch == "eager":
                stage.sync()  # else the host runs ahead, and only the device is timed
        reading = meter.read() if meter is not None else None
        stage.sync()
        if reading is not None:
            self.readings = [reading]
        times = [stage.elapsed_s(a, b) for a, b in zip(events[::2], events[1::2], strict=True)]
        return times, spent / (count * self.work.calls)


def calls_for(protocol: Timing, expected_s: float, most: int = 40) -> int:
    """Calls in one sample: enough to be far above the resolution of events and the skew of the barrier."""
    return max(1, min(most, math.ceil(2 * protocol.replay_s / max(expected_s, 1e-7))))


def expected_collective_s(message_bytes: int) -> float:
    """A coarse expectation over NVLink, to size samples by."""
    return 8e-6 + message_bytes / 300e9

"""Compute and a collective, or a transfer, at once on the same GPUs: both go round without a pause, on streams of
their own, from a common barrier on; only iterations that lie wholly in the time when all were running count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from calib.collectives.team import Team
from calib.collectives.timing import HOLD_S
from sim.errors import CalibrationError

ALONE = 8  # replays of each side alone
LEAST = 8  # iterations of the slower side
MOST = 400
LONGEST_S = 3.0


@dataclass
class Lane:
    """What one side replays on its stream: `launches` runs a replay."""

    replay: Callable[[], Any]
    stream: Any
    launches: int
    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)

    def median(self) -> float:
        return sorted(self.alone_s)[len(self.alone_s) // 2] if self.alone_s else 0.0


def beside(team: Team, lanes: list[Lane | None], window_s: float, meter: Any = None) -> list[Any]:
    """Fill each lane's times, alone and beside the others, in seconds a replay; returns readings of `meter` meanwhile.

    A rank passes None for a lane that it has no part in; all ranks pass the same number of lanes. Raises
    CalibrationError where too little overlapped."""
    for lane in lanes:
        _alone(team, lane)
    times = team.agree(*(lane.median() if lane else 0.0 for lane in lanes))
    window = max(window_s, LEAST * max(times))
    if window > LONGEST_S:
        raise CalibrationError(f"One iteration takes {max(times):.2f} s, too long to run beside others.")
    counts = [min(MOST, int(1.3 * window / max(t, 1e-6)) + 2) for t in times]
    bounds, readings = _together(team, lanes, counts, times, meter)
    held = [b for b in bounds if b]
    begin, minus_end = team.agree(
        max((b[1] for b in held), default=0.0), -min((b[-1] for b in held), default=1e9)
    )
    for lane, boundaries in zip(lanes, bounds, strict=True):
        if lane is not None:
            lane.beside_s = [b - a for a, b in pairwise(boundaries) if a >= begin and b <= -minus_end]
    few = team.agree(*(1.0 if lane is not None and len(lane.beside_s) < 2 else 0.0 for lane in lanes))
    if max(few):
        raise CalibrationError("Too few iterations of one side ran wholly beside the other.")
    return readings


def _alone(team: Team, lane: Lane | None) -> None:
    """Replays of one lane from a common barrier on, the others idle."""
    stage = team.stage
    stage.sync()
    with stage.on(lane.stream if lane else None):
        stage.hold(HOLD_S)
        team.barrier()
        if lane is not None:
            events = stage.events(ALONE + 2)
            for event in events:
                stage.record(event)
                if event is not events[-1]:
                    lane.replay()
    stage.sync()
    if lane is not None:
        lane.alone_s = [stage.elapsed_s(a, b) for a, b in pairwise(events)][1:]


def _together(
    team: Team, lanes: list[Lane | None], counts: list[int], times: list[float], meter: Any
) -> tuple[list[list[float]], list[Any]]:
    """Enqueue all lanes in the order of their expected times; boundaries of each lane's iterations in seconds, and
    what the meter reads while they run."""
    stage, first = team.stage, 1
    start = stage.events(1)[0]
    events: list[list[Any]] = []
    for count in counts:
        events.append(stage.events(count + 1, first))
        first += count + 1
    stage.sync()
    with stage.on():
        stage.hold(2 * HOLD_S)
        team.barrier()
        stage.record(start)
    for lane, marks in zip(lanes, events, strict=True):
        if lane is not None:
            with stage.on(lane.stream):
                if lane.stream is not None:
                    lane.stream.wait_event(start)
                stage.record(marks[0])
    done, due = [0] * len(lanes), [0.0] * len(lanes)
    while waiting := [i for i, lane in enumerate(lanes) if lane is not None and done[i] < counts[i]]:
        i = min(waiting, key=lambda side: due[side])
        lane = lanes[i]
        assert lane is not None
        with stage.on(lane.stream):
            lane.replay()
            done[i] += 1
            stage.record(events[i][done[i]])
        due[i] += times[i]
    readings = [meter.read()] if meter is not None else []
    stage.sync()
    bounds = [
        [stage.elapsed_s(start, mark) for mark in marks] if lane is not None else []
        for lane, marks in zip(lanes, events, strict=True)
    ]
    return bounds, readings

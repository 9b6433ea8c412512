"""The serving loop: one host thread, a policy, a device and a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from calib.executor.work import Work, end_lane, end_one_lane, hold_lane, on_lane, on_one_lane
from sim.engine.layout import (
    DECODE_LANE,
    DONE,
    INBOX_NEXT,
    NOW,
    PREFILL_LANE,
    WAITING,
)


class Device(Protocol):
    """Something that runs launches; all times are seconds since `start`."""

    def start(self) -> None:
        """Begin to count time."""

    def now(self) -> float:
        """Seconds since the start."""

    def launch(self, work: Work, released: list[int]) -> None:
        """Start `work`; `released` are requests whose KV pages are free again since the last launch."""

    def wait(self, until_s: float) -> list[tuple[int, float]]:
        """Wait for the next completions, or until `until_s`; (lane, end) of those that ended, in order."""

    def measured(self, lane: int) -> dict[str, float]:
        """What the device saw of the last completed launch on the lane: `gpu_s`, `plan_s`, `launch_s`, ..."""


@dataclass
class Trail:
    """What a run leaves: a row a launch, in the order of their ends."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def add(self, work: Work, end_s: float, measured: dict[str, float]) -> None:
        """Log a completed launch."""
        self.works.append(work)
        contexts = [context for _, context in work.decodes]
        self.rows.append(
            {
                "start_s": work.start_s,
                "end_s": end_s,
                "lane": work.lane,
                "sms": work.sms,
                "first_layer": work.layers[0],
                "last_layer": work.layers[1],
                "q_tokens": ";".join(str(tokens) for _, tokens, _ in work.chunks),
                "history_tokens": ";".join(str(history) for _, _, history in work.chunks),
                "decode_batch": len(contexts),
                "context_sum": sum(contexts),
                "context_max": max(contexts, default=0),
                "overhang": work.overhang,
                "table_s": work.solo_s,
                "fused": int(work.fused),
                "fallback": work.fallback,
                "ahead": work.ahead,
                "aside": int(work.aside),
                **measured,
            }
        )


def serve(process: Any, device: Device, lanes: int, arrivals: Any) -> Trail:
    """Serve everything in the replica's inbox; returns the log of launches.

    `process` is the engine's replica process of a round-robin cluster of one, made with bursts off; its records
    are read off the cluster afterwards, as after a simulation. `arrivals[i]` is request i's arrival in seconds.
    Raises PlanError where the policy's plan cannot be carried out.
    """
    q, r = process.q, process.r
    trail, flying = Trail(), dict[int, Work]()
    held: set[int] = set()
    decisions: dict[int, float] = {}
    launches = _Launches(process, lanes)
    device.start()
    while True:
        now = device.now()
        if lanes == 2:
            _decide_before(process, now, arrivals)
        decide_at(process, now)
        decided = device.now() - now
        new = launches.beside(flying)
        used = set[int]().union(*(work.requests for work in (*flying.values(), *new)))
        for work in new:
            # who is done within steps that were launched ahead is written to until their end
            released = [i for i in held if q.phase[i] in (DONE, WAITING) and i not in used]
            held.difference_update(released)
            held.update(work.requests)
            flying[work.lane] = work
            decisions[work.lane] = decided
            device.launch(work, released)
        coming = int(r.iv[INBOX_NEXT]) < len(r.inbox)
        arrival = float(arrivals[r.inbox[r.iv[INBOX_NEXT]]]) if coming else math.inf
        if not flying and not coming:
            return trail
        busy = len(flying) == lanes
        for lane, end_s in device.wait(math.inf if busy else arrival):
            trail.add(flying.pop(lane), end_s, {"decide_s": decisions[lane], **device.measured(lane)})
            if lanes == 1:
                end_one_lane(r, end_s)
                continue
            # in the order of time: a launch at an arrival before this end would change the rates, and the end with them
            _decide_before(process, end_s, arrivals)
            end_lane(r, lane, end_s)
            decide_at(process, end_s)
            _hold(r)


def decide_at(process: Any, now: float) -> None:
    """Let the policy's loop commit what has ended and decide as of `now`."""
    r = process.r
    now = max(now, float(r.fv[NOW]))  # what is reported late counts from when the engine's clock stands
    if not _in_flight(process):
        r.fv[NOW] = now
    process.advance(math.nextafter(now, math.inf), -math.inf)


def _decide_before(process: Any, t: float, arrivals: Any) -> None:
    """Let two lanes decide at each arrival before t; what they launch ends when the device says so."""
    r = process.r
    _hold(r)
    while (n := int(r.iv[INBOX_NEXT])) < len(r.inbox) and arrivals[r.inbox[n]] < t:
        decide_at(process, float(arrivals[r.inbox[n]]))
        _hold(r)
        if int(r.iv[INBOX_NEXT]) == n:
            return


def _hold(r: Any) -> None:
    for lane in (0, 1):
        hold_lane(r, lane)


def _in_flight(process: Any) -> bool:
    return process.lanes.due() < math.inf


class _Launches:
    """Reads off the engine's state what the device has to launch."""

    def __init__(self, process: Any, lanes: int) -> None:
        self._q, self._r, self._lanes = process.q, process.r, lanes
        self._mixes = process.lanes.p.mix_on == 1
        self._chain: Work | None = None

    def beside(self, flying: dict[int, Work]) -> list[Work]:
        """Launches that are not in flight yet; a decode first, since its graph is launched at once."""
        if self._lanes == 1:
            work = None if 0 in flying else on_one_lane(self._q, self._r, self._mixes)
            return [work] if work else []
        found = []
        for lane in (DECODE_LANE, PREFILL_LANE):
            work = None if lane in flying else on_lane(self._q, self._r, lane, self._mixes, self._chain)
            if work is not None:
                found.append(work)
                if work.steps > 1:
                    self._chain = work
        _hold(self._r)
        return found

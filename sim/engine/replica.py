"""One replica on the simulated clock: it accepts requests, advances its lane, and is woken when a burst ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np

from sim.engine.clock import COMPLETION, DECISION, Clock
from sim.engine.cohort import leave
from sim.engine.handover import count_handed
from sim.engine.lane import accept, count_in_flight, interrupt, settle
from sim.engine.lanes import NEVER, accept_lanes, count_lanes_in_flight, next_end, settle_lanes
from sim.engine.layout import (
    BURST,
    BUSY,
    CHAIN_BLOCKS,
    DECODE,
    DUE,
    ERROR,
    ERROR_ID,
    ERROR_TEXT,
    FLOATS,
    FREE,
    HANDED_OVER,
    INBOX_NEXT,
    INCOMING,
    INTEGERS,
    LOG_CAP,
    METER_CAP,
    METER_END,
    METER_WIDTH,
    N_DONE,
    N_LOG,
    N_METER,
    N_RUN,
    N_STEPLOG,
    N_WAIT,
    NOW,
    OVERRUN_BLOCKS,
    RUN_AREA,
    RUN_HEAD,
    RUN_SINCE,
    STEP_WIDTH,
    TOTAL,
    WAIT_AREA,
    WAIT_SINCE,
)
from sim.engine.meter import read_lanes, read_meter
from sim.engine.outlook import (
    accept_and_look,
    accept_lanes_and_look,
    least_step_s,
    settle_and_look,
    settle_lanes_and_look,
)
from sim.errors import PlanError
from sim.native import HotCode


class OneLane:
    """How the process touches a replica whose policy uses one lane."""

    def __init__(self, hot: HotCode, q: Any, r: Any, p: Any, believe: Callable[[], tuple[Any, Any]]) -> None:
        self.hot, self.q, self.r, self.p, self._believe = hot, q, r, p, believe
        self.shown = hot.shown(r)  # the same, for single reads and writes
        self._bind(hot)

    @cached_property
    def belief(self) -> tuple[Any, Any]:
        """Prices, and on two lanes slowdowns, that the policy believes in; made when first asked for."""
        return self._believe()

    def _bind(self, hot: HotCode) -> None:
        self._settle = hot.bind(settle, self.q, self.r, self.p)
        self._accept = hot.bind(accept, self.q, self.r, self.p)

    def settle(self, now: float) -> None:
        """Commit what has ended by `now`."""
        self._settle(now)

    def accept(self, i: int, now: float) -> None:
        """Request i arrives."""
        self._accept(i, now)

    def interrupt(self, now: float) -> None:
        """Something else than a request has come, which the next decision is to see soon."""
        self._settle(now)
        interrupt(self.q, self.r, self.p, now)

    def wake_up(self, now: float) -> None:
        """An idle lane decides at `now`, not at its last boundary."""
        r = self.shown
        if r.iv[BUSY] == 0 and now > r.fv[NOW]:
            r.fv[NOW] = now

    def due(self) -> float:
        """End of what is in flight; infinite if nothing is."""
        r = self.shown
        return float(r.ends[r.iv[BURST] - 1]) if r.iv[BUSY] == 1 else math.inf

    def read_meter(self, now: float) -> None:
        """A last reading, where the last launch ended."""
        read_meter(self.shown, float(self.shown.fv[METER_END]))

    def count_in_flight(self, r: Any, now: float) -> None:
        """Add to `r`, a copy of the replica, the SM time that what is in flight has used until `now`."""
        count_in_flight(self.q, r, self.p, now)

    def busy(self) -> bool:
        """Is anything in flight?"""
        return bool(self.shown.iv[BUSY] == 1)

    def watched(self) -> tuple[Callable[[float], float], Callable[[int, float], float]]:
        """For a router that counts: `settle` by a time, and `accept` request i at it. Both return a time before which
        nobody leaves."""
        settle_at = self.hot.bind(settle_and_look, self.q, self.r, self.p)
        accept_at, least_s = self.hot.bind(accept_and_look, self.q, self.r, self.p), least_step_s(self.p)
        return (lambda now: float(settle_at(now, least_s))), (
            lambda i, now: float(accept_at(i, now, least_s))
        )

    def decides_at(self, now: float) -> float:
        """When a request that has just arrived is first looked at."""
        return now if self.shown.iv[BUSY] == 0 else self.due()


class TwoLanes(OneLane):
    """The same for a policy with a prefill and a decode lane."""

    def __init__(
        self, hot: HotCode, q: Any, r: Any, p: Any, x: Any, believe: Callable[[], tuple[Any, Any]]
    ) -> None:
        self.x = x
        super().__init__(hot, q, r, p, believe)

    def _bind(self, hot: HotCode) -> None:
        self._settle = hot.bind(settle_lanes, self.q, self.r, self.x)
        self._accept = hot.bind(accept_lanes, self.q, self.r, self.x)
        self._next_end = hot.bind(next_end, self.r)

    def settle(self, now: float) -> None:
        """Commit what has ended by `now`."""
        self._settle(now)

    def accept(self, i: int, now: float) -> None:
        """Request i arrives."""
        self._accept(i, now)

    def wake_up(self, now: float) -> None:
        """Lanes keep their own time."""

    def due(self) -> float:
        """The next completion on either lane; infinite if both are idle."""
        end = float(self._next_end())
        return end if end < NEVER else math.inf

    def count_in_flight(self, r: Any, now: float) -> None:
        """Add to `r`, a copy of the replica, the SM time that what is in flight has used until `now`."""
        count_lanes_in_flight(r, now)

    def read_meter(self, now: float) -> None:
        """A last reading, with what is done of the launches in flight."""
        read_lanes(self.q, self.shown, now)

    def busy(self) -> bool:
        """Is anything in flight, or a decision due?"""
        return bool(self.shown.iv[DUE] == 1 or self._next_end() < NEVER)

    def watched(self) -> tuple[Callable[[float], float], Callable[[int, float], float]]:
        """The same for two lanes."""
        return (
            self.hot.bind(settle_lanes_and_look, self.q, self.r, self.x),
            self.hot.bind(accept_lanes_and_look, self.q, self.r, self.x),
        )

    def decides_at(self, now: float) -> float:
        """At once if a lane is idle."""
        return now if self.shown.iv[DUE] == 1 else self.due()


class ReplicaProcess:
    """Drives one replica's arrays.

    `drive(limit, look_ahead)` runs the policy's loop. `limit()` is the next time at which anything outside may
    touch this replica: everything before it can be committed ahead of the clock. With `on_finish` set (closed
    loops, hand-overs) nothing is committed ahead, so that completions reach their listener in time. `on_launch` is
    told of every launch or burst. A replica whose router keeps it (`sim.engine.routing`) has no events on the clock.
    """

    def __init__(
        self,
        clock: Clock,
        index: int,
        lanes: OneLane,
        drive: Callable[[float, float], None],
        limit: Callable[[], float],
        look_far: bool,
        on_finish: Callable[[list[int]], None] | None,
        name: str,
        on_launch: Callable[[], None] | None = None,
    ) -> None:
        self.clock, self.index, self.lanes = clock, index, lanes
        self.q, self.r = lanes.q, lanes.r
        self.drive, self.limit, self.look_far, self.on_finish, self.name = (
            drive,
            limit,
            look_far,
            on_finish,
            name,
        )
        self.on_launch = on_launch
        self.outstanding = 0  # requests waiting or running when last settled
        self.gaps: list[np.ndarray[Any, Any]] = []
        self.counts: list[np.ndarray[Any, Any]] = []
        self.gap_ends: list[np.ndarray[Any, Any]] = []
        self.steps: list[np.ndarray[Any, Any]] = []
        self.readings: list[np.ndarray[Any, Any]] = []
        self._stamp = 0
        self._decided_s = -math.inf
        self.wake_s = math.inf  # when the lane is next looked at; until then `outstanding` does not change

    def settle(self, now: float) -> None:
        """Bring the state up to `now`."""
        self.lanes.settle(now)
        self._count()

    def run_until(self, limit: float) -> None:
        """Take every decision before `limit`, of a replica that has no events of its own."""
        self.advance(limit, math.inf)

    def _count(self) -> None:
        iv = self.lanes.shown.iv
        self.outstanding = int(iv[N_WAIT] + iv[N_RUN])

    def start(self) -> None:
        """Wake for the first request of the inbox, if there is one."""
        if len(self.r.inbox) > 0:
            self._wake(float(self.q.arrival_s[self.r.inbox[0]]))

    def accept(self, i: int, now: float) -> None:
        """Request i arrives now, by a router that has just chosen this replica."""
        self.lanes.accept(i, now)
        self._count()
        self._wake_when_due(now)

    def interrupt(self, now: float) -> None:
        """The state has been changed from outside: decide as soon as the lane can, if there is anything to do."""
        self.lanes.interrupt(now)
        self._count()
        if self.outstanding > 0:
            self._wake_when_due(now)

    def _wake_when_due(self, now: float) -> None:
        due = self.lanes.decides_at(now)
        if due != self.wake_s:
            self._wake(due)

    def _wake(self, time_s: float) -> None:
        self.wake_s = time_s
        kind = COMPLETION if self.on_finish else DECISION
        self._stamp += 1
        event = self.clock.at(time_s, kind, self.index)
        event.callbacks.append(partial(self._woken, self._stamp))

    def _woken(self, stamp: int, _event: Any) -> None:
        if stamp != self._stamp:
            return
        if self.on_finish is None:
            self._decide(stamp, _event)
            return
        self.settle(self.clock.now)
        finished = self._take_done()
        if finished:
            self.on_finish(finished)
        event = self.clock.at(self.clock.now, DECISION, self.index)
        event.callbacks.append(partial(self._decide, stamp))

    def _decide(self, stamp: int, _event: Any) -> None:
        if stamp != self._stamp:
            return
        now = self.clock.now
        self._run(now, math.nextafter(now, math.inf) if self.on_finish else self.limit())

    def _run(self, now: float, limit: float) -> None:
        """Decide at `now`, and as often as it takes until `limit`."""
        self.wake_s = math.inf
        r = self.lanes.shown
        self.lanes.wake_up(now)
        look_ahead = math.inf if self.look_far else limit
        if self.on_finish:
            # what passed without a disturbance since the last decision says how far ahead it pays to price
            look_ahead = now + 2.0 * (now - self._decided_s)
            self._decided_s = now
        self.advance(limit, look_ahead)
        self._count()
        due = self.lanes.due()
        if due < math.inf:
            self._wake(due)
            if self.on_launch is not None:
                self.on_launch()
        elif r.iv[INBOX_NEXT] < len(r.inbox):
            self._wake(float(self.q.arrival_s[r.inbox[r.iv[INBOX_NEXT]]]))

    def advance(self, limit: float, look_ahead: float) -> None:
        """The policy's loop until `limit`, with its logs moved away whenever they are full."""
        iv = self.lanes.shown.iv
        while True:
            self.drive(limit, look_ahead)
            if iv[ERROR] != 0:
                raise PlanError(f"policy '{self.name}': request {iv[ERROR_ID]} {ERROR_TEXT[int(iv[ERROR])]}")
            if max(iv[N_LOG], iv[N_DONE], iv[N_STEPLOG]) < LOG_CAP and iv[N_METER] < METER_CAP:
                return
            self.drain()

    def _take_done(self) -> list[int]:
        n = int(self.r.iv[N_DONE])
        self.r.iv[N_DONE] = 0
        return [int(i) for i in self.r.done[:n]]

    def read_meter(self, now: float) -> None:
        """The last reading of the work counters, once the state is brought up to `now`."""
        self.lanes.read_meter(now)

    def drain(self) -> None:
        """Move the logs out of the fixed buffers."""
        r = self.r
        n = int(r.iv[N_LOG])
        self.gaps.append(np.array(r.log_gap[:n], np.float64))
        self.counts.append(np.array(r.log_count[:n], np.int32))
        self.gap_ends.append(np.array(r.log_end[:n], np.float64))
        rows = int(r.iv[N_STEPLOG]) * STEP_WIDTH
        self.steps.append(np.array(r.steplog[:rows], np.float64).reshape(-1, STEP_WIDTH))
        read = int(r.iv[N_METER]) * METER_WIDTH
        self.readings.append(np.array(r.meter[:read], np.float64).reshape(-1, METER_WIDTH))
        r.iv[N_LOG] = r.iv[N_STEPLOG] = r.iv[N_METER] = 0
        if self.on_finish is None:
            r.iv[N_DONE] = 0

    def snapshot(self, now: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Copies of the running sums at `now`."""
        self.settle(now)
        fv = self.r.fv
        for area, since, count in ((WAIT_AREA, WAIT_SINCE, N_WAIT), (RUN_AREA, RUN_SINCE, N_RUN)):
            fv[area] += self.r.iv[count] * (now - fv[since])
            fv[since] = now
        count_handed(self.r, 0, 0, now)
        # a launch in flight belongs to both sides of `now`: its own sums are only made when it ends
        copy = self.r._replace(iv=self.r.iv.copy(), fv=fv.copy())
        self.lanes.count_in_flight(copy, now)
        return np.array(copy.iv[:INTEGERS], np.int64), np.array(copy.fv[:FLOATS], np.float64)

    def disband(self) -> None:
        """After the end: bring up to date the counters of requests that were still decoding."""
        i = int(self.r.iv[RUN_HEAD])
        while i >= 0:
            if self.q.phase[i] == DECODE:
                leave(self.q, self.r, i)
            i = int(self.q.next[i])

    def check_empty(self) -> None:
        """All blocks are back once nothing runs."""
        iv = self.r.iv
        # steps launched ahead may still be in flight after the last request has all its tokens
        lost = iv[TOTAL] - iv[FREE] - iv[CHAIN_BLOCKS] - iv[OVERRUN_BLOCKS]
        if iv[N_RUN] + iv[HANDED_OVER] + iv[INCOMING] == 0 and lost != 0:
            raise AssertionError(f"replica {self.index}: {lost} KV blocks leaked")

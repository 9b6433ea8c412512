"""Routing by what replicas hold: each is brought up to date only when a request may have left it.

Replicas behind such a router have no events on the clock. One call takes all decisions of one up to a time, a second
one commits what has ended by then and says until when it can be left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from sim.engine.layout import N_RUN, N_WAIT
from sim.engine.replica import ReplicaProcess


class Watched:
    """One replica as the router keeps it: `held` requests inside, and nobody leaves before `leave_s`."""

    __slots__ = ("_accept", "_busy", "_drive", "_iv", "_settle", "_waits", "held", "leave_s")

    def __init__(self, replica: ReplicaProcess) -> None:
        lanes = replica.lanes
        self._drive, self._busy = replica.run_until, lanes.busy
        self._settle, self._accept = lanes.watched()
        self._iv = lanes.shown.iv
        self._waits = True  # nothing in flight, and the policy has seen all there is
        self.held, self.leave_s = 0, math.inf

    def bring_to(self, now: float) -> None:
        """Take all decisions before `now` and commit what has ended by then."""
        if self._waits:
            return
        self._drive(now)
        self._waits = not self._busy()
        leave_s = self._settle(now)
        self.held = self._iv[N_WAIT] + self._iv[N_RUN]
        self.leave_s = math.inf if self._waits else _after(now, leave_s)

    def accept(self, i: int, now: float) -> None:
        """Request i arrives."""
        if not self._waits:
            self._drive(now)
        self.leave_s = _after(now, self._accept(i, now))
        self._waits = False
        self.held = self._iv[N_WAIT] + self._iv[N_RUN]


def _after(now: float, leave_s: float) -> float:
    """Who was to leave by now has left: the next one does later, also where a decision is due at this very time."""
    return leave_s if leave_s > now else math.nextafter(now, math.inf)


class Routing:
    """Sends requests to the replicas that `choose` takes by the numbers of requests inside.

    What they hold at an arrival is exact: whoever may have lost a request by then is brought up to it, completions at
    that very time included.
    """

    def __init__(self, replicas: Sequence[ReplicaProcess], choose: Callable[[Sequence[int]], int]) -> None:
        self._replicas, self._choose = [Watched(replica) for replica in replicas], choose
        self._held = [0] * len(replicas)
        # (time before which nobody leaves, replica), overtaken ones among them
        self._due: list[tuple[float, int]] = []

    def route(self, arrivals: Iterable[tuple[int, float]], routed: Callable[[int, int], None]) -> None:
        """Every request of `arrivals`, with its time, in order; `routed(i, k)` is told of each."""
        replicas, held, due = self._replicas, self._held, self._due
        for i, now in arrivals:
            while due and due[0][0] <= now:
                time_s, k = heappop(due)
                replica = replicas[k]
                if time_s == replica.leave_s:
                    replica.bring_to(now)
                    held[k] = replica.held
                    heappush(due, (replica.leave_s, k))
            k = self._choose(held)
            replica = replicas[k]
            before_s = replica.leave_s
            replica.accept(i, now)
            held[k] = replica.held
            if replica.leave_s != before_s:
                heappush(due, (replica.leave_s, k))
            routed(i, k)

    def bring_to(self, now: float) -> None:
        """Bring all replicas up to `now`."""
        for k, replica in enumerate(self._replicas):
            replica.bring_to(now)
            self._held[k] = replica.held
            heappush(self._due, (replica.leave_s, k))

"""Simulated time: SimPy's environment with events at absolute times and one order at equal times."""

from __future__ import annotations

from heapq import heappush
from typing import Any

import simpy

# Order at equal times. SimPy's own priorities are 0 and 1, so its process bookkeeping comes first.
COMPLETION, TRANSFER, ARRIVAL, DECISION = 1, 2, 3, 4
REPLICA_BITS = 20


class Clock(simpy.Environment):
    """An environment whose events carry (time, class, replica, sequence)."""

    def at(self, time_s: float, kind: int, replica: int = 0) -> simpy.Event:
        """An event at exactly `time_s` (SimPy's relative delays would round)."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        queue: list[Any] = self._queue
        heappush(queue, (time_s, (kind << REPLICA_BITS) | replica, next(self._eid), event))
        return event

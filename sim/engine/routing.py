"""Routing by what replicas hold: each is brought up to date only when a request may have left it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from sim.engine.replica import ReplicaProcess


def route_in_order(
    arrivals: Iterable[tuple[int, float]],
    replicas: Sequence[ReplicaProcess],
    choose: Callable[[Sequence[int]], int],
    routed: Callable[[int, int], None],
) -> None:
    """Send every request, with its time, to the replica that `choose` takes by the numbers of requests inside.

    Replicas are patient and have no events of their own. What they hold at an arrival is exact: whoever may have lost
    a request by then is brought up to it, completions at that very time included. `routed(i, k)` is told of each.
    """
    held = [0] * len(replicas)
    due: list[tuple[float, int]] = []  # (time before which nobody leaves, replica), overtaken ones among them
    latest = [0.0] * len(replicas)
    for i, now in arrivals:
        while due and due[0][0] <= now:
            time_s, k = heappop(due)
            if time_s == latest[k]:
                replica = replicas[k]
                replica.advance_to(now)
                held[k] = replica.outstanding
                latest[k] = replica.next_leave_s()
                heappush(due, (latest[k], k))
        k = choose(held)
        replica = replicas[k]
        replica.advance_to(now)
        replica.accept(i, now)
        held[k] = replica.outstanding
        routed(i, k)
        leave_s = replica.next_leave_s()
        if leave_s != latest[k]:
            latest[k] = leave_s
            heappush(due, (leave_s, k))

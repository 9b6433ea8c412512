"""Routers: which replica serves a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.suggest import nearest


class Router(Protocol):
    """Chooses a replica for each request."""

    def assign(self, requests: int, replicas: int) -> NDArray[np.int64] | None:
        """Replica of each request, known beforehand; None if the router must look at the replicas first."""

    def choose(self, held: Sequence[int]) -> int:
        """Replica for the request that arrives now; `held`: requests waiting and running on each."""


class RoundRobin:
    """Replica i mod n. Never looks at the state, so each replica can run ahead through its own arrivals."""

    def __init__(self) -> None:
        self._routed = 0

    def assign(self, requests: int, replicas: int) -> NDArray[np.int64] | None:
        """In turn."""
        return np.arange(requests, dtype=np.int64) % replicas

    def choose(self, held: Sequence[int]) -> int:
        """The replica whose turn it is."""
        self._routed += 1
        return (self._routed - 1) % len(held)


class LeastOutstanding:
    """The replica with the fewest waiting and running requests; the lowest index of equals."""

    def assign(self, requests: int, replicas: int) -> NDArray[np.int64] | None:
        """Known beforehand only if there is no choice."""
        return np.zeros(requests, np.int64) if replicas == 1 else None

    def choose(self, held: Sequence[int]) -> int:
        """The first of those that hold least."""
        return held.index(min(held))


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-outstanding": LeastOutstanding,
}


def check_router(router: str) -> None:
    """Raise SimctlError for a router that does not exist."""
    if router not in ROUTERS:
        known = nearest(router, ROUTERS) or " Known: " + ", ".join(ROUTERS)
        raise SimctlError(f"unknown router '{router}'.{known}")

"""Admission before the replicas: each arriving request is let in, held back, or turned away.

The verdict belongs to a policy that wraps another (`wrapped`), and reads the state of the replica that the router has
chosen. The policy behind the gate knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sim.engine.building import Group
from sim.engine.deploying import largest_step
from sim.engine.layout import WAIT_AREA
from sim.engine.replica import ReplicaProcess


class Judge(Protocol):
    """What a wrapper makes for one replica."""

    delays: bool  # hold what would be refused, rather than turn it away

    def refusal(self, i: int, now: float) -> str:
        """Why request i should not go in now, "" if it may; the replica is settled."""

    def admit(self, i: int, now: float) -> None:
        """Request i goes in."""


def unwrapped(policy: Any) -> Any:
    """The policy behind a gate, or the policy itself."""
    return getattr(policy, "wrapped", policy)


class Gate:
    """One replica's gate, and the requests that it holds back, in order of arrival."""

    def __init__(self, judge: Judge, replica: ReplicaProcess, reject: Callable[[int, str], None]) -> None:
        self.judge, self.replica, self.reject = judge, replica, reject
        self.held: list[int] = []

    def arrive(self, i: int, now: float) -> None:
        """Request i arrives."""
        self.replica.settle(now)
        reason = self.judge.refusal(i, now)
        if not reason:
            self._admit(i, now)
        elif self.judge.delays:
            self.held.append(i)
        else:
            self.reject(i, reason)

    def reconsider(self, now: float) -> None:
        """Something has changed inside: let in whoever of the held may go in now."""
        at = 0
        while at < len(self.held):
            if self.judge.refusal(self.held[at], now):
                at += 1
                continue
            i = self.held.pop(at)
            # it has waited out here, not in the replica's queue
            self.replica.r.fv[WAIT_AREA] += now - self.replica.q.arrival_s[i]
            self._admit(i, now)

    def _admit(self, i: int, now: float) -> None:
        self.judge.admit(i, now)
        self.replica.accept(i, now)


def make_gate(
    policy: Any,
    group: Group,
    classes: tuple[str, ...],
    replica: ReplicaProcess,
    reject: Callable[[int, str], None],
) -> Gate:
    """The gate of a wrapping policy before one replica; it believes what the policy behind it believes."""
    lanes = replica.lanes
    step = largest_step(policy.wrapped, group.deployment)
    judge = policy.judge(lanes.q, lanes.r, *lanes.belief, group.deployment, classes, step)
    return Gate(judge, replica, reject)

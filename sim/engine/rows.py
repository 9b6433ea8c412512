"""The waiting and the running requests of one replica as lists, kept between decisions of a policy in plain Python."""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    BY_ARRIVAL,
    BY_PRIORITY,
    FINISHED_COUNT,
    N_WAIT,
    RUN_HEAD,
    RUN_ORDER,
    WAIT_HEAD,
    WAIT_ORDER,
)


class Rows:
    """The waiting and the running as lists of row numbers, walked only when something has changed."""

    def __init__(self, q: Any, r: Any) -> None:
        self.q, self.r = q, r
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._seen = (-1, -1)

    def refresh(self) -> tuple[list[int], list[int]]:
        """Both lists as they are now."""
        iv = self.r.iv
        waiting, finished = iv[N_WAIT], iv[FINISHED_COUNT]
        if waiting != self._seen[0]:
            if iv[WAIT_ORDER] == BY_PRIORITY or not self._waiting or not 0 <= self._seen[0] < waiting:
                self._waiting = self._walk(iv[WAIT_HEAD])
            else:
                # whoever has come stands behind the last one seen
                self._waiting = self._waiting + self._walk(self.q.next[self._waiting[-1]])
        if finished != self._seen[1]:
            self._running = self._walk(iv[RUN_HEAD])
        self._seen = int(waiting), int(finished)
        return self._waiting, self._running

    def hold(self, i: int) -> bool:
        """Did request i stand in one of the lists when the policy was asked?"""
        return i in self._running or i in self._waiting

    def planned(self, admitted: list[int], victims: list[int]) -> None:
        """A plan has moved these from one list to the other."""
        if victims or (admitted and self.r.iv[RUN_ORDER] == BY_ARRIVAL):
            self._seen = (-1, -1)
        elif admitted:
            chosen = set(admitted)
            self._waiting = [i for i in self._waiting if i not in chosen]
            self._running = [*self._running, *admitted]
            self._seen = self._seen[0] - len(admitted), self._seen[1]

    def _walk(self, head: int) -> list[int]:
        follows, rows, i = self.q.next, [], head
        while i >= 0:
            rows.append(int(i))
            i = follows[i]
        return rows

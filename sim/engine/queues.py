"""Linked queues and the finish heap, over plain arrays."""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    BY_ARRIVAL,
    BY_PRIORITY,
    N_HEAP,
    N_RUN,
    N_WAIT,
    RUN_AREA,
    RUN_HEAD,
    RUN_ORDER,
    RUN_SINCE,
    RUN_TAIL,
    WAIT_AREA,
    WAIT_HEAD,
    WAIT_ORDER,
    WAIT_SINCE,
    WAIT_TAIL,
)
from sim.jit import jit


@jit
def _unlink(q: Any, iv: Any, head: int, tail: int, i: int) -> None:
    before, after = q.prev[i], q.next[i]
    if before >= 0:
        q.next[before] = after
    else:
        iv[head] = after
    if after >= 0:
        q.prev[after] = before
    else:
        iv[tail] = before
    q.prev[i] = -1
    q.next[i] = -1


@jit
def _link_after(q: Any, iv: Any, head: int, tail: int, before: int, i: int) -> None:
    """Insert i behind `before`; -1 puts it in front."""
    after = q.next[before] if before >= 0 else iv[head]
    q.prev[i] = before
    q.next[i] = after
    if before >= 0:
        q.next[before] = i
    else:
        iv[head] = i
    if after >= 0:
        q.prev[after] = i
    else:
        iv[tail] = i


@jit
def _count_waiting(r: Any, change: int, t: float) -> None:
    r.fv[WAIT_AREA] += r.iv[N_WAIT] * (t - r.fv[WAIT_SINCE])
    r.fv[WAIT_SINCE] = t
    r.iv[N_WAIT] += change


@jit
def _count_running(r: Any, change: int, t: float) -> None:
    r.fv[RUN_AREA] += r.iv[N_RUN] * (t - r.fv[RUN_SINCE])
    r.fv[RUN_SINCE] = t
    r.iv[N_RUN] += change


@jit
def more_urgent(q: Any, i: int, j: int) -> bool:
    """Does request i go before j by priority? Equal ones by arrival, of which row numbers are the order."""
    if q.priority[i] != q.priority[j]:
        return bool(q.priority[i] < q.priority[j])
    return i < j


@jit
def push_waiting(q: Any, r: Any, i: int, front: bool, t: float) -> None:
    """Queue request i at time t, at the front or at the back, or where its priority puts it."""
    _count_waiting(r, 1, t)
    before = -1 if front else r.iv[WAIT_TAIL]
    if r.iv[WAIT_ORDER] == BY_PRIORITY and r.iv[WAIT_TAIL] >= 0:
        before = r.iv[WAIT_TAIL]
        if not more_urgent(q, before, i):
            # an urgent one, or an old one of its class: its place is near the head
            before = -1
            after = r.iv[WAIT_HEAD]
            while more_urgent(q, after, i):
                before = after
                after = q.next[after]
    _link_after(q, r.iv, WAIT_HEAD, WAIT_TAIL, before, i)


@jit
def remove_waiting(q: Any, r: Any, i: int, t: float) -> None:
    """Take request i out of the waiting queue, wherever it stands."""
    _count_waiting(r, -1, t)
    _unlink(q, r.iv, WAIT_HEAD, WAIT_TAIL, i)


@jit
def push_running(q: Any, r: Any, i: int, t: float) -> None:
    """Add request i to the running list: last, or by arrival where the policy keeps that order."""
    _count_running(r, 1, t)
    before = r.iv[RUN_TAIL]
    if r.iv[RUN_ORDER] == BY_ARRIVAL:
        # rows are numbered by arrival, so the row number breaks ties as well
        while before > i:
            before = q.prev[before]
    _link_after(q, r.iv, RUN_HEAD, RUN_TAIL, before, i)


@jit
def remove_running(q: Any, r: Any, i: int, t: float) -> None:
    """Take request i out of the running list."""
    _count_running(r, -1, t)
    _unlink(q, r.iv, RUN_HEAD, RUN_TAIL, i)


@jit
def _before(r: Any, a: int, b: int) -> bool:
    """Heap order: by finishing step, then by row number, so that ties never depend on history."""
    return r.heap_key[a] < r.heap_key[b] or (r.heap_key[a] == r.heap_key[b] and r.heap_id[a] < r.heap_id[b])


@jit
def _swap(q: Any, r: Any, a: int, b: int) -> None:
    key, i = r.heap_key[a], r.heap_id[a]
    r.heap_key[a] = r.heap_key[b]
    r.heap_id[a] = r.heap_id[b]
    r.heap_key[b] = key
    r.heap_id[b] = i
    q.heap_at[r.heap_id[a]] = a
    q.heap_at[r.heap_id[b]] = b


@jit
def _sift(q: Any, r: Any, at: int) -> None:
    n = r.iv[N_HEAP]
    while at > 0 and _before(r, at, (at - 1) // 2):
        _swap(q, r, at, (at - 1) // 2)
        at = (at - 1) // 2
    while True:
        child = 2 * at + 1
        if child >= n:
            return
        if child + 1 < n and _before(r, child + 1, child):
            child += 1
        if not _before(r, child, at):
            return
        _swap(q, r, at, child)
        at = child


@jit
def heap_push(q: Any, r: Any, key: int, i: int) -> None:
    """Note that cohort member i finishes when the cohort has made `key` steps."""
    at = r.iv[N_HEAP]
    r.heap_key[at] = key
    r.heap_id[at] = i
    q.heap_at[i] = at
    r.iv[N_HEAP] = at + 1
    _sift(q, r, at)


@jit
def heap_remove(q: Any, r: Any, i: int) -> None:
    """Forget member i, wherever it stands in the heap."""
    at = q.heap_at[i]
    last = r.iv[N_HEAP] - 1
    if at != last:
        _swap(q, r, at, last)
    r.iv[N_HEAP] = last
    q.heap_at[i] = -1
    if at != last:
        _sift(q, r, at)

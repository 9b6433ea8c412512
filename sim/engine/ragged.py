"""How far the longest context of the cohort stands out over the mean.

Attention kernels split long contexts among idle SMs while a batch is small. A larger batch gives each sequence to one
CTA a KV head, and a step waits for the longest: by the effective longest context of `sim.cost.operators` less the
mean, in whole tokens. All members grow by one token a step, so it changes only as members come and go. The longest
are kept in order; all members are looked at again only when too many of these have left.
"""

from __future__ import annotations

from typing import Any

from sim.cost.operators import TOGETHER
from sim.engine.layout import (
    COHORT,
    CONTEXT,
    DECODE,
    LEADERS,
    N_LEADERS,
    OVERHANG,
    OVERHANG_SPARE,
    RUN_HEAD,
    STEP,
)
from sim.jit import jit

UNKNOWN = -2  # of OVERHANG_SPARE: members have come or gone


@jit
def join_leaders(q: Any, r: Any, i: int) -> None:
    """Request i is a new member."""
    iv = r.iv
    n = iv[N_LEADERS]
    iv[OVERHANG_SPARE] = UNKNOWN
    if (n < LEADERS and n == iv[COHORT] - 1) or (n > 0 and _key(q, i) > r.leader_key[n - 1]):
        _insert(q, r, i)


@jit
def _key(q: Any, i: int) -> int:
    """Context of a member as it would be at step 0."""
    key: int = q.computed[i] - q.joined[i]
    return key


@jit
def _insert(q: Any, r: Any, i: int) -> None:
    """Member i among the longest; the shortest of these makes room."""
    key = _key(q, i)
    at = min(r.iv[N_LEADERS], LEADERS - 1)
    r.iv[N_LEADERS] = at + 1
    while at > 0 and r.leader_key[at - 1] < key:
        r.leader_key[at] = r.leader_key[at - 1]
        r.leader_id[at] = r.leader_id[at - 1]
        at -= 1
    r.leader_key[at] = key
    r.leader_id[at] = i


@jit
def leave_leaders(q: Any, r: Any, i: int) -> None:
    """Member i is about to leave, its counters as they were."""
    iv = r.iv
    n = iv[N_LEADERS]
    iv[OVERHANG_SPARE] = UNKNOWN
    if n == 0 or _key(q, i) < r.leader_key[n - 1]:
        return
    at = 0
    while at < n and r.leader_id[at] != i:
        at += 1
    if at == n:
        return
    for m in range(at, n - 1):
        r.leader_key[m] = r.leader_key[m + 1]
        r.leader_id[m] = r.leader_id[m + 1]
    iv[N_LEADERS] = n - 1


@jit
def measure_overhang(q: Any, r: Any, p: Any, graph: bool) -> None:
    """Bring the overhang of the step about to be launched up to date."""
    iv = r.iv
    batch = iv[COHORT]
    if p.over_on == 0 or batch == 0 or batch > p.max_seqs:
        return
    spare = p.spare_graph[batch] if graph else p.spare_eager[batch]
    if spare == iv[OVERHANG_SPARE]:
        return
    iv[OVERHANG_SPARE] = spare
    iv[OVERHANG] = 0
    if spare < 0:
        return
    if iv[N_LEADERS] < min(batch, TOGETHER + spare):
        _find_leaders(q, r)
    iv[OVERHANG] = _overhang(r) if spare == 0 else _overhang_of_pieces(r, spare)


@jit
def _find_leaders(q: Any, r: Any) -> None:
    """Look for the longest among all members."""
    iv = r.iv
    iv[N_LEADERS] = 0
    i = iv[RUN_HEAD]
    while i >= 0:
        n = iv[N_LEADERS]
        if q.phase[i] == DECODE and (n < LEADERS or _key(q, i) > r.leader_key[n - 1]):
            _insert(q, r, i)
        i = q.next[i]


@jit
def _overhang(r: Any) -> int:
    """Of whole sequences."""
    iv = r.iv
    mean = iv[CONTEXT] // iv[COHORT] - iv[STEP]  # as of step 0, like the keys
    total = 0
    for n in range(TOGETHER):
        total += max(r.leader_key[n], mean) if n < iv[N_LEADERS] else mean
    return int((TOGETHER * r.leader_key[0] - total) // TOGETHER)


@jit
def _overhang_of_pieces(r: Any, spare: int) -> int:
    """Of sequences of which the longest are split into `spare` pieces more, as evenly as that goes."""
    iv = r.iv
    count, step = min(iv[N_LEADERS], TOGETHER + spare), iv[STEP] + 1
    for n in range(count):
        r.piece[n] = r.leader_key[n] + step
        r.pieces[n] = 1
    for _ in range(spare):
        at = 0
        for n in range(1, count):
            if r.piece[n] > r.piece[at]:
                at = n
        r.pieces[at] += 1
        r.piece[at] = -(-(r.leader_key[at] + step) // r.pieces[at])
    mean = iv[CONTEXT] // iv[COHORT] + 1
    longest, total, left = mean, 0, TOGETHER
    while left > 0:
        at = 0
        for n in range(1, count):
            if r.piece[n] > r.piece[at]:
                at = n
        size = max(r.piece[at], mean)
        taken = left if size == mean else min(left, r.pieces[at])
        longest = max(longest, size)
        total += taken * size
        left -= taken
        r.piece[at] = 0
    return int((TOGETHER * longest - total) // TOGETHER)

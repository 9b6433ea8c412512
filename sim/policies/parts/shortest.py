"""Chunked admission by length and age: short prompts first, unless a longer one has waited long enough."""

from __future__ import annotations

from typing import Any

from sim.engine.lanes import NEVER
from sim.engine.layout import BLOCK, N_PARTIAL, N_PREEMPT, N_RUN, WAIT_HEAD, WAITING
from sim.engine.plans import add_chunk
from sim.jit import jit


@jit
def _between(mine: float, i: int, key: float, last: int, least: float, best: int) -> bool:
    """Is request i with key `mine` behind (key, last) and before (least, best)?"""
    if mine < key or (mine == key and i <= last):
        return False
    return mine < least or (mine == least and i < best)


@jit
def next_prompt(
    q: Any, r: Any, length: float, gamma: float, key: float, last: int, partial_only: bool
) -> tuple[int, float]:
    """The prompt behind (key, last) in the order of length x remaining tokens - gamma x age, and its key; -1 if none.

    Age grows alike for all, so that length x remaining + gamma x arrival is the same order.
    """
    best, least = -1, NEVER
    for n in range(r.iv[N_PARTIAL]):
        i = r.partial[n]
        mine = length * (q.target[i] - q.computed[i]) + gamma * q.arrival_s[i]
        if _between(mine, i, key, last, least, best):
            best, least = i, mine
    i = -1 if partial_only else r.iv[WAIT_HEAD]
    while i >= 0:
        age = gamma * q.arrival_s[i]
        # all behind it came later, but for the evicted, which stand in front
        if age > least and q.preempted[i] == 0:
            break
        mine = length * q.target[i] + age
        if _between(mine, i, key, last, least, best):
            best, least = i, mine
        i = q.next[i]
    return best, least


@jit
def fill_shortest(
    q: Any, r: Any, a: Any, weights: Any, budget: int, most_seqs: int, spare: int, free: int
) -> None:
    """Plan chunks in the order of `next_prompt` by `weights`, length and gamma, up to a token budget.

    An admitted prompt gets the blocks of its whole length, of `free` ones `spare` stay free. Who finds no blocks or no
    slot holds up those that wait behind; nobody is admitted where somebody is evicted.
    """
    running, closed = r.iv[N_RUN], a.iv[N_PREEMPT] > 0
    i, key = -1, -NEVER
    while budget > 0:
        i, key = next_prompt(q, r, weights[0], weights[1], key, i, closed)
        if i < 0:
            break
        if q.phase[i] == WAITING:
            need = -(-q.target[i] // r.iv[BLOCK])
            if running >= most_seqs or free - need < spare:
                closed = True
                continue
            free -= need
            running += 1
        tokens = min(q.target[i] - q.computed[i], budget)
        add_chunk(a, i, tokens, q.target[i])
        budget -= tokens

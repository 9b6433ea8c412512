"""Requests that change replica after their first token, on the arrays of both: what the coordinator of pools calls.

On the replica that computed the prompt, the KV of a request that was handed over keeps its blocks until all of it has
arrived where the request will decode; there, blocks are claimed when the transfer is agreed. A request whose KV has
come waits in that replica's queue with its blocks.
"""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    BLOCK,
    BUSY,
    FREE,
    HANDED,
    HANDED_AREA,
    HANDED_BLOCK_S,
    HANDED_BLOCKS,
    HANDED_OVER,
    HANDED_SINCE,
    IN_DECODE,
    INCOMING,
    N_DONE,
    RESERVED,
    STEP,
    WAITING,
)
from sim.engine.queues import push_waiting, remove_running
from sim.jit import jit


@jit
def count_handed(r: Any, requests: int, blocks: int, t: float) -> None:
    """At time t so many more requests are handed over, and so many more blocks hold KV that is on its way."""
    iv, fv = r.iv, r.fv
    seconds = t - fv[HANDED_SINCE]
    fv[HANDED_AREA] += iv[HANDED_OVER] * seconds
    fv[HANDED_BLOCK_S] += iv[HANDED_BLOCKS] * seconds
    fv[HANDED_SINCE] = t
    iv[HANDED_OVER] += requests
    iv[HANDED_BLOCKS] += blocks


@jit
def hand_over(q: Any, r: Any, i: int, end: float) -> None:
    """Running request i has made its first token here at `end` and makes no other."""
    remove_running(q, r, i, end)
    count_handed(r, 1, q.blocks[i], end)
    q.phase[i] = HANDED
    tell(r, i)


@jit
def tell(r: Any, i: int) -> None:
    """Let the cluster know of request i when this step has been committed."""
    r.done[r.iv[N_DONE]] = i
    r.iv[N_DONE] += 1


@jit
def free_now(r: Any) -> int:
    """Blocks that are free and that the step in flight does not want."""
    iv = r.iv
    wanted = r.block_phase[iv[STEP] % iv[BLOCK]] if iv[BUSY] == 1 and iv[IN_DECODE] == 1 else 0
    return int(iv[FREE] - wanted)


@jit
def claim(r: Any, blocks: int, reserve: int, t: float) -> None:
    """Take blocks for KV that will come, and promise `reserve` of them in all to its request."""
    r.iv[FREE] -= blocks
    r.iv[INCOMING] += blocks
    r.iv[RESERVED] += reserve
    count_handed(r, 0, blocks, t)


@jit
def unclaim(r: Any, blocks: int, reserve: int, t: float) -> None:
    """Give back a claim whose request needs no more tokens."""
    claim(r, -blocks, -reserve, t)


@jit
def let_go(q: Any, r: Any, i: int, t: float) -> None:
    """The KV of request i, handed over, is not needed here any more."""
    r.iv[FREE] += q.blocks[i]
    r.iv[RESERVED] -= q.reserved[i]
    q.reserved[i] = 0
    count_handed(r, -1, -q.blocks[i], t)


@jit
def take_over(q: Any, r: Any, i: int, reserve: int, t: float) -> None:
    """All KV of request i has come into the blocks claimed here: it waits to decode."""
    count_handed(r, 0, -q.blocks[i], t)
    q.reserved[i] = reserve
    q.hands_over[i] = 0
    q.phase[i] = WAITING
    push_waiting(q, r, i, False, t)


@jit
def start_again(q: Any, r: Any, i: int, t: float) -> None:
    """Request i comes without its KV, which was dropped: it computes its prompt and its tokens again here."""
    q.blocks[i] = 0
    q.computed[i] = 0
    q.target[i] = q.prompt[i] + q.generated[i]
    q.hands_over[i] = 0
    q.preempted[i] += 1
    q.phase[i] = WAITING
    push_waiting(q, r, i, True, t)

"""Plans of a replica in a pool: besides chunks and decodes, requests that join with KV from elsewhere, and swaps."""

from __future__ import annotations

from typing import Any

from sim.engine.cohort import add_ready, blocks_now, evict, fail, preempt
from sim.engine.lane import execute
from sim.engine.layout import (
    BLOCK,
    BURST,
    E_BLOCKS,
    E_PHASE,
    E_SLOTS,
    ERROR,
    FREE,
    INCOMING,
    LINK_LOST_S,
    N_JOIN,
    N_PREEMPT,
    N_RUN,
    NOW,
    ON_HOST,
    REPEAT,
    RESERVED,
    STEP_START,
    SWAP,
    WAITING,
)
from sim.engine.plans import clear_plan
from sim.engine.queues import push_running, remove_waiting
from sim.jit import jit


@jit
def clear_pooled(a: Any) -> None:
    """An empty plan: decode everybody once, nobody joins or leaves."""
    clear_plan(a)
    a.iv[N_JOIN] = 0
    a.iv[SWAP] = 0


@jit
def add_join(a: Any, i: int) -> None:
    """Plan that waiting request i, whose KV is here or on the host, decodes from now on."""
    a.join[a.iv[N_JOIN]] = i
    a.iv[N_JOIN] += 1


@jit
def has_kv(q: Any, i: int) -> bool:
    """Has waiting request i its KV, here or on the host, so that it needs no prefill?"""
    return bool(q.computed[i] == q.target[i])


@jit
def blocks_of(r: Any, tokens: int) -> int:
    """Blocks that so many tokens take."""
    return int(-(-tokens // r.iv[BLOCK]))


@jit
def kv_blocks(q: Any, r: Any, i: int) -> int:
    """Blocks that the computed tokens of waiting request i take."""
    return blocks_of(r, q.computed[i])


@jit
def promise(q: Any, r: Any, i: int, blocks: int) -> None:
    """Promise blocks to request i, which the plan is about to admit; it loses them when it ends or is evicted."""
    r.iv[RESERVED] += blocks - q.reserved[i]
    q.reserved[i] = blocks


@jit
def _swap_out(q: Any, r: Any, i: int) -> int:
    """Evict request i to the host; returns the blocks that are copied."""
    held = blocks_now(q, r, i)
    if not evict(q, r, i, True, r.fv[NOW]):
        return 0
    q.target[i] = q.computed[i]
    r.iv[ON_HOST] += held
    return int(held)


@jit
def _join(q: Any, r: Any, i: int) -> int:
    """Request i leaves the queue for the batch; returns the blocks that are copied back from the host."""
    iv = r.iv
    if q.phase[i] != WAITING or q.computed[i] != q.target[i]:
        fail(r, E_PHASE, i)
        return 0
    if iv[N_RUN] + 1 >= len(r.ready):
        fail(r, E_SLOTS, i)
        return 0
    copied = 0
    if q.blocks[i] > 0:
        iv[INCOMING] -= q.blocks[i]
    else:
        copied = kv_blocks(q, r, i)
        if copied > iv[FREE]:
            fail(r, E_BLOCKS, i)
            return 0
        iv[FREE] -= copied
        iv[ON_HOST] -= copied
        q.blocks[i] = copied
    remove_waiting(q, r, i, r.fv[NOW])
    push_running(q, r, i, r.fv[NOW])
    add_ready(q, r, i)
    return copied


@jit
def execute_pooled(q: Any, r: Any, a: Any, p: Any, copy_s: float, look_ahead: float) -> bool:
    """Carry out the plan of a replica in a pool: swaps and joins, then the launch, which waits for the copies and takes
    longer by what KV transfers beside earlier ones have cost.

    `copy_s`: seconds to move one block between GPU and host. False if nothing was launched.
    """
    copied = 0
    # a step that follows an idle time has had no transfer beside the one before
    lost_s = r.fv[LINK_LOST_S] if r.fv[NOW] == r.fv[STEP_START] else 0.0
    r.fv[LINK_LOST_S] = 0.0
    for n in range(a.iv[N_PREEMPT]):
        if a.iv[SWAP] == 1:
            copied += _swap_out(q, r, a.preempt[n])
        else:
            preempt(q, r, a.preempt[n], True, r.fv[NOW])
    a.iv[N_PREEMPT] = 0
    for n in range(a.iv[N_JOIN]):
        copied += _join(q, r, a.join[n])
        if r.iv[ERROR] != 0:
            return False
    if copied > 0 or lost_s > 0.0:
        a.iv[REPEAT] = 1
    if not execute(q, r, a, p, look_ahead):
        return False
    if copied > 0 or lost_s > 0.0:
        pause = copied * copy_s + lost_s
        for n in range(r.iv[BURST]):
            r.ends[n] += pause
    return True

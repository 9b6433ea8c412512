"""The cohort: all requests that decode together.

Every cohort step gives each member one token, so progress is one counter: a member that joined at step j with g
tokens has g + (STEP - j) of them now. KV growth needs no look at the members either: a member needs a new block
at the steps that are congruent, modulo the block size, to the step at which its last block is full.

The longest gap between a member's tokens is a maximum over the steps since it joined. `epoch_key/max` hold those
suffix maxima as a stack: entry e covers members that joined from step epoch_key[e] on, and epoch_max falls from
bottom to top.
"""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    BLOCK,
    COHORT,
    CONTEXT,
    DECODE,
    DONE,
    E_PHASE,
    ERROR,
    ERROR_ID,
    FINISHED_COUNT,
    FREE,
    LAST_END,
    N_DONE,
    N_EPOCH,
    N_LOG,
    N_PARTIAL,
    N_READY,
    PREFILL,
    READY,
    RESERVED,
    RUN_HEAD,
    STEP,
    WAITING,
)
from sim.engine.queues import heap_push, heap_remove, push_waiting, remove_running
from sim.engine.ragged import join_leaders, leave_leaders
from sim.jit import jit


@jit
def fail(r: Any, code: int, i: int) -> None:
    """Note a plan's first error; the engine raises it when the compiled call returns."""
    if r.iv[ERROR] == 0:
        r.iv[ERROR] = code
        r.iv[ERROR_ID] = i


@jit
def computed_now(q: Any, r: Any, i: int) -> int:
    """Tokens of request i whose KV is in the pool."""
    done: int = q.computed[i]
    if q.phase[i] == DECODE:
        done += r.iv[STEP] - q.joined[i]
    return done


@jit
def generated_now(q: Any, r: Any, i: int) -> int:
    """Output tokens of request i so far."""
    done: int = q.generated[i]
    if q.phase[i] == DECODE:
        done += r.iv[STEP] - q.joined[i]
    return done


@jit
def blocks_now(q: Any, r: Any, i: int) -> int:
    """KV blocks that request i holds."""
    held: int = q.blocks[i]
    if q.phase[i] == DECODE:
        held = max(held, -(-computed_now(q, r, i) // r.iv[BLOCK]))
    return held


@jit
def needs_block(q: Any, r: Any, i: int) -> int:
    """1 if decoding one more token of request i takes a new block, else 0."""
    return 1 if computed_now(q, r, i) == blocks_now(q, r, i) * r.iv[BLOCK] else 0


@jit
def decode_need(q: Any, r: Any) -> int:
    """New blocks that a step of every decodable request takes."""
    need: int = r.block_phase[r.iv[STEP] % r.iv[BLOCK]]
    for n in range(r.iv[N_READY]):
        need += needs_block(q, r, r.ready[n])
    return need


@jit
def log_gap(r: Any, gap: float, end: float, count: int) -> None:
    """Record that `count` tokens appeared at `end`, each `gap` after the one before it."""
    n = r.iv[N_LOG]
    if n > 0 and r.log_gap[n - 1] == gap and r.log_end[n - 1] == end:
        r.log_count[n - 1] += count
        return
    r.log_gap[n] = gap
    r.log_end[n] = end
    r.log_count[n] = count
    r.iv[N_LOG] = n + 1


@jit
def _drop_dead_epochs(q: Any, r: Any) -> None:
    n = r.iv[N_EPOCH]
    for e in range(n):
        r.epoch_live[e] = 0
    i = r.iv[RUN_HEAD]
    while i >= 0:
        if q.phase[i] == DECODE:
            r.epoch_live[_epoch_of(r, q.joined[i] + 1)] = 1
        i = q.next[i]
    kept = 0
    for e in range(n):
        if r.epoch_live[e] == 1:
            r.epoch_key[kept] = r.epoch_key[e]
            r.epoch_max[kept] = r.epoch_max[e]
            kept += 1
    r.iv[N_EPOCH] = kept


@jit
def _epoch_of(r: Any, key: int) -> int:
    low, high = 0, r.iv[N_EPOCH] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if r.epoch_key[middle] <= key:
            low = middle
        else:
            high = middle - 1
    return low


@jit
def open_epoch(q: Any, r: Any, key: int) -> None:
    """Members that join now see the gaps of the steps from `key` on."""
    if r.iv[N_EPOCH] >= len(r.epoch_key) - 1:
        _drop_dead_epochs(q, r)
    n = r.iv[N_EPOCH]
    r.epoch_key[n] = key
    r.epoch_max[n] = 0.0
    r.iv[N_EPOCH] = n + 1


@jit
def widen_epochs(r: Any, gap: float) -> None:
    """Take one cohort gap into the suffix maxima."""
    n = r.iv[N_EPOCH]
    if n == 0 or gap <= r.epoch_max[n - 1]:
        return
    r.epoch_max[n - 1] = gap
    while n >= 2 and r.epoch_max[n - 1] >= r.epoch_max[n - 2]:
        r.epoch_max[n - 2] = r.epoch_max[n - 1]
        n -= 1
    r.iv[N_EPOCH] = n


@jit
def join(q: Any, r: Any, i: int) -> None:
    """Ready request i becomes a member: it takes part in the step about to be launched."""
    iv = r.iv
    step = iv[STEP]
    q.phase[i] = DECODE
    q.joined[i] = step
    iv[COHORT] += 1
    iv[CONTEXT] += q.computed[i]
    r.block_phase[(step + q.blocks[i] * iv[BLOCK] - q.computed[i]) % iv[BLOCK]] += 1
    heap_push(q, r, step + q.output[i] - q.generated[i], i)
    join_leaders(q, r, i)


@jit
def leave(q: Any, r: Any, i: int) -> None:
    """Member i leaves the cohort with its counters brought up to date."""
    iv = r.iv
    heap_remove(q, r, i)
    leave_leaders(q, r, i)
    if iv[STEP] > q.joined[i]:
        if iv[N_EPOCH] > 0 and iv[STEP] > q.joined[i] + 1:
            longest = r.epoch_max[_epoch_of(r, q.joined[i] + 1)]
            q.max_itl_s[i] = max(q.max_itl_s[i], longest)
        q.last_s[i] = r.fv[LAST_END]
    done, made, held = computed_now(q, r, i), generated_now(q, r, i), blocks_now(q, r, i)
    iv[COHORT] -= 1
    iv[CONTEXT] -= done
    r.block_phase[(q.joined[i] + q.blocks[i] * iv[BLOCK] - q.computed[i]) % iv[BLOCK]] -= 1
    q.computed[i] = done
    q.generated[i] = made
    q.blocks[i] = held
    q.phase[i] = READY
    if iv[COHORT] == 0:
        iv[N_EPOCH] = 0


@jit
def add_ready(q: Any, r: Any, i: int) -> None:
    """Request i can decode from the next decode launch on."""
    q.phase[i] = READY
    r.ready[r.iv[N_READY]] = i
    r.iv[N_READY] += 1


@jit
def _drop(values: Any, n: int, i: int) -> int:
    """Remove i from values[:n], keeping the order; returns the new length."""
    kept = 0
    for at in range(n):
        if values[at] != i:
            values[kept] = values[at]
            kept += 1
    return kept


@jit
def drop_partial(r: Any, i: int) -> None:
    """Request i has no unfinished prompt any more."""
    r.iv[N_PARTIAL] = _drop(r.partial, r.iv[N_PARTIAL], i)


@jit
def _free(q: Any, r: Any, i: int) -> None:
    """Give back the blocks of request i, and those promised to it."""
    r.iv[FREE] += q.blocks[i]
    q.blocks[i] = 0
    r.iv[RESERVED] -= q.reserved[i]
    q.reserved[i] = 0


@jit
def finish(q: Any, r: Any, i: int, end: float) -> None:
    """Request i, not in the cohort, has made its last token at `end`: free what it holds."""
    _free(q, r, i)
    q.phase[i] = DONE
    q.finish_s[i] = end
    remove_running(q, r, i, end)
    r.done[r.iv[N_DONE]] = i
    r.iv[N_DONE] += 1
    r.iv[FINISHED_COUNT] += 1


@jit
def evict(q: Any, r: Any, i: int, front: bool, t: float) -> bool:
    """Put running request i back into the queue, its blocks freed; False if it does not run."""
    if q.phase[i] == DECODE:
        leave(q, r, i)
    elif q.phase[i] == READY:
        r.iv[N_READY] = _drop(r.ready, r.iv[N_READY], i)
    elif q.phase[i] == PREFILL:
        drop_partial(r, i)
    else:
        fail(r, E_PHASE, i)
        return False
    _free(q, r, i)
    q.preempted[i] += 1
    remove_running(q, r, i, t)
    q.phase[i] = WAITING
    push_waiting(q, r, i, front, t)
    return True


@jit
def preempt(q: Any, r: Any, i: int, front: bool, t: float) -> None:
    """Evict running request i; it will recompute its prompt and what it has generated."""
    if evict(q, r, i, front, t):
        q.computed[i] = 0
        q.target[i] = q.prompt[i] + q.generated[i]

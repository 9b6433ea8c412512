"""What the one-lane policies share: whom they evict when a decode or a chunk finds no free block."""

from __future__ import annotations

from typing import Any

from sim.engine.cohort import blocks_now, needs_block
from sim.engine.layout import BLOCK, FREE, N_CHUNKS, PREFILL, RUN_HEAD, RUN_TAIL
from sim.engine.plans import add_victim, is_victim
from sim.engine.queues import more_urgent
from sim.jit import jit


@jit
def decodes_in_order(q: Any, r: Any, a: Any) -> tuple[int, int]:
    """Give decodes their slot in order, evicting from the end; returns how many decode, and the free blocks.

    A free block must exist at each one's turn, needed or not (block managers' can_append_slots).
    """
    iv = r.iv
    free, scheduled = iv[FREE], 0
    last = iv[RUN_TAIL]
    i = iv[RUN_HEAD]
    while i >= 0:
        after = q.next[i] if i != last else -1
        if q.phase[i] != PREFILL:
            while free < 1 and last != i:
                add_victim(a, last)
                free += blocks_now(q, r, last)
                last = q.prev[last]
            if free < 1:
                add_victim(a, i)
                free += blocks_now(q, r, i)
                break
            free -= needs_block(q, r, i)
            scheduled += 1
            after = q.next[i] if i != last else -1
        i = after
    return scheduled, free


@jit
def next_victim(q: Any, r: Any, a: Any, by_priority: bool) -> int:
    """The last running request, or the least urgent one, that is not evicted yet."""
    worst, i = -1, r.iv[RUN_TAIL]
    while i >= 0:
        if not is_victim(a, i) and (worst < 0 or more_urgent(q, worst, i)):
            worst = i
            if not by_priority:
                return worst
        i = q.prev[i]
    return worst


@jit
def take_back(q: Any, r: Any, a: Any, victim: int, at: int) -> tuple[int, int]:
    """Tokens and blocks that this step has given to the victim, which is unscheduled if it stands before `at`."""
    i = r.iv[RUN_HEAD]
    while i != victim and i != at:
        i = q.next[i]
    if i == at:
        return 0, 0
    if q.phase[victim] != PREFILL:
        return 1, needs_block(q, r, victim)
    kept, tokens = 0, 0
    for c in range(a.iv[N_CHUNKS]):
        if a.chunk_id[c] == victim:
            tokens = a.chunk_tokens[c]
        else:
            a.chunk_id[kept] = a.chunk_id[c]
            a.chunk_tokens[kept] = a.chunk_tokens[c]
            a.chunk_reserve[kept] = a.chunk_reserve[c]
            kept += 1
    a.iv[N_CHUNKS] = kept
    return tokens, -(-(q.computed[victim] + tokens) // r.iv[BLOCK]) - q.blocks[victim]

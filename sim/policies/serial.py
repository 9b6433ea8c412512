"""What the one-lane policies share."""

from __future__ import annotations

from typing import Any

from sim.engine.cohort import blocks_now, needs_block
from sim.engine.layout import FREE, PREFILL, RUN_HEAD, RUN_TAIL
from sim.engine.plans import add_victim
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

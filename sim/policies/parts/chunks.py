"""Chunked admission that several policies share: unfinished prompts first, then the queue, up to a token budget."""

from __future__ import annotations

from typing import Any

from sim.engine.layout import BLOCK, N_CHUNKS, N_PARTIAL, N_PREEMPT, N_RUN, WAIT_HEAD
from sim.engine.plans import add_chunk
from sim.jit import jit


@jit
def fill_chunks(q: Any, r: Any, a: Any, budget: int, most_seqs: int, spare: int, free: int) -> int:
    """Plan chunks first come first served; an admitted prompt gets the blocks of its whole length.

    Of `free` blocks `spare` stay free; nobody is admitted where somebody is evicted. Returns the blocks left.
    """
    iv = r.iv
    for n in range(iv[N_PARTIAL]):
        if budget <= 0:
            return free
        i = r.partial[n]
        tokens = min(q.target[i] - q.computed[i], budget)
        add_chunk(a, i, tokens, q.target[i])
        budget -= tokens
    running, i = iv[N_RUN], iv[WAIT_HEAD]
    while i >= 0 and budget > 0 and running < most_seqs and a.iv[N_PREEMPT] == 0:
        need = -(-q.target[i] // iv[BLOCK])
        if free - need < spare:
            break
        tokens = min(q.target[i], budget)
        add_chunk(a, i, tokens, q.target[i])
        free -= need
        budget -= tokens
        running += 1
        i = q.next[i]
    return free


@jit
def chunk_tokens(a: Any) -> int:
    """Tokens of the planned chunks."""
    tokens = 0
    for c in range(a.iv[N_CHUNKS]):
        tokens += a.chunk_tokens[c]
    return tokens

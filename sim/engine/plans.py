"""Writing plan arrays: what compiled policies call to name chunks and victims."""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    D_DELAY_NS,
    D_LAUNCH,
    D_PART,
    D_STEPS,
    DECODE_ALL,
    GUARD,
    LEND,
    N_CHUNKS,
    N_HOLD,
    N_PREEMPT,
    P_DELAY_NS,
    P_LAYERS,
    P_MIXED,
    P_PART,
    P_POLL,
    PARK,
    REASON,
    REPEAT,
    TO_BACK,
)
from sim.jit import jit


@jit
def clear_plan(a: Any) -> None:
    """An empty plan: decode everybody once, evict nobody."""
    a.iv[N_CHUNKS] = 0
    a.iv[N_PREEMPT] = 0
    a.iv[N_HOLD] = 0
    a.iv[TO_BACK] = 0
    a.iv[GUARD] = 0
    a.iv[DECODE_ALL] = 1
    a.iv[REPEAT] = 1


@jit
def clear_lanes(a: Any) -> None:
    """An empty plan for two lanes: launch nothing."""
    clear_plan(a)
    a.iv[P_LAYERS] = 0
    a.iv[P_PART] = 0
    a.iv[P_MIXED] = 0
    a.iv[D_LAUNCH] = 0
    a.iv[D_PART] = 0
    a.iv[D_STEPS] = 1
    a.iv[LEND] = 0
    a.iv[PARK] = 0
    a.iv[REASON] = 0
    a.iv[P_DELAY_NS] = 0
    a.iv[D_DELAY_NS] = 0
    a.iv[P_POLL] = 0


@jit
def add_chunk(a: Any, i: int, tokens: int, reserve: int) -> None:
    """Plan `tokens` of request i's prompt, holding blocks for its first `reserve` tokens."""
    c = a.iv[N_CHUNKS]
    a.chunk_id[c] = i
    a.chunk_tokens[c] = tokens
    a.chunk_reserve[c] = reserve
    a.iv[N_CHUNKS] = c + 1


@jit
def add_victim(a: Any, i: int) -> None:
    """Plan to evict request i."""
    a.preempt[a.iv[N_PREEMPT]] = i
    a.iv[N_PREEMPT] += 1


@jit
def is_victim(a: Any, i: int) -> bool:
    """Does the plan evict request i?"""
    for n in range(a.iv[N_PREEMPT]):  # noqa: SIM110  (numba compiles no generator expressions)
        if a.preempt[n] == i:
            return True
    return False

"""One source for the hot code: run by CPython, or as machine code where that pays.

The first compilation of a policy's loop takes some ten seconds, a run of a thousand requests under CPython a tenth of
one; loading what has been compiled before takes hundredths. Either way gives the same bytes. LANESIM_JIT=1 asks
for machine code always, LANESIM_JIT=0 never; without it `should_compile` decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SETTING = "LANESIM_JIT"
WORTH_LOADING = 1_000  # requests in a study: a tenth of a second of CPython
WORTH_COMPILING = 200_000  # some twenty seconds
decorator: Callable[[Any], Any] | None = None  # numba's, in the process that compiles (`sim.native.compiler`)


def jit(function: F) -> F:
    """Mark a function as hot: plain arithmetic over `sim.columns`, which numba can compile."""
    marked: F = function if decorator is None else decorator(function)
    return marked


def forced() -> bool:
    """Does the setting ask for machine code?"""
    return os.environ.get(SETTING) == "1"


def should_compile(requests: int, loops: Sequence[Callable[..., Any]]) -> bool:
    """Is machine code of these functions, in which a run spends its time, worth its price for so many requests?"""
    from sim.native.store import available, is_cached

    if os.environ.get(SETTING) in ("0", "1"):
        return forced()
    if requests < WORTH_LOADING or not available():
        return False
    return requests >= WORTH_COMPILING or all(map(is_cached, loops))

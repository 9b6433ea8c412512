"""Compiled twins of hot functions: machine code from numba, cached on disk, loaded and called without it.

Hot functions (`sim.jit`) run as they stand under CPython. A `HotCode` of a run that is `compiled` gives the same
functions as machine code. They are compiled once, in a process of their own (`sim.native.compiler`), kept in the
user's cache (`sim.native.store`), and later loaded by llvmlite in hundredths of a second, where importing numba would
take most of one.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from sim.columns import FLOAT, INTEGER, Columns, kind_of
from sim.native.store import Argument, Request, compile_missing, machine_code

C = TypeVar("C", bound=Columns)

SCALARS = {"int": INTEGER, "float": FLOAT}
RESULTS: dict[str, Any] = {
    "None": ctypes.c_int64,
    "int": ctypes.c_int64,
    "float": ctypes.c_double,
    "bool": ctypes.c_bool,
}


class HotCode:
    """How one run executes hot code: by CPython, or `compiled`; and the states that this wants."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self._bound: list[_Bound] = []
        self._prepared: list[_Bound] = []

    def state(self, columns: C) -> C:
        """Arrays for machine code, lists for CPython."""
        if not self.compiled:
            return columns.as_lists()
        lists = {name: np.array(value) for name, value in columns.items() if isinstance(value, list)}
        return columns._replace(**lists) if lists else columns

    def shown(self, columns: C) -> C:
        """A state as plain Python should look at it."""
        return columns.as_views() if self.compiled else columns

    def flat(self, array: np.ndarray[Any, Any]) -> Any:
        """One array that is no part of a state."""
        return array if self.compiled else array.tolist()

    def bind(self, function: Callable[..., Any], *fixed: Any) -> Callable[..., Any]:
        """`function` with its first arguments fixed: states and flat arrays.

        To be compiled, the other parameters must be annotated as `int` or `float`, and the result as one of these,
        `bool` or None.
        """
        if not self.compiled:
            return partial(function, *fixed)
        bound = _Bound(function, fixed)
        self._bound.append(bound)
        return bound

    def prepare(self, function: Callable[..., Any], *fixed: Any) -> None:
        """Compile `function` along with the others: another run will want it."""
        if self.compiled:
            self._prepared.append(_Bound(function, fixed))

    def load(self) -> None:
        """Compile what the cache does not hold, all at once, and load it. Raises SimctlError if that fails."""
        compile_missing([bound.request for bound in (*self._bound, *self._prepared)])
        for bound in self._bound:
            bound.load()


class _Bound:
    """Machine code with its first arguments; loaded at the first call unless before."""

    def __init__(self, function: Callable[..., Any], fixed: tuple[Any, ...]) -> None:
        signature = inspect.signature(function)
        rest = list(signature.parameters.values())[len(fixed) :]
        scalars = (SCALARS[str(parameter.annotation)] for parameter in rest)
        self.request = Request(function, (*(_describe(value) for value in fixed), *scalars))
        self._fixed = fixed  # keeps the memory that the words below point to
        self._result = None if signature.return_annotation == "None" else str(signature.return_annotation)
        self._returned, self._excuse = RESULTS[str(self._result)](), ctypes.c_void_p()
        words: list[int] = [ctypes.addressof(self._returned), ctypes.addressof(self._excuse)]
        for value in fixed:
            words += [value.ctypes.data, len(value)] if isinstance(value, np.ndarray) else [value.address()]
        self._words = tuple(words)
        self._call: Callable[..., int] | None = None

    def load(self) -> Callable[..., int]:
        self._call = self._call or _entry(self.request)
        return self._call

    def __call__(self, *rest: float) -> Any:
        call = self._call or self.load()
        if call(*self._words, *rest) != 0:
            function = self.request.function
            raise RuntimeError(
                f"compiled {function.__module__}.{function.__name__} failed; LANESIM_JIT=0 shows where"
            )
        return self._returned.value if self._result else None


def _describe(value: Any) -> Argument:
    if isinstance(value, Columns):
        return type(value).__name__, tuple(value.kinds())
    return kind_of(value)


@lru_cache(maxsize=256)
def _entry(request: Request) -> Callable[..., int]:
    """Machine code as something to call: (address of the result, of the exception, argument...) -> 0 if all is well."""
    kinds: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for argument in request.arguments:
        if isinstance(argument, tuple):
            kinds.append(ctypes.c_void_p)
        elif argument.endswith("*"):
            kinds += [ctypes.c_void_p, ctypes.c_int64]
        else:
            kinds.append(ctypes.c_double if argument == FLOAT else ctypes.c_int64)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)
    call: Callable[..., int] = prototype(machine_code(request))
    return call

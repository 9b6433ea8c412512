"""A FlashInfer wrapper's kernel call, made once by its Python code and repeated for the other layers.

Between a wrapper's `run` and the kernel lie checks and tables of arguments that are the same for every layer of a pass:
only the cache differs. They cost the host more than a small pass costs the GPU. So the call is noted instead of made,
and then made for each layer with that layer's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

Cache = tuple[Any, Any]  # keys and values [pages, page size, KV heads, head dimension]


class Call:
    """`function(*args)`, with the keys and values of another layer in place of those that were noted."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], cache: Cache) -> None:
        self._function, self._args = function, list(args)
        self._at = [(n, side) for n, arg in enumerate(args) for side in (0, 1) if arg is cache[side]]
        if len({side for _, side in self._at}) < 2:
            raise LookupError("the noted call does not name the cache")

    def put(self, old: Any, new: Any) -> None:
        """Another tensor for `old`."""
        at = [n for n, arg in enumerate(self._args) if arg is old]
        if not at:
            raise LookupError("the noted call does not name the tensor")
        for n in at:
            self._args[n] = new

    def __call__(self, cache: Cache) -> None:
        """The kernel on the current stream."""
        for n, side in self._at:
            self._args[n] = cache[side]
        self._function(*self._args)


def noted(owner: Any, name: str, function: str, run: Callable[[], Any]) -> tuple[list[Any], Any]:
    """(arguments, result) of the call of `owner.name.function` that `run` makes; the call itself is left out.

    Raises LookupError if there was none: another version of FlashInfer goes other ways.
    """
    seen: list[Any] = []
    real = getattr(owner, name)
    setattr(owner, name, SimpleNamespace(**{function: lambda *args: seen.append(args)}))
    try:
        result = run()
    finally:
        setattr(owner, name, real)
    if len(seen) != 1:
        raise LookupError(f"{function} was called {len(seen)} times")
    return list(seen[0]), result

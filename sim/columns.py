"""Named flat arrays and numbers that hot code takes as one argument.

`@columns` makes a class of such names. Under CPython its instances are plain objects whose arrays are lists. Compiled
code gets a pointer to a struct of (data pointer, length) and numbers (`sim.columns_jit`): passing, say, 22 numpy
arrays by value through every call cost ten times the work itself, and most of the compile time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, dataclass_transform

import numpy as np

T = TypeVar("T")


class Columns:
    """Base of every class that `columns` makes. An array must be one-dimensional and is never replaced."""

    __slots__ = ("_address", "_kind", "_struct")  # filled in when compiled code first sees the object

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]

    def as_lists(self) -> Self:
        """The same numbers with lists for arrays: CPython reads a list several times faster."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        return type(self)(**{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()})


@dataclass_transform(frozen_default=True)
def columns(cls: type[T]) -> type[T]:
    """Make a subclass of `Columns` a frozen record of the names that it annotates."""
    return dataclass(frozen=True, slots=True, eq=False)(cls)

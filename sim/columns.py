"""Named flat arrays and numbers that hot code takes as one argument.

`@columns` makes a class of such names: the engine's states, a plan, price tables. CPython reads them as plain
objects, best with lists for arrays. Compiled code (`sim.native`) gets a pointer to a struct of data pointers, lengths
and numbers: numpy arrays passed by value through every call cost ten times the work itself, and most of the
compile time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, dataclass_transform

import numpy as np

T = TypeVar("T")

# what a value is to compiled code, as it is spelled in the keys of its cache
INTEGER, FLOAT, INTEGERS, FLOATS = "i8", "f8", "i8*", "f8*"
ARRAYS = {np.dtype(np.int64): INTEGERS, np.dtype(np.float64): FLOATS}
CODES = {np.dtype(np.int64): "q", np.dtype(np.float64): "d"}  # of the standard library's `array`
LONG = 100_000


class Columns:
    """Base of every class that `columns` makes. An array is flat, of int64 or float64, and never replaced."""

    __slots__ = ("_struct",)
    _struct: np.ndarray[Any, np.dtype[np.int64]]  # made when compiled code first gets the object

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]

    def as_lists(self) -> Self:
        """The same numbers with lists for arrays, which CPython reads several times faster.

        A long one becomes a compact `array`: a list takes four to five times its memory.
        """
        return type(self)(*(_listed(v) if isinstance(v, np.ndarray) else v for _, v in self.items()))

    def as_views(self) -> Self:
        """The same memory for single reads and writes by CPython, which take a third of the time that numpy takes."""
        return type(self)(*(v.data if isinstance(v, np.ndarray) else v for _, v in self.items()))

    def items(self) -> list[tuple[str, Any]]:
        """Names and values, in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]

    def kinds(self) -> list[tuple[str, str]]:
        """Names and kinds, in order."""
        return [(name, kind_of(value)) for name, value in self.items()]

    def address(self) -> int:
        """Where the object's struct lies: words of eight bytes in the order of the fields, two for an array (data,
        length), one for a number."""
        if not hasattr(self, "_struct"):
            words: list[int] = []
            for _, value in self.items():
                if isinstance(value, np.ndarray):
                    words += [value.ctypes.data, len(value)]
                elif isinstance(value, float):
                    words.append(int(np.float64(value).view(np.int64)))
                else:
                    words.append(int(value))
            object.__setattr__(self, "_struct", np.array(words, np.int64))
        return int(self._struct.ctypes.data)


def _listed(values: np.ndarray[Any, Any]) -> Any:
    return values.tolist() if len(values) <= LONG else array(CODES[values.dtype], values.tobytes())


def kind_of(value: Any) -> str:
    """INTEGER, FLOAT, INTEGERS or FLOATS; TypeError for what compiled code cannot take."""
    if isinstance(value, np.ndarray):
        if value.ndim == 1 and value.flags.c_contiguous and value.dtype in ARRAYS:
            return ARRAYS[value.dtype]
        raise TypeError(f"an array of {value.dtype} and shape {value.shape} is not flat int64 or float64")
    if isinstance(value, float):
        return FLOAT
    if isinstance(value, int | np.integer):
        return INTEGER
    raise TypeError(f"compiled code takes no {type(value).__name__}")


@dataclass_transform(frozen_default=True)
def columns(cls: type[T]) -> type[T]:
    """Make a subclass of `Columns` a frozen record of the names that it annotates."""
    return dataclass(frozen=True, slots=True, eq=False)(cls)

"""Attributes that are made when first looked at, without the lock of `functools.cached_property`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """`@lazy` over a method of no arguments: its result takes the attribute's place in the instance."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: Any) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> T: ...
    def __get__(self, instance: object | None, owner: Any) -> lazy[T] | T:
        if instance is None:
            return self
        made = instance.__dict__[self._name] = self._make(instance)
        return made

"""A value in a cache's key, of which only the hash of its content counts."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Keyed(Generic[T]):
    """`value`, equal to any other whose `content_hash` is the same."""

    def __init__(self, value: T, content_hash: str) -> None:
        self.value, self.content_hash = value, content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and other.content_hash == self.content_hash

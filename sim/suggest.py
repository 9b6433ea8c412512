"""The nearest valid name, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `valid`, or an empty string."""
    found = get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""

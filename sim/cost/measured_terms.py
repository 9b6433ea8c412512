"""What the fitted forms without limits of their own share: reading their terms, and answering for every shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from sim.cost.shapes import Shape
from sim.errors import SimctlError

T = TypeVar("T")


def read_terms(form: type[T], terms: Mapping[str, Any], where: str, *, positive: bool) -> T:
    """A dataclass of numbers from a mapping: all of its fields, each `positive` or at least 0.

    Raises SimctlError that names `where`.
    """
    names = {field.name for field in fields(form)}  # type: ignore[arg-type]
    right = all(float(value) > 0 if positive else float(value) >= 0 for value in terms.values())
    if set(terms) != names or not right:
        what = "positive values" if positive else "values of 0 or more"
        raise SimctlError(f"{where} must hold {what} for {', '.join(sorted(names))}.")
    return form(**{name: float(value) for name, value in terms.items()})


class Unbounded:
    """A curve of `terms` under one `label` that claims every shape."""

    label: Any
    terms: Any

    def label_for(self, shape: Shape) -> str:
        """The label, whatever the shape."""
        return str(self.label)

    def covered(self, shape: Shape, sms: int) -> bool:
        """True: the form claims every shape."""
        return True

    def fixed_s(self, shape: Shape) -> float:
        """The fixed cost of a call."""
        return float(self.terms.fixed_s)

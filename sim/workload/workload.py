"""The one columnar form that every trace and generator ends in."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError


@dataclass(frozen=True)
class Workload:
    """Requests sorted by arrival; all columns have shape (n,).

    `arrival_s` counts from the start of the run. `max_new_tokens` is what the client asks for, which some
    schedulers reserve; the true length is `output_tokens` and policies never see it. `slo_class` indexes
    `slo_classes`. A closed-loop workload has `max_concurrency` set: request i is then issued when one of the
    first i - max_concurrency + 1 has finished, and `arrival_s` is only the earliest time.
    `notes` says in sentences what the reader recognised and what was done to the rows.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    max_new_tokens: NDArray[np.int32]
    slo_class: NDArray[np.int16]
    priority: NDArray[np.int16]
    slo_classes: tuple[str, ...] = ("default",)
    max_concurrency: int | None = None
    session_id: NDArray[np.int64] | None = None
    prefix_hashes: tuple[tuple[int, ...], ...] | None = None
    rejected_overlength: int = 0
    sha256: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if n == 0:
            raise SimctlError(f"workload '{self.name}' has no requests; at least one is needed")
        for column in ("prompt_tokens", "output_tokens", "max_new_tokens", "slo_class", "priority"):
            if len(getattr(self, column)) != n:
                raise SimctlError(
                    f"workload '{self.name}': column {column} has {len(getattr(self, column))} rows, not {n}"
                )
        if not np.all(np.isfinite(self.arrival_s)) or np.any(np.diff(self.arrival_s) < 0):
            raise SimctlError(f"workload '{self.name}': arrival_s must be finite and sorted")
        if np.any(self.prompt_tokens < 1) or np.any(self.output_tokens < 1):
            raise SimctlError(
                f"workload '{self.name}': every request needs at least one prompt and one output token"
            )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def request_rate(self) -> float:
        """Mean offered rate in requests per second (gaps over span); infinite if all arrive at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span > 0 else float("inf")


def make_workload(
    name: str,
    arrival_s: NDArray[np.float64],
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    *,
    max_concurrency: int | None = None,
    notes: tuple[str, ...] = (),
) -> Workload:
    """Build a Workload of one SLO class from its three essential columns."""
    n = len(arrival_s)
    return Workload(
        name=name,
        arrival_s=np.ascontiguousarray(arrival_s, dtype=np.float64),
        prompt_tokens=np.ascontiguousarray(prompt_tokens, dtype=np.int32),
        output_tokens=np.ascontiguousarray(output_tokens, dtype=np.int32),
        max_new_tokens=np.ascontiguousarray(output_tokens, dtype=np.int32),
        slo_class=np.zeros(n, np.int16),
        priority=np.zeros(n, np.int16),
        max_concurrency=max_concurrency,
        notes=notes,
    )

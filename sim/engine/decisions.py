"""What a policy written in plain Python returns: launches, admissions and victims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefill:
    """Prompt chunks: pairs of (request id, tokens).

    On two lanes also `layers` = (first, one past the last) of the pass to run now, None for all that are left, and
    `sms`, the size of the SM set, None for the whole GPU. A pass that has begun goes on with the same chunks, which
    need not be named again.
    """

    chunks: Sequence[tuple[int, int]] = ()
    layers: tuple[int, int] | None = None
    sms: int | None = None


@dataclass(frozen=True)
class Decode:
    """One token for each of the requests; None means all that can decode.

    On two lanes also `sms`, the size of the SM set (None: the whole GPU), and `steps` launched back to back.
    """

    requests: Iterable[int] | None = None
    sms: int | None = None
    steps: int = 1


@dataclass(frozen=True)
class Mixed:
    """One forward pass with prompt chunks and decodes together, on all SMs."""

    chunks: Sequence[tuple[int, int]]
    requests: Iterable[int] | None = None


Launch = Prefill | Decode | Mixed


@dataclass(frozen=True)
class Plan:
    """A decision.

    `admit` names waiting requests that start (None: those of the chunks). `preempt` are evicted and recomputed later;
    evictions alone are carried out, and the policy is asked again. `repeat_for`, on one lane, is how many times the
    same decode plan may repeat unasked; it ends early when a request arrives or finishes. `reason`, on two lanes, is a
    number of your own for the step log.
    """

    launches: Sequence[Launch] = ()
    admit: Iterable[int] | None = None
    preempt: Iterable[int] = ()
    repeat_for: int = 1
    reason: int = 0

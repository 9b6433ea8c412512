"""A device without a GPU: launches take what they are told to take, on a clock that jumps. For tests and dry runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calib.executor.work import Work


class DryDevice:
    """Launches last `seconds(work)`; by default what the price tables say of them alone."""

    def __init__(self, seconds: Callable[[Work], float] = lambda work: work.solo_s) -> None:
        self._seconds = seconds
        self._ends: dict[int, float] = {}
        self._now = 0.0

    def start(self) -> None:
        """The clock stands at zero."""

    def prepare(self, works: Sequence[Work], pairs: Sequence[tuple[int, int]] = ()) -> dict[str, int]:
        """Nothing to capture."""
        return {}

    def forget(self) -> None:
        """The clock goes back to zero."""
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def launch(self, work: Work, released: list[int]) -> None:
        """Note when it will end."""
        self._ends[work.lane] = work.start_s + self._seconds(work)

    def wait(self, until_s: float) -> list[tuple[int, float]]:
        """Jump to the next end or to `until_s`."""
        first = min(self._ends.values(), default=until_s)
        self._now = max(self._now, min(first, until_s))
        ended = sorted((end, lane) for lane, end in self._ends.items() if end <= self._now)
        for _, lane in ended:
            del self._ends[lane]
        return [(lane, end) for end, lane in ended]

    def measured(self, lane: int) -> dict[str, float]:
        """Nothing to add."""
        return {}

"""What is on its way on a lane of the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from calib.executor.batch import Batch
from calib.executor.place import Place
from calib.executor.work import Work


class Flight:
    """A launch on the GPU: events around it, its batch, and where its tokens arrive."""

    def __init__(self, torch: Any, sequences: int) -> None:
        event = torch.cuda.Event
        self.start, self.end = event(enable_timing=True), event(enable_timing=True)
        self.sent = event()  # its tables have left the host
        self.read = torch.zeros(sequences, dtype=torch.int64, pin_memory=True)
        self.batch: Batch


class Lane:
    """What is in flight on a lane, the running one first, and what of it is still to be launched."""

    def __init__(self, torch: Any, sequences: int) -> None:
        self.spare = [Flight(torch, sequences), Flight(torch, sequences)]
        self.flights: deque[Flight] = deque()
        self.pending: Iterator[None] | None = None
        self.place: Place
        self.work: Work
        self.chain: Work  # the first of the steps that started at once
        self.launched = 0  # of these
        self.seen: dict[str, Any] = {}

    def ended(self) -> bool:
        """Has the running launch, all of which is on the GPU, ended there?"""
        return self.pending is None and bool(self.flights[0].end.query())

    def may_go_ahead(self) -> bool:
        """Can the next step be queued? The tables of the last one have left the host's buffers."""
        waiting = self.launched < self.chain.steps and len(self.flights) < 2
        return waiting and bool(self.flights[-1].sent.query())

    def clear(self) -> None:
        """Nothing is in flight."""
        self.spare += self.flights
        self.flights.clear()
        self.pending, self.launched = None, 0

"""Where a rank works: a CUDA device with its events, graphs and streams, or the CPU in tests and dry runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from calib.graphs import captured

HOLD_MHZ = 1980  # clock that a hold is counted in: never shorter than asked for


class CudaStage:
    """The process's CUDA device 0."""

    backend, device = "nccl", "cuda"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream()
        self._events: list[Any] = []

    def on(self, stream: Any = None) -> Any:
        """A context manager: work goes to `stream`, by default this stage's own."""
        return self.torch.cuda.stream(stream or self.stream)

    def events(self, count: int, first: int = 0) -> list[Any]:
        """`count` timing events out of a pool, from `first` on."""
        while len(self._events) < first + count:
            self._events.append(self.torch.cuda.Event(enable_timing=True))
        return self._events[first : first + count]

    def record(self, event: Any) -> None:
        event.record(self.torch.cuda.current_stream())

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def sync(self) -> None:
        self.torch.cuda.synchronize()

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy, so that the host can enqueue what is timed behind it."""
        self.torch.cuda._sleep(int(seconds * HOLD_MHZ * 1e6))

    def capture(self, calls: Callable[[], Any]) -> Callable[[], Any]:
        """Replay of a CUDA graph of `calls` on the current stream, which must have run before."""
        self.torch.cuda.current_stream().synchronize()
        graph = captured(self.torch, calls)
        replay: Callable[[], Any] = graph.replay
        return replay


class CpuStage:
    """The CPU, where calls have returned when their work is done: a graph is a list of calls, an event a time."""

    backend, device = "gloo", "cpu"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.stream = None

    def on(self, stream: Any = None) -> Any:
        return nullcontext()

    def events(self, count: int, first: int = 0) -> list[Any]:
        return [[0.0] for _ in range(count)]

    def record(self, event: Any) -> None:
        event[0] = time.perf_counter()

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(end[0] - start[0])

    def sync(self) -> None:
        pass

    def hold(self, seconds: float) -> None:
        pass

    def capture(self, calls: Callable[[], Any]) -> Callable[[], Any]:
        return calls

"""CUDA graphs of what is launched on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def captured(torch: Any, launch: Callable[[], Any], pool: Any = None) -> Any:
    """A CUDA graph of what `launch` launches on the current stream; its memory out of `pool` (None: its own).

    Only this thread is held to what a capture permits: NCCL's threads may call CUDA meanwhile. What `launch` raises
    comes through, after the capture has been ended.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        launch()
    except BaseException:
        try:
            graph.capture_end()
        except Exception:  # the capture is invalid; what raised first is what matters
            graph = None
        raise
    graph.capture_end()
    return graph

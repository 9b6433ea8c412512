"""Keeps the host's one thread undisturbed during a run: a core of its own, no garbage collection, high priority."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any

CORES_APART = 2  # two programs on one machine, a GPU each, take cores so far from each other
NICE = -10


class QuietHost:
    """A context in which a run is served. `number`: which of several programs on the machine this is.

    What the system does not permit is left as it is; `facts` says what was done.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._core: int | None = None
        self._nice: int | None = None

    def __enter__(self) -> None:
        self._allowed = os.sched_getaffinity(0)
        cores = sorted(self._allowed)
        core = cores[-1 - (CORES_APART * self._number) % len(cores)]
        with suppress(OSError):
            os.sched_setaffinity(0, {core})
            self._core = core
        if self._nice is None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, NICE)
                self._nice = NICE
        gc.collect()
        gc.disable()

    def __exit__(self, *_: Any) -> None:
        gc.enable()
        with suppress(OSError):
            os.sched_setaffinity(0, self._allowed)

    def facts(self) -> dict[str, Any]:
        """Core and priority of the serving thread, None where the system refused; it does not sleep while work runs."""
        return {"core": self._core, "nice": self._nice, "waits": "spinning", "gc": "off during a run"}

"""Physical KV pages of the requests in flight; page 0 is nobody's: padded rows write there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calib.arena import PAGE
from sim.errors import CalibrationError

Ints = NDArray[np.int32]


class PagePool:
    """Hands out pages 1..count and takes them back."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: dict[int, Ints] = {}
        self.clear()

    def clear(self) -> None:
        """Every page is free."""
        self._free = list(range(self._count, 0, -1))
        self._held.clear()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def hold(self, request: int, tokens: int) -> Ints:
        """The request's pages for its first `tokens` tokens, taking new ones where it has too few.

        Raises CalibrationError if none is left: the engine's count of blocks and ours have parted.
        """
        need = -(-tokens // PAGE)
        held = self._held.get(request)
        have = 0 if held is None else len(held)
        if need > have:
            if need - have > len(self._free):
                raise CalibrationError(
                    f"request {request} needs {need - have} KV pages more and {len(self._free)} are free: "
                    "the engine allowed what the device does not hold"
                )
            new = np.array([self._free.pop() for _ in range(need - have)], np.int32)
            held = new if held is None else np.concatenate([held, new])
            self._held[request] = held
        assert held is not None
        return held[:need]

    def release(self, request: int) -> None:
        """Take back what the request holds."""
        self._free.extend(self._held.pop(request, np.zeros(0, np.int32)).tolist()[::-1])

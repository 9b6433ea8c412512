"""A fused kernel's seconds on a grid of shapes, computed when a profile is made: a simulation looks them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sim.cost.fused_ctas import FusedShape
from sim.cost.shapes import Floats

# keys: mean of a chunk's rows. Batches are dense where decode's contexts still are split
Q_AXIS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
KEY_AXIS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCH_AXIS = (1, 4, 8, 12, 16, 24, 32, 40, 64, 96, 128, 192, 256)
CONTEXT_AXIS = (256, 1024, 2048, 4096, 8192, 16384, 32768)
AXES = (Q_AXIS, KEY_AXIS, BATCH_AXIS, CONTEXT_AXIS)
SHAPE = tuple(map(len, AXES))
STEP = 1e-3  # of a logarithm of microseconds, in which a file has them


def shape_of(q: int, keys: float, batch: int, context: float) -> FusedShape:
    """Chunk of `q` tokens whose rows see `keys` on average, beside `batch` contexts alike."""
    history = max(0, int(keys) - (q + 1) // 2)
    return FusedShape(q, history, (max(1, int(context)),) * batch)


def cells() -> Iterator[FusedShape]:
    """Shapes of the grid in order, the last axis fastest."""
    for q in Q_AXIS:
        for keys in KEY_AXIS:
            for batch in BATCH_AXIS:
                for context in CONTEXT_AXIS:
                    yield shape_of(q, keys, batch, context)


def packed(seconds: Floats) -> list[int]:
    """A grid of seconds as whole numbers."""
    return [int(v) for v in np.round(np.log(seconds.ravel() * 1e6) / STEP)]


def unpacked(numbers: Sequence[int]) -> Floats:
    """The grid out of `packed`, shape `SHAPE`; ValueError if they are not as many."""
    return np.exp(np.array(numbers, dtype=np.float64).reshape(SHAPE) * STEP) * 1e-6


def looked_up(grid: Floats, q: Any, keys: Any, batch: Any, context: Any) -> Floats:
    """Seconds at every combination of the four lists, shape of their lengths: linear in logarithms along each axis, off
    it as at its edge."""
    found = np.log(grid)
    for axis, at in zip(AXES, (q, keys, batch, context), strict=True):
        # the first axis is replaced and goes last, so that four turns restore the order
        found = np.tensordot(found, _weights(axis, at), axes=(0, 1))
    return np.asarray(np.exp(found))


def _weights(axis: tuple[int, ...], at: Any) -> Floats:
    """Share of each knot in each value, shape (values, knots)."""
    knots = np.log2(np.array(axis, dtype=np.float64))
    place = np.interp(np.log2(np.maximum(np.asarray(at, dtype=np.float64), 1.0)), knots, np.arange(len(axis)))
    return np.asarray(np.maximum(0.0, 1.0 - np.abs(place[:, None] - np.arange(len(axis)))))

"""What a policy can learn online within its fixed state: percentiles by histogram, and a line by least squares."""

from __future__ import annotations

from typing import Any

from sim.jit import jit

BINS = 25
BEFORE, EVERY = 12, 3  # bins up to the reference; bins an octave
SUMS = 5  # of a fit: weight, z, z z, y, z y


def edges(reference: float) -> list[float]:
    """Upper edges of the histogram's bins: 12 are at most the reference, 3 an octave, from 1/16 to 16 of it."""
    return [reference * 2.0 ** ((n - BEFORE) / EVERY) for n in range(BINS)]


@jit
def count_value(counts: Any, at: int, upper: Any, first: int, value: float) -> None:
    """Count a value in the bins `counts[at:]` with edges `upper[first:]`; the last bin takes all above."""
    low, high = 0, BINS - 1
    while low < high:
        middle = (low + high) // 2
        if value <= upper[first + middle]:
            high = middle
        else:
            low = middle + 1
    counts[at + low] += 1


@jit
def percentile(counts: Any, at: int, upper: Any, first: int, share: float) -> float:
    """The value below which `share` of the counted ones lie, linear within its bin; 0 if none was counted."""
    total = 0
    for n in range(BINS):
        total += counts[at + n]
    wanted, below = share * total, 0
    for n in range(BINS):
        here = counts[at + n]
        if here > 0 and below + here >= wanted:
            low = upper[first + n - 1] if n > 0 else 0.0
            return float(low + (upper[first + n] - low) * (wanted - below) / here)
        below += here
    return 0.0


@jit
def add_point(sums: Any, at: int, keep: float, z: float, y: float) -> None:
    """A point (z, y) for the line of `sums[at:]`; the weight of earlier ones is multiplied by `keep`."""
    for n in range(SUMS):
        sums[at + n] *= keep
    sums[at] += 1.0
    sums[at + 1] += z
    sums[at + 2] += z * z
    sums[at + 3] += y
    sums[at + 4] += z * y


@jit
def line_value(sums: Any, at: int, shape: float, z: float) -> float:
    """The fitted line a z + b at z. Where the points tell no rising line, it is that with b = `shape` a.

    0 without points.
    """
    weight, of_z, of_y = sums[at], sums[at + 1], sums[at + 3]
    if weight <= 0.0:
        return 0.0
    spread = weight * sums[at + 2] - of_z * of_z
    if spread > 1e-3 * of_z * of_z:
        a = (weight * sums[at + 4] - of_z * of_y) / spread
        b = (of_y - a * of_z) / weight
        if a > 0.0 and b >= 0.0:
            return float(a * z + b)
    a = of_y / (of_z + shape * weight)
    return float(a * (z + shape))

"""What two launches on disjoint SM sets cost each other: an analytic guess until whole steps are measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.cost.shapes import Demand, Floats

Flags = NDArray[np.bool_]
LABEL = "extrapolated from first H200 co-runs by shared bandwidth"
# share of the data sheet's bandwidth at which two streams together begin to queue
USABLE_HBM = 0.88


def slowdown_factors(a: Demand, b: Demand, split: tuple[int, int], overlap: int = 0) -> tuple[float, float]:
    """Factors >= 1 for launches a and b on `split` SMs, `overlap` of them common to both.

    Bandwidth: 1 + max(0, (b_a + b_b) / B - 1) x own share of memory-bound time, so that a neighbour of zero
    demand costs nothing. Common SMs are shared half and half while both run.
    """
    of_a, of_b = slowdown_table([a], [b], split, overlap)
    return float(of_a[0, 0]), float(of_b[0, 0])


def slowdown_table(
    a: Sequence[Demand], b: Sequence[Demand], split: tuple[int, int], overlap: int = 0
) -> tuple[Floats, Floats]:
    """`slowdown_factors` of every a beside every b: two arrays of shape (len(a), len(b))."""
    of_a, of_b = (
        (
            np.array([one.hbm for one in side], dtype=np.float64),
            np.array([one.hbm > 0 or one.tensor > 0 for one in side], dtype=bool),
        )
        for side in (a, b)
    )
    return slowdown_arrays(of_a, of_b, split, overlap)


def slowdown_arrays(
    a: tuple[Floats, Flags], b: tuple[Floats, Flags], split: tuple[int, int], overlap: int = 0
) -> tuple[Floats, Floats]:
    """`slowdown_table` of (HBM demand, does it do anything?) of each launch, as arrays."""
    hbm_a, busy_a = a[0][:, None], a[1][:, None]
    hbm_b, busy_b = b[0][None, :], b[1][None, :]
    excess = np.maximum(0.0, (hbm_a + hbm_b) / USABLE_HBM - 1.0)
    return tuple(  # type: ignore[return-value]
        (1.0 + np.where(other > 0, excess * own / USABLE_HBM, 0.0))
        * np.where(busy & (overlap > 0), sms / (sms - overlap / 2.0), 1.0)
        for own, other, busy, sms in ((hbm_a, hbm_b, busy_b, split[0]), (hbm_b, hbm_a, busy_a, split[1]))
    )

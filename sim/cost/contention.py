"""What two launches on disjoint SM sets cost each other: an analytic guess for GPUs where nobody measured it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.cost.shapes import Floats

Flags = NDArray[np.bool_]
LABEL = "extrapolated from first H200 co-runs by shared bandwidth"
# share of the data sheet's bandwidth at which two streams together begin to queue
USABLE_HBM = 0.88


def slowdown_arrays(
    a: tuple[Floats, Flags], b: tuple[Floats, Flags], split: tuple[int, int], overlap: int = 0
) -> tuple[Floats, Floats]:
    """Factors >= 1 on every a beside every b, shape (len(a), len(b)) each, on `split` SMs, `overlap` of them common.

    A side is (share of the data sheet's bandwidth, does it do anything?) of each launch. Bandwidth: 1 + max(0,
    (b_a + b_b) / B - 1) x own share of memory-bound time, so that a neighbour of zero demand costs nothing. Common SMs
    are shared half and half while both run.
    """
    hbm_a, busy_a = a[0][:, None], a[1][:, None]
    hbm_b, busy_b = b[0][None, :], b[1][None, :]
    excess = np.maximum(0.0, (hbm_a + hbm_b) / USABLE_HBM - 1.0)
    return tuple(  # type: ignore[return-value]
        (1.0 + np.where(other > 0, excess * own / USABLE_HBM, 0.0))
        * np.where(busy & (overlap > 0), sms / (sms - overlap / 2.0), 1.0)
        for own, other, busy, sms in ((hbm_a, hbm_b, busy_b, split[0]), (hbm_b, hbm_a, busy_a, split[1]))
    )

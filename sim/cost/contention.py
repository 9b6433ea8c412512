"""What two launches on disjoint SM sets cost each other: an analytic guess until whole steps are measured."""

from __future__ import annotations

from sim.cost.shapes import Demand

LABEL = "extrapolated from first H200 co-runs by shared bandwidth"
# share of the data sheet's bandwidth at which two streams together begin to queue
USABLE_HBM = 0.88


def slowdown_factors(a: Demand, b: Demand, split: tuple[int, int], overlap: int = 0) -> tuple[float, float]:
    """Factors >= 1 for launches a and b on `split` SMs, `overlap` of them common to both.

    Bandwidth: 1 + max(0, (b_a + b_b) / B - 1) x own share of memory-bound time, so that a neighbour of zero
    demand costs nothing. Common SMs are shared half and half while both run.
    """
    excess = max(0.0, (a.hbm + b.hbm) / USABLE_HBM - 1.0)
    return tuple(  # type: ignore[return-value]
        (1.0 + (excess * own.hbm / USABLE_HBM if other.hbm else 0.0)) * _crowding(sms, overlap, other)
        for own, other, sms in ((a, b, split[0]), (b, a, split[1]))
    )


def _crowding(sms: int, overlap: int, other: Demand) -> float:
    if not overlap or not (other.hbm or other.tensor):
        return 1.0
    return sms / (sms - overlap / 2.0)

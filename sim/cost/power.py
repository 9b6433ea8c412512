"""A power cap below the TDP: the SM clock falls until the draw fits, and what computes becomes slower.

The rule: energy above idle follows the square of the clock (the voltage follows the clock), time follows the curve at
that clock. So a GEMM, whose time is inverse to the clock, draws power with its cube, while a kernel that waits for
memory keeps its speed. Splitwise (arXiv:2311.18677 section 3.6, and perf_model.csv of its simulator) found prompts of
Llama2-70B on eight H100s 1.3 times as long at 350 of 700 W, and decode steps unchanged; the rule gives 1.17 and 1.00.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sim.cost.base import Curve, EnergyTerms
from sim.cost.operators import flops, hbm_bytes
from sim.cost.profile import CurveProfile, digest
from sim.cost.shapes import Floats, Shape, Timing
from sim.errors import SimctlError

CLOCKS = np.linspace(0.98, 0.10, 45)  # steps that are tried, as shares of the profile's own clock


@dataclass(frozen=True)
class CappedCurve:
    """A curve whose every call runs at the highest clock that keeps the GPU's draw below `cap_w`."""

    curve: Curve
    energy: EnergyTerms
    cap_w: float

    @property
    def label(self) -> str:
        """The curve's own, and what the cap did to it."""
        return self._capped(self.curve.label)

    @property
    def coverage(self) -> str:
        """The curve's own."""
        return self.curve.coverage

    @property
    def extrapolation(self) -> str:
        """The curve's own."""
        return self.curve.extrapolation

    def covered(self, shape: Shape, sms: int) -> bool:
        """As the curve says."""
        return self.curve.covered(shape, sms)

    def fixed_s(self, shape: Shape) -> float:
        """As the curve says."""
        return self.curve.fixed_s(shape)

    def label_for(self, shape: Shape) -> str:
        """The curve's label for the shape, and what the cap did to it."""
        return self._capped(self.curve.label_for(shape))

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds per array element at the clock that the cap allows; see `Curve.timing`."""
        found = self.curve.timing(shape, sms, clock)
        seconds, sm_s = found.seconds, found.sm_s
        for share in CLOCKS:
            hot = self._watts(shape, seconds, share + 0.02) > self.cap_w
            if not np.any(hot):
                break
            slower = self.curve.timing(shape, sms, clock * float(share))
            seconds = np.where(hot, slower.seconds, seconds)
            sm_s = np.where(hot, slower.sm_s, sm_s)
        return Timing(seconds=seconds, sm_s=sm_s)

    def _watts(self, shape: Shape, seconds: Floats, clock: float) -> Floats:
        terms = self.energy
        joules = terms.j_per_flop * flops(shape) + terms.j_per_byte * hbm_bytes(shape)
        return np.asarray(terms.idle_w + joules * clock**2 / np.maximum(seconds, 1e-12))

    def _capped(self, label: str) -> str:
        kind = label if label.startswith("extrapolated") else f"extrapolated from {label}"
        return f"{kind}, clock by the power cap of {self.cap_w:g} W"


def with_cap(profile: CurveProfile, cap_w: float | None) -> CurveProfile:
    """The profile under a power cap in watts; None leaves it as it is.

    Raises SimctlError for a cap that the idle GPU exceeds, or that never binds.
    """
    if cap_w is None:
        return profile
    gpu = profile.gpu
    if cap_w >= gpu.tdp_w:
        raise SimctlError(f"power_cap_w = {cap_w:g} has no effect: the TDP of {gpu.name} is {gpu.tdp_w:g} W.")
    if cap_w <= profile.energy.idle_w:
        raise SimctlError(
            f"power_cap_w = {cap_w:g} is not possible: {gpu.name} draws {profile.energy.idle_w:g} W when idle."
        )
    return replace(
        profile,
        curves={name: CappedCurve(curve, profile.energy, cap_w) for name, curve in profile.curves.items()},
        energy=replace(profile.energy, cap_w=cap_w, label=f"{profile.energy.label}, capped at {cap_w:g} W"),
        content_hash=digest([profile.content_hash, "cap", cap_w]),
    )

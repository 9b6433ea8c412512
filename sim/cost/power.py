"""A power cap below the TDP: the SM clock falls until the draw fits, and what computes becomes slower.

The rule (`sim.cost.energy`): clocked joules follow a power of the clock as the voltage does, DRAM's joules and the
watts of time do not follow it, and time follows the curve at that clock. So a GEMM, whose time is inverse to the clock,
saves watts fast, while a kernel that waits for memory keeps its speed until the joules of the bytes alone are too many
for the cap: then it is slowed until they fit. Splitwise (arXiv:2311.18677 section 3.6, and perf_model.csv of its
simulator) found prompts of Llama2-70B on eight H100s 1.3 times as long at 350 of 700 W, and decode steps unchanged; the
rule gives 1.17 and 1.00 there.
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
    """A curve whose every call runs at the highest clock that keeps the GPU's draw below `cap_w`.

    `operator`: whose curve it is; `energy`: the GPU's terms under its own limit.
    """

    curve: Curve
    energy: EnergyTerms
    cap_w: float
    operator: str

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
        dram_j, clocked_j = self._joules(shape, seconds)
        least_w = self.energy.idle_w + self.energy.active_w
        joules, share = dram_j + clocked_j, 1.0
        hot = least_w + joules / np.maximum(seconds, 1e-12) > self.cap_w
        for share in CLOCKS:
            if not np.any(hot):
                break
            slower = self.curve.timing(shape, sms, clock * float(share))
            seconds = np.where(hot, slower.seconds, seconds)
            sm_s = np.where(hot, slower.sm_s, sm_s)
            joules = np.where(hot, dram_j + clocked_j * self.energy.savings(share), joules)
            hot = least_w + joules / np.maximum(seconds, 1e-12) > self.cap_w
        # no clock brings the bytes alone under the cap: it waits until they fit
        fits = joules / (self.cap_w - least_w)
        return Timing(seconds=np.where(hot, np.maximum(seconds, fits), seconds), sm_s=sm_s)

    def _joules(self, shape: Shape, seconds: Floats) -> tuple[Floats, Floats]:
        """(of DRAM, of the rest) at the profile's own clock, which the GPU's own limit may hold down already."""
        terms, moved = self.energy, hbm_bytes(shape)
        asked, dram = terms.work_j(self.operator, flops(shape), moved), terms.dram_j(moved)
        held = terms.savings(terms.clock(asked, moved, seconds))
        return np.asarray(dram), np.asarray((asked - dram) * held)

    def _capped(self, label: str) -> str:
        kind = label if label.startswith("extrapolated") else f"extrapolated from {label}"
        return f"{kind}, clock by the power cap of {self.cap_w:g} W"


def with_cap(profile: CurveProfile, cap_w: float | None) -> CurveProfile:
    """The profile under a power cap in watts; None leaves it as it is.

    Raises SimctlError for a cap that the card cannot be set to, or that never binds.
    """
    if cap_w is None:
        return profile
    gpu, terms = profile.gpu, profile.energy
    if cap_w >= gpu.tdp_w:
        raise SimctlError(f"power_cap_w = {cap_w:g} has no effect: the TDP of {gpu.name} is {gpu.tdp_w:g} W.")
    if cap_w < gpu.least_limit_w:
        raise SimctlError(
            f"power_cap_w = {cap_w:g} is not possible: the lowest power limit of {gpu.name} is "
            f"{gpu.least_limit_w:g} W."
        )
    least_w = terms.idle_w + terms.active_w
    if cap_w <= least_w:
        raise SimctlError(
            f"power_cap_w = {cap_w:g} is not possible: {gpu.name} draws {least_w:g} W before it computes anything."
        )
    return replace(
        profile,
        curves={name: CappedCurve(curve, terms, cap_w, name) for name, curve in profile.curves.items()},
        energy=replace(terms, cap_w=min(cap_w, terms.cap_w), label=f"{terms.label}, capped at {cap_w:g} W"),
        content_hash=digest([profile.content_hash, "cap", cap_w]),
    )

"""What a GPU draws: watts while idle and while a kernel is on it, joules for each FLOP and byte, and the power limit.

Fitted to single operators held for seconds (`calib.fit.power`), so that whole steps, fused attention and two lanes side
by side test it. Joules are those at the top clock. At clock c, a share of the top one, all but DRAM's own follow
c^clock_power (the voltage follows the clock), not below `slowest_clock`, the lowest that was seen: what lies below is
not known to save anything.

At the limit the clock falls until the draw fits, which takes the board some `react_s`: for as long it may draw more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.shapes import Floats

# DRAM's part of the joules of a byte, which the SM clock does not touch: 3.9 pJ a bit (O'Connor and others,
# "Fine-Grained DRAM", MICRO 2017, of HBM2). Of the measurements it is the fit's cost that says a third of them or less.
DRAM_J_PER_BYTE = 3.1e-11
LINEAR = ("gemm", "lm_head", "moe")


@dataclass(frozen=True)
class EnergyTerms:
    """`idle_w`: nothing in flight, clocks up; `active_w` more while a kernel is on the GPU. `j_per_flop`, `j_per_byte`:
    of any work (FLOPs in units of 16-bit ones, HBM bytes). More for each FLOP of prefill attention (its softmax) and of
    decode attention (rows padded to tiles), and for each byte of element-wise kernels. `cap_w`: what the power limit
    holds the mean draw at; `beyond`: how much of what work asks for beyond it the board draws before its clock has
    fallen (a full grid of products slows itself down within microseconds, whatever clock NVML shows).
    """

    idle_w: float
    j_per_flop: float
    j_per_byte: float
    cap_w: float
    label: str
    active_w: float = 0.0
    more_per_prefill_flop: float = 0.0
    more_per_decode_flop: float = 0.0
    more_per_element_byte: float = 0.0
    clock_power: float = 2.0
    slowest_clock: float = 0.7
    react_s: float = 0.05
    beyond: float = 1.0

    def work_j(self, operator: str, flops: Any, hbm_bytes: Any) -> Any:
        """Joules of an operator's work (by full name or family) on top of the watts of time, at the top clock."""
        family = operator.split("/", 1)[0]
        flop, byte = self.j_per_flop, self.j_per_byte
        if family == "prefill_attention":
            flop += self.more_per_prefill_flop
        elif family == "decode_attention":
            flop += self.more_per_decode_flop
        elif family not in LINEAR:
            byte += self.more_per_element_byte
        return flop * flops + byte * hbm_bytes

    def board_w(self, seconds: float, on_s: float, work_j: float) -> float:
        """Mean watts of a GPU over `seconds`, of which it has a kernel for `on_s`, within the limit."""
        if seconds <= 0:
            return self.idle_w
        return min((self.idle_w * seconds + self.active_w * on_s + work_j) / seconds, self.cap_w)

    def running_w(self, work_w: Any) -> Any:
        """Watts while kernels run whose work asks for so many, at the top clock and before the limit acts."""
        asked = self.idle_w + self.active_w + work_w
        return np.minimum(asked, self.cap_w + (asked - self.cap_w) * self.beyond)

    def energy_j(self, seconds: float, flops: float, hbm_bytes: float) -> float:
        """Joules of one GPU that is busy for so long with work that no operator is named of, within the limit."""
        asked = (
            (self.idle_w + self.active_w) * seconds + self.j_per_flop * flops + self.j_per_byte * hbm_bytes
        )
        return min(asked, self.cap_w * seconds)

    def dram_j(self, hbm_bytes: Any) -> Any:
        """The part of the joules of so many bytes that no clock changes."""
        return min(self.j_per_byte, DRAM_J_PER_BYTE) * hbm_bytes

    def savings(self, clock: Any) -> Floats:
        """What clocked joules are worth at a clock, both as shares of those at the top one."""
        return np.asarray(np.clip(clock, self.slowest_clock, 1.0) ** self.clock_power)

    def clock(self, work_j: Any, hbm_bytes: Any, seconds: Any) -> Floats:
        """The SM clock, as a share of the top one, at which the power limit holds work that takes so long at it.

        f(power): the higher the draw at the top clock, the lower the clock that brings it under the limit.
        """
        fixed = (self.idle_w + self.active_w) * np.asarray(seconds) + self.dram_j(np.asarray(hbm_bytes))
        clocked = np.maximum(np.asarray(work_j) - self.dram_j(np.asarray(hbm_bytes)), 1e-12)
        left = np.clip((self.cap_w * np.asarray(seconds) - fixed) / clocked, 1e-6, 1.0)
        return np.asarray(left ** (1.0 / self.clock_power))

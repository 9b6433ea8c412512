"""The clock as a slow state of the GPU: heat is 0 at the top clock and 1 where long prefill has brought it.

What runs draws power, a mean of the draw over some tens of milliseconds decides on the clock, and the clock on what
passes take: a pass with prompts after decodes runs at the top clock for 60 ms and more, decodes behind prompts are slow
for as long. `DRAW` is that mean, in the heat at which it lets the clock settle; `HEAT` follows it, both with one time
constant. Prices are those of settled clocks; slopes, targets and the constant are measured (`sim.cost.warming`).

Over x time constants both decay by 1 / (1 + x + x^2 / 2 + x^3 / 6), which stands for exp(-x): no transcendental
function a step. They are brought forward only where a launch starts or ends, so that bursts change nothing.
"""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    DECODE_LANE,
    DRAW,
    HEAT,
    HEAT_AT,
    HEAT_RATE,
    HEAT_TARGET,
    LANE_BATCH,
    LANE_BUSY,
    LANE_INTEGERS,
    LANE_PART,
    LANE_TOKENS,
    LANE_WARMS,
    LANES,
    LANES_F,
    PREFILL_LANE,
    SMS,
    WHOLE_GPU,
)
from sim.jit import jit


@jit
def heat_factor(p: Any, slope: float, heat: float, draw: float, target: float, gpu_s: float) -> float:
    """What a launch of `gpu_s` seconds at its settled clock takes of these from this heat on, by its mean heat."""
    x = gpu_s * p.heat_rate
    w = x * (0.5 + x / 6.0)
    own, drawn = heat - target, draw - target
    return float(1.0 + slope * (own + (own + drawn) * w) / (1.0 + x * (1.0 + w)))


@jit
def pass_heat(fv: Any, at: int, target: float, x: float) -> None:
    """Bring the heat at `fv[at]` and the draw behind it forward by x time constants of what settles at `target`."""
    w = x * (0.5 + x / 6.0)
    decay = 1.0 / (1.0 + x * (1.0 + w))
    own, drawn = fv[at] - target, fv[at + 1] - target
    fv[at] = target + (own + drawn * x) * decay
    fv[at + 1] = target + drawn * decay


@jit
def settle_heat(r: Any, now: float) -> None:
    """Two lanes: bring the heat forward to `now`, what is in flight having been the same since it was last."""
    fv = r.fv
    pass_heat(fv, HEAT, fv[HEAT_TARGET], (now - fv[HEAT_AT]) * fv[HEAT_RATE])
    fv[HEAT_AT] = now


@jit
def lanes_target(r: Any) -> None:
    """Two lanes: where the heat goes with what is in flight. Prefill on a part of the GPU draws by its share of the SMs
    beside decodes, and stays below the power cap alone."""
    iv, fv = r.iv, r.fv
    whole = iv[LANES + LANE_PART] == WHOLE_GPU
    beside = iv[LANES + DECODE_LANE * LANE_INTEGERS + LANE_BUSY] == 1
    running = iv[LANES + LANE_BUSY] == 1 and (whole or beside)
    fv[HEAT_TARGET] = fv[LANES_F + LANE_WARMS] if running else 0.0


@jit
def launch_heat(r: Any, p: Any, lane: int, part: int, gpu_s: float) -> float:
    """Two lanes: the factor on the price of a launch that starts now on a price partition; `lanes_target` comes after
    it. Slowdowns beside another launch are settled ones, too, so the target is that of both."""
    iv, fv = r.iv, r.fv
    fv[HEAT_RATE] = p.heat_rate
    beside = iv[LANES + (1 - lane) * LANE_INTEGERS + LANE_BUSY] == 1
    if lane == PREFILL_LANE:
        tokens = iv[LANES + LANE_TOKENS] + iv[LANES + LANE_BATCH]
        warms = p.heat_target[tokens] * r.policy_sms[part] / iv[SMS]
        fv[LANES_F + LANE_WARMS] = warms
        target = warms if beside or part == WHOLE_GPU else 0.0
        return float(heat_factor(p, p.heat_slope[tokens], fv[HEAT], fv[DRAW], target, gpu_s))
    target = fv[LANES_F + LANE_WARMS] if beside else 0.0
    return float(heat_factor(p, p.heat_decode, fv[HEAT], fv[DRAW], target, gpu_s))

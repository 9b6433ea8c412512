"""The clock under the power cap: how long the GPU may still run at the top clock is a state of the engine.

A GPU may draw more than its cap for a while. Passes with prompts spend that and then run at the clock that the cap
allows; decodes and idle time win it back. So a pass after decodes is faster than its price, which is that of a settled
clock, and decodes behind prompts are slow until the clock is up again. `SPENT` is what has been drawn, in seconds of
full passes at the top clock, from 0 to `heat_room_s`; what passes draw and others win back is measured
(`sim.cost.warming`). It is brought forward only where a launch starts or ends, so that bursts change nothing.
"""

from __future__ import annotations

from typing import Any

from sim.cost.clock import decode_factor, pass_factor
from sim.engine.layout import (
    DECODE_LANE,
    HEAT_AT,
    HEAT_IDLE,
    HEAT_RATE,
    HEAT_ROOM,
    LANE_BATCH,
    LANE_BUSY,
    LANE_DRAWS,
    LANE_FLOATS,
    LANE_INTEGERS,
    LANE_PART,
    LANE_TOKENS,
    LANES,
    LANES_F,
    PREFILL_LANE,
    SMS,
    SPENT,
    WHOLE_GPU,
)
from sim.jit import jit


@jit
def settle_heat(r: Any, now: float) -> None:
    """Two lanes: bring `SPENT` forward to `now`, what is in flight having been the same since it was last."""
    fv = r.fv
    spent_s = fv[SPENT] + fv[HEAT_RATE] * (now - fv[HEAT_AT])
    fv[SPENT] = min(max(spent_s, 0.0), fv[HEAT_ROOM])
    fv[HEAT_AT] = now


@jit
def lanes_rate(r: Any) -> None:
    """Two lanes: what is in flight draws. Prefill on a part of the GPU draws by its share of the SMs beside decodes,
    and stays below the power cap alone."""
    iv, fv = r.iv, r.fv
    decodes = iv[LANES + DECODE_LANE * LANE_INTEGERS + LANE_BUSY] == 1
    if iv[LANES + LANE_BUSY] == 1:
        drawing = decodes or iv[LANES + LANE_PART] == WHOLE_GPU
        fv[HEAT_RATE] = fv[LANES_F + LANE_DRAWS] if drawing else 0.0
    elif decodes:
        fv[HEAT_RATE] = fv[LANES_F + DECODE_LANE * LANE_FLOATS + LANE_DRAWS]
    else:
        fv[HEAT_RATE] = -fv[HEAT_IDLE]


@jit
def launch_heat(r: Any, p: Any, lane: int, part: int, gpu_s: float) -> float:
    """Two lanes: the factor on the price of a launch that starts now on a price partition; `lanes_rate` comes after it.
    Slowdowns beside another launch are settled ones, too: with room left both are faster than these."""
    iv, fv = r.iv, r.fv
    fv[HEAT_ROOM] = p.heat_room_s
    fv[HEAT_IDLE] = p.heat_idle
    beside = iv[LANES + (1 - lane) * LANE_INTEGERS + LANE_BUSY] == 1
    if lane == PREFILL_LANE:
        tokens = iv[LANES + LANE_TOKENS] + iv[LANES + LANE_BATCH]
        share = r.policy_sms[part] / iv[SMS]
        draw = p.heat_draw[tokens] * share
        fv[LANES_F + LANE_DRAWS] = draw
        if beside or part == WHOLE_GPU:
            return float(pass_factor(p, fv[SPENT], draw, p.heat_gain[tokens] * share, gpu_s))
        return 1.0
    batch = iv[LANES + LANE_INTEGERS + LANE_BATCH]
    fv[LANES_F + LANE_FLOATS + LANE_DRAWS] = -p.heat_rest[batch]
    factor = float(decode_factor(p, fv[SPENT]))
    return factor / (1.0 + p.heat_decode) if beside else factor

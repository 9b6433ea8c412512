"""The clock's heat along a log: what each launch takes of its price at a settled clock, by the engine's own rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.engine.heat import heat_factor, pass_heat
from sim.engine.layout import DECODE_LANE, PREFILL_LANE


@dataclass(frozen=True)
class Busy:
    """A launch for the clock: when it ran, on which lane, `tokens` of its linear layers (0 of a decode step),
    SMs and GPU seconds at a settled clock."""

    lane: int
    sms: int
    tokens: int
    start_s: float
    end_s: float
    gpu_s: float


def heat_factors(p: Any, total_sms: int, launches: Sequence[Busy]) -> list[float]:
    """The factor on the GPU seconds of each; all 1 where the prices know no heat."""
    found = [1.0] * len(launches)
    if p.heat_on == 0:
        return found
    events = [(one.start_s, 1, i) for i, one in enumerate(launches)]
    events += [(one.end_s, 0, i) for i, one in enumerate(launches)]
    heat, now, target = [0.0, 0.0], 0.0, 0.0
    busy: dict[int, Busy] = {}
    for at, starts, i in sorted(events):
        pass_heat(heat, 0, target, max(0.0, at - now) * p.heat_rate)
        one, now = launches[i], max(at, now)
        if starts:
            own = target_of(p, total_sms, {**busy, one.lane: one})
            slope = p.heat_slope[one.tokens] if one.tokens else p.heat_decode
            found[i] = heat_factor(p, slope, heat[0], heat[1], own, one.gpu_s)
            busy[one.lane] = one
        elif busy.get(one.lane) is one:
            del busy[one.lane]
        target = target_of(p, total_sms, busy)
    return found


def target_of(p: Any, total_sms: int, busy: dict[int, Busy]) -> float:
    """Where the heat goes with what is in flight by lane (`sim.engine.heat.lanes_target`)."""
    prefill = busy.get(PREFILL_LANE)
    if prefill is None or not prefill.tokens:
        return 0.0
    if prefill.sms < total_sms and DECODE_LANE not in busy:
        return 0.0
    return float(p.heat_target[prefill.tokens]) * prefill.sms / total_sms

"""The clock under the power cap along a log: what each launch takes of its settled price, by the engine's own rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.cost.clock import decode_factor, pass_factor, spent_after
from sim.engine.layout import DECODE_LANE, PREFILL_LANE


@dataclass(frozen=True)
class Busy:
    """A launch for the clock: when it ran, on which lane, `tokens` of its linear layers (0 of a decode step), `batch`
    of its decodes, SMs and GPU seconds at a settled clock."""

    lane: int
    sms: int
    tokens: int
    batch: int
    start_s: float
    end_s: float
    gpu_s: float


def heat_factors(p: Any, total_sms: int, launches: Sequence[Busy]) -> list[float]:
    """The factor on the GPU seconds of each; all 1 where the prices know no heat."""
    if p.heat_on == 0:
        return [1.0] * len(launches)
    if all(one.lane == PREFILL_LANE for one in launches):
        return _one_lane(p, launches)
    found = [1.0] * len(launches)
    events = [(one.start_s, 1, i) for i, one in enumerate(launches)]
    events += [(one.end_s, 0, i) for i, one in enumerate(launches)]
    spent_s, now, rate = 0.0, 0.0, 0.0
    busy: dict[int, Busy] = {}
    for at, starts, i in sorted(events):
        spent_s = spent_after(p, spent_s, rate, max(0.0, at - now), 0.0)
        one, now = launches[i], max(at, now)
        if starts:
            found[i] = _beside(p, total_sms, one, spent_s, 1 - one.lane in busy)
            busy[one.lane] = one
        elif busy.get(one.lane) is one:
            del busy[one.lane]
        rate = _rate(p, total_sms, busy)
    return found


def _one_lane(p: Any, launches: Sequence[Busy]) -> list[float]:
    """Of what is not the GPU's time of a launch a share is idle, as the time between launches is."""
    found, spent_s, now = [], 0.0, 0.0
    for one in launches:
        spent_s = spent_after(p, spent_s, 0.0, 0.0, one.start_s - now)
        found.append(_beside(p, one.sms, one, spent_s, False))
        rate = p.heat_draw[one.tokens] if one.tokens else -p.heat_rest[one.batch]
        gpu_s, now = one.gpu_s * found[-1], one.end_s
        spent_s = spent_after(p, spent_s, rate, gpu_s, (one.end_s - one.start_s - gpu_s) * p.heat_gap)
    return found


def _beside(p: Any, total_sms: int, one: Busy, spent_s: float, beside: bool) -> float:
    """The factor on a launch that starts with so much spent (`sim.engine.heat.launch_heat`)."""
    if not one.tokens:
        factor = decode_factor(p, spent_s)
        return float(factor / (1.0 + p.heat_decode) if beside else factor)
    share = one.sms / total_sms
    if not beside and share < 1.0:
        return 1.0
    draw, gain = p.heat_draw[one.tokens] * share, p.heat_gain[one.tokens] * share
    return float(pass_factor(p, spent_s, draw, gain, one.gpu_s))


def _rate(p: Any, total_sms: int, busy: dict[int, Busy]) -> float:
    """What is in flight by lane draws a second (`sim.engine.heat.lanes_rate`)."""
    prefill, decodes = busy.get(PREFILL_LANE), busy.get(DECODE_LANE)
    if prefill is not None and prefill.tokens:
        drawing = decodes is not None or prefill.sms == total_sms
        return float(p.heat_draw[prefill.tokens]) * prefill.sms / total_sms if drawing else 0.0
    steps = decodes if prefill is None else prefill
    return float(-p.heat_idle if steps is None else -p.heat_rest[steps.batch])

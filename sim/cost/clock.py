"""Prices at the clock that a launch finds: what it takes of its settled price, and what it leaves of the room.

`spent_s` is what has been drawn beyond the power cap, in seconds of full passes at the top clock, 0 to `heat_room_s`
of the price tables (`sim.cost.warming`); the engine keeps it (`sim.engine.heat`).
"""

from __future__ import annotations

from typing import Any

from sim.jit import jit


@jit
def pass_factor(p: Any, spent_s: float, draw: float, gain: float, gpu_s: float) -> float:
    """What a pass of `gpu_s` seconds at its settled clock takes of these: 1 - `gain` at the top clock, at which it
    draws `draw` a second, until nothing is left."""
    room_s, needed_s = p.heat_room_s - spent_s, draw * (1.0 - gain) * gpu_s
    if room_s >= needed_s:
        return 1.0 - gain
    return float(1.0 - gain * room_s / needed_s)


@jit
def decode_factor(p: Any, spent_s: float) -> float:
    """What decodes take of their price when so much has been spent: more until the clock is up again."""
    away = spent_s / p.heat_room_s
    return float(1.0 + p.heat_decode * away * away * away * away)


@jit
def spent_after(p: Any, spent_s: float, draw: float, seconds: float, idle_s: float) -> float:
    """What has been spent after `seconds` that draw so much each (less than 0: win it back) and so many idle ones."""
    spent_s = min(max(spent_s + draw * seconds, 0.0), p.heat_room_s)
    return float(max(spent_s - p.heat_idle * max(0.0, idle_s), 0.0))

"""What an experiment asks for, as the one number that a scheduler with one target works to."""

from __future__ import annotations

import math
from typing import Any

from sim.engine.deployment import Deployment


def target_s(knob_ms: Any, deployment: Deployment, names: tuple[str, ...], default_s: float) -> float:
    """Seconds of a target: the knob's milliseconds if it is set; else the strictest class of the first of `names`
    (fields of `Target`) for which any class asks something; else `default_s`."""
    if knob_ms is not None:
        return float(knob_ms) / 1e3
    for name in names:
        strictest = min(float(getattr(target, name)) for target in deployment.targets)
        if math.isfinite(strictest):
            return strictest
    return default_s

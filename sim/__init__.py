"""lanesim: trace-driven simulation of LLM serving on GPUs.

`sim.run(experiment)` runs an experiment; policies for it are written with `sim.engine` (View, Plan, Prefill, Decode,
Mixed). Names are loaded on first use, so that importing `sim` costs nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Result", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sim import api

        return getattr(api, name)
    raise AttributeError(f"module 'sim' has no attribute '{name}'")

"""Shared settings: helper modules under tests/support are importable by name; hypothesis has no deadline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
# whether a study compiles depends on what the user's cache holds: tests say it themselves, before sim is imported
os.environ.setdefault("LANESIM_JIT", "0")

# the first example of a test may compile the hot loops, and a suite must give the same answer twice
settings.register_profile(
    "fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

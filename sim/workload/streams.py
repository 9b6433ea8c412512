"""Independent random streams of one seed, so that drawing more of one thing never shifts another."""

from __future__ import annotations

import numpy as np

# the order is part of the meaning of a seed: append only
NAMES = ("gaps", "prompts", "outputs", "rows", "classes", "spread")


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator called `name` of a workload's seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(NAMES.index(name),)))

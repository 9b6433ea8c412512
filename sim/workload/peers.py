"""The workload on which simulators of LLM serving are timed against each other, request for request."""

from __future__ import annotations

import math

import numpy as np

from sim.workload.workload import Workload, make_workload


def peer_workload(n: int, seed: int) -> Workload:
    """`n` Poisson requests at 5.5/s with lognormal lengths, drawn in one fixed order from `default_rng(seed)`.

    The order is n exponential gaps of mean 1/5.5 s (the first arrival is then moved to 1 s), n prompts of median
    1000 and sigma 0.8 in 1..6000, n outputs of median 150 and sigma 0.7 in 2..1024, both rounded and clipped.
    Seed 11 goes with 1,000 requests and seed 12 with 10,000 (1,932,652 output tokens).
    """
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / 5.5, n))
    prompt = np.clip(np.rint(np.exp(rng.normal(math.log(1000), 0.8, n))), 1, 6000)
    output = np.clip(np.rint(np.exp(rng.normal(math.log(150), 0.7, n))), 2, 1024)
    return make_workload(
        f"peers-{n}",
        arrival - arrival[0] + 1.0,
        prompt.astype(np.int32),
        output.astype(np.int32),
        notes=(f"common workload of peer simulators, {n:,} requests, seed {seed}",),
    )

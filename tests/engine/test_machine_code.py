"""Machine code and CPython give the same bytes under every policy; a policy takes some ten seconds to compile."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from fingerprint import fingerprint
from stub_cost import real_cost
from workloads import workload

from sim.engine import simulate
from sim.policies import BUILT_IN, make_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed"),
]


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_machine_code_changes_nothing(name: str) -> None:
    rng = np.random.default_rng(6)
    load = workload(
        np.cumsum(rng.exponential(0.03, 120)).tolist(),
        rng.integers(1, 5000, 120).tolist(),
        rng.integers(1, 200, 120).tolist(),
    )
    for options in ({}, {"replicas": 2, "router": "least-outstanding", "warmup_s": 1.0}):
        compiled, interpreted = (
            simulate(load, make_policy(name), real_cost(), record_steps=True, compiled=by, **options)
            for by in (True, False)
        )
        assert fingerprint(compiled) == fingerprint(interpreted)

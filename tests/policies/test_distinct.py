"""No two policies are the same under another name: on one overload each pair differs in TTFT or in ITL."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from stub_cost import real_cost
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.engine.deploying import deploy
from sim.engine.deployment import Target
from sim.policies import list_policies, make_policy

POLICIES = [info.name for info in list_policies() if not info.base]
PRESETS = [(info.name, info.base) for info in list_policies() if info.base]
TARGETS = (Target(ttft_s=1.0, tpot_s=0.03, itl_s=0.1),)
POOL_TOKENS = 48_000


@lru_cache(maxsize=64)
def overload(name: str) -> RunRecords:
    """120 requests of all lengths at twice what the GPU can serve, in a KV pool that does not hold them."""
    rng = np.random.default_rng(11)
    n = 120
    load = workload(
        np.cumsum(rng.exponential(1 / 60, n)).tolist(),
        rng.integers(50, 3000, n).tolist(),
        rng.integers(1, 150, n).tolist(),
    )
    policy = make_policy(name)
    block = policy.block_size or 16
    return simulate(
        load, policy, real_cost(), targets=TARGETS, num_gpu_blocks=POOL_TOKENS // block, jitter=False
    )


def sample(records: RunRecords) -> tuple[Any, Any]:
    """Sorted TTFTs, and gaps with their counts."""
    ttft = np.sort((records.requests["first_token_s"] - records.requests["arrival_s"]).to_numpy())
    order = np.lexsort((records.itl_count, records.itl_s))
    return ttft, np.array([records.itl_s[order], records.itl_count[order]])


def same(a: str, b: str) -> bool:
    x, y = sample(overload(a)), sample(overload(b))
    return all(np.array_equal(one, other, equal_nan=True) for one, other in zip(x, y, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_the_overload(name: str) -> None:
    frame = overload(name).requests
    assert set(frame["status"]) <= {"finished", "rejected"}
    assert (frame["status"] == "finished").mean() > (0.2 if name == "slo-admission" else 0.99)


def test_every_pair_of_policies_differs() -> None:
    assert [pair for pair in combinations(POLICIES, 2) if same(*pair)] == []


def choices(name: str) -> Any:
    """What a policy does on this GPU, in numbers."""
    policy = make_policy(name)
    d = deploy(policy, real_cost(), targets=TARGETS)
    return policy.parameters(d), policy.max_seqs(d), policy.max_tokens(d), policy.sm_sets(d)


@pytest.mark.parametrize(("preset", "base"), PRESETS)
def test_a_preset_differs_from_its_policy_unless_it_names_the_defaults(preset: str, base: str) -> None:
    assert same(preset, base) == (choices(preset) == choices(base))

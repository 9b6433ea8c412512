"""Every policy on a measured GPU and on a data sheet's, a small and a large model; what does not fit is refused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from workloads import workload

from sim.cost import load_cost
from sim.cost.profiled import ProfiledCost
from sim.engine import simulate
from sim.engine.deploying import deploy, largest_step
from sim.engine.deployment import Target
from sim.errors import SimctlError
from sim.metrics.conservation import check_conservation
from sim.policies import list_policies, make_policy

POLICIES = [info.name for info in list_policies() if not info.base]
GPUS = {"h200-sxm": "auto", "a100-80gb-sxm": "spec"}
MODELS = ("llama-3.1-8b", "qwen3-32b")
TARGETS = (Target(ttft_s=2.0, tpot_s=0.1),)
GIB = 2**30
# beside its graphs an A100 has no room for a pass of 32,768 tokens through the large model
SMALLER = {"muxwise": {"max_prompt_tokens": 16384}}


@lru_cache(maxsize=8)
def cost_of(model: str, gpu: str, profile: str) -> ProfiledCost:
    return load_cost(model, gpu, profile)


def reckoned_blocks(cost: ProfiledCost, tokens: int, seqs: int, block: int, graphs: float) -> int:
    """KV blocks that 90 % of the memory leaves beside 16-bit weights, a pass's activations, 1 GiB of runtime and a
    share of graphs."""
    m = cost.model
    attention = m.hidden * (m.q_heads + 2 * m.kv_heads) * m.head_dim + m.q_heads * m.head_dim * m.hidden
    weights = 2 * (m.layers * (attention + 3 * m.hidden * m.ffn) + 2 * m.vocab * m.hidden)
    activations = tokens * 2 * (3 * m.ffn + 4 * m.hidden) + min(seqs, 1024) * m.vocab * 10
    room = int(0.9 * (1 - graphs) * cost.gpu.hbm_bytes) - weights - activations - GIB
    return room // (block * 2 * m.layers * m.kv_heads * m.head_dim * 2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize("name", POLICIES)
def test_a_small_workload(name: str, gpu: str, model: str) -> None:
    cost, policy = cost_of(model, gpu, GPUS[gpu]), make_policy({"name": name, **SMALLER.get(name, {})})
    deployment = deploy(policy, cost, targets=TARGETS)
    graphs = 0.062 if name == "muxwise" else 0.0
    expected = reckoned_blocks(cost, *largest_step(policy, deployment), deployment.block_size, graphs)
    assert deployment.num_blocks == pytest.approx(
        expected, rel=0.01, abs=2
    )  # norms and biases are not reckoned
    rng = np.random.default_rng(3)
    n = 12
    load = workload(
        np.cumsum(rng.exponential(0.2, n)).tolist(),
        rng.integers(50, 1500, n).tolist(),
        rng.integers(1, 25, n).tolist(),
    )
    records = simulate(load, policy, cost, targets=TARGETS)
    check_conservation(records)
    allowed = {"finished", "rejected"} if name == "slo-admission" else {"finished"}
    assert set(records.requests["status"]) <= allowed
    assert records.totals["busy_s"] > 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(name: str) -> None:
    # 65.5 GB of weights, and 0.9 x 40 GiB of memory
    cost = cost_of("qwen3-32b", "a100-40gb-sxm", "spec")
    with pytest.raises(SimctlError) as caught:
        deploy(make_policy(name), cost)
    text = str(caught.value)
    assert "qwen3-32b does not fit on a100-40gb-sxm" in text
    assert "61.0" in text
    assert "GiB of weights" in text


def test_a_large_step_can_be_what_does_not_fit() -> None:
    # 61 GiB of weights in 71.3: a pass of 40,960 tokens leaves hardly any KV, one of 512 leaves 8 GiB
    cost = cost_of("qwen3-32b", "a100-80gb-sxm", "spec")
    whole, chunked = (deploy(make_policy(name), cost).num_blocks for name in ("vllm-v0", "sarathi-512"))
    assert whole * 4 * 2**20 < 3 * GIB < 7 * GIB < chunked * 4 * 2**20

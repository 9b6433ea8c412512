"""Memory plans: KV blocks by hand, overrides, and refusals that show their arithmetic."""

from __future__ import annotations

import re

import pytest

from sim.cost import load_cost
from sim.cost.gpu import list_gpus, load_gpu
from sim.cost.memory import RUNTIME_BYTES, activation_bytes, plan_memory
from sim.cost.model import list_models, load_model
from sim.errors import SimctlError

LLAMA, H200 = load_model("llama-3.1-8b"), load_gpu("h200-sxm")


def test_blocks_are_what_is_left_of_the_budget():
    plan = plan_memory(LLAMA, H200, gpu_memory_utilization=0.9, block_size=16, max_tokens=8192, max_seqs=256)
    activations = 8192 * (3 * 14336 + 4 * 4096) * 2 + 256 * 128256 * 10
    assert plan.activation_bytes == activation_bytes(LLAMA, 8192, 256) == activations
    left = int(0.9 * H200.hbm_bytes) - LLAMA.weight_bytes() - activations - RUNTIME_BYTES
    assert plan.num_blocks == left // (16 * 131_072)
    assert plan.kv_tokens == 16 * plan.num_blocks
    assert plan.budget_bytes >= plan.kv_bytes + plan.weight_bytes + plan.activation_bytes + plan.runtime_bytes


def test_llama_3_8b_on_an_80_gb_gpu_holds_about_the_tokens_that_servers_report():
    """vLLM logs 430-450 thousand tokens for this model on an A100-80GB at 0.9 (from memory)."""
    plan = plan_memory(load_model("llama-3-8b"), load_gpu("a100-80gb-sxm"))
    assert 420_000 < plan.kv_tokens < 460_000


@pytest.mark.parametrize(
    "knob", [{"gpu_memory_utilization": 0.5}, {"max_tokens": 65_536}, {"max_seqs": 2048}]
)
def test_each_knob_takes_blocks_away(knob):
    assert plan_memory(LLAMA, H200, **knob).num_blocks < plan_memory(LLAMA, H200).num_blocks


def test_block_size_keeps_the_tokens():
    sizes = [plan_memory(LLAMA, H200, block_size=size).kv_tokens for size in (1, 16, 256)]
    assert max(sizes) - min(sizes) < 256


def test_the_block_count_can_be_pinned_within_the_memory():
    assert plan_memory(LLAMA, H200, num_gpu_blocks=1000).num_blocks == 1000
    with pytest.raises(SimctlError, match=r"num_gpu_blocks = 1000000 does not fit: 1000000 x 2\.00 MiB"):
        plan_memory(LLAMA, H200, num_gpu_blocks=1_000_000)


def test_a_refusal_shows_its_arithmetic():
    with pytest.raises(SimctlError) as caught:
        plan_memory(load_model("llama-3.1-70b"), load_gpu("h100-sxm"))
    text = str(caught.value)
    whole, share, budget = (
        float(x) for x in re.search(r"([\d.]+) GiB x ([\d.]+) = ([\d.]+) GiB", text).groups()
    )
    assert whole * share == pytest.approx(budget, abs=0.02)
    weights, activations, runtime, left = (
        float(re.search(pattern, text).group(1))
        for pattern in (
            r"([\d.]+) GiB of weights",
            r"([\d.]+) GiB of activations",
            r"([\d.]+) GiB of runtime",
            r"leaves (-?[\d.]+) GiB",
        )
    )
    assert budget - weights - activations - runtime == pytest.approx(left, abs=0.05)
    assert left < 0
    assert text.count("\n") == 0


@pytest.mark.parametrize(
    "knob",
    [
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.1},
        {"block_size": 0},
        {"num_gpu_blocks": 0},
    ],
)
def test_impossible_knobs_are_named(knob):
    with pytest.raises(SimctlError, match=f"memory.{next(iter(knob))}"):
        plan_memory(LLAMA, H200, **knob)


def test_what_does_not_fit_says_what_would():
    model = load_model("llama-3.1-70b")
    with pytest.raises(SimctlError, match=r"Give it parallel\.tp: 2, or a larger GPU\.$"):
        plan_memory(model, H200)
    with pytest.raises(SimctlError, match=r"Give it .*, or a higher memory\.gpu_memory_utilization\.$"):
        plan_memory(model, H200, gpu_memory_utilization=0.5)
    with pytest.raises(SimctlError, match=r"Give it a smaller step of the policy, or"):
        plan_memory(model, load_gpu("b200-sxm"), max_tokens=1 << 18)
    # what is named works
    cost = load_cost("llama-3.1-70b", "h200-sxm", "spec", {"tp": 2})
    assert cost.memory(gpu_memory_utilization=0.9).num_blocks > 1000


@pytest.mark.parametrize("gpu", [gpu.name for gpu in list_gpus()])
@pytest.mark.parametrize("model", [model.name for model in list_models()])
def test_every_pair_compiles_or_is_refused(model, gpu):
    cost = load_cost(model, gpu, profile="spec")
    try:
        plan = cost.memory(max_tokens=2048, max_seqs=32)
    except SimctlError as error:
        assert cost.model.weight_bytes() > 0.8 * 0.9 * cost.gpu.hbm_bytes
        assert f"{model} does not fit on {gpu}: " in str(error)  # noqa: PT017
        return
    assert plan.num_blocks >= 1
    P = cost.compile(max_tokens=256, max_seqs=16, max_context=1024)
    assert all(value > 0 for value in P.dense_eager_s[1:])
    assert all(value > 0 for value in P.pre_s)

"""Whole runs of mixtures of experts and of e4m3 models, from the experiment file to the results."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.config.load import parse_experiment
from sim.config.resolve import plain
from sim.errors import SimctlError
from sim.study.hardware import model_of
from sim.study.plan import prepare

POLICIES = ["vllm", "sarathi-512", "sglang-1024", "fixed-50-50", "bullet", "nexus", "muxwise", "semi-pd"]


def experiment(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "workload": {"arrivals": "poisson", "num_prompts": 12, "prompt_tokens": 900, "output_tokens": 12},
        "model": "qwen3-30b-a3b",
        "gpu": "h200-sxm",
        "policies": ["vllm"],
        "sweep": {"request_rate": 20},
        "jitter": False,
    }
    return {**base, **changes}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_run_a_mixture_and_lose_nothing(policy: str) -> None:
    run = sim.run(experiment(policies=[policy])).summary["runs"][0]
    assert run["completed"] == 12
    assert run["total_input_tokens"] == 12 * 900
    assert run["total_output_tokens"] == 12 * 12
    assert run["model"] == "qwen3-30b-a3b"


def test_pools_run_a_mixture_too() -> None:
    run = sim.run(experiment(policies=["distserve"])).summary["runs"][0]
    assert run["completed"] == 12
    assert run["num_gpus"] == 2


@pytest.mark.parametrize("tp", [4, 8])
def test_the_large_mixture_runs_on_a_group(tp: int) -> None:
    study = experiment(model="qwen3-235b-a22b", parallel={"tp": tp}, policies=["vllm", "fixed-50-50"])
    for run in sim.run(study).summary["runs"]:
        assert run["completed"] == 12
        assert run["num_gpus"] == tp


def test_a_skewed_routing_slows_a_prefill_and_speeds_up_a_small_decode() -> None:
    skewed = {"name": "qwen3-30b-a3b", "routing_skew": 1.2}
    # about a tile of rows an expert, if all are alike
    prompts = {**experiment()["workload"], "prompt_tokens": 1024, "output_tokens": 1}
    ttft = [
        sim.run(experiment(model=model, workload=prompts, sweep={"request_rate": 1})).summary["runs"][0][
            "median_ttft_ms"
        ]
        for model in ("qwen3-30b-a3b", skewed)
    ]
    assert ttft[1] > 1.03 * ttft[0]
    one_by_one = {"arrivals": "closed-loop", "max_concurrency": 4, "num_prompts": 8, "prompt_tokens": 100}
    slow = [
        sim.run(experiment(model=model, sweep=None, workload={**one_by_one, "output_tokens": 30}))
        for model in ("qwen3-30b-a3b", skewed)
    ]
    tpot = [result.summary["runs"][0]["median_tpot_ms"] for result in slow]
    assert tpot[1] < 0.95 * tpot[0]


def test_e4m3_weights_leave_room_for_more_blocks_and_decode_faster() -> None:
    runs = [
        sim.run(experiment(model=model)).summary["runs"][0]
        for model in ("llama-3.1-8b", {"name": "llama-3.1-8b", "quantization": "fp8"})
    ]
    assert runs[1]["model"] == "llama-3.1-8b-fp8"
    assert runs[1]["median_tpot_ms"] < 0.9 * runs[0]["median_tpot_ms"]
    assert runs[1]["energy_j"] < runs[0]["energy_j"]


def test_a_model_is_a_name_or_a_mapping_and_both_come_back_from_the_plain_form() -> None:
    entry = {"name": "qwen3-30b-a3b", "quantization": "fp8", "routing_skew": 0.5}
    found = parse_experiment(experiment(model=entry))[0]
    assert plain(found)["model"] == entry
    assert plain(parse_experiment(plain(found))[0]) == plain(found)
    spec = model_of(found)
    assert (spec.name, spec.routing_skew) == ("qwen3-30b-a3b-fp8", 0.5)
    named = parse_experiment(experiment(model={"name": "llama-3.1-8b"}))[0]
    assert model_of(named) == model_of(parse_experiment(experiment(model="llama-3.1-8b"))[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "llama-3.1-8b", "routing_skew": 1.0}}, "no effect: llama-3.1-8b has no experts"),
        ({"model": {"name": "qwen3-30b-a3b", "routing_skew": 4.0}}, r"within 0\.\.3, not 4"),
        ({"model": {"name": "llama-3.1-8b", "quantization": "int4"}}, "must be 'fp8'"),
        ({"model": {"quantization": "fp8"}}, r"`model\.name` is missing"),
        ({"model": {"name": "llama-3.1-8b", "quant": "fp8"}}, "Did you mean 'quantization'"),
        ({"model": "llama-3.1-8b-fp8", "gpu": "a100-80gb-sxm"}, "has no e4m3 tensor cores"),
        ({"model": "qwen3-235b-a22b"}, "does not fit on h200-sxm"),
        ({"parallel": {"ep": 2}}, "expert parallelism"),
        ({"kernels": {"scale": {"moe": 0.5}}, "model": "llama-3.1-8b"}, "unknown operator 'moe'"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimctlError, match=message):
        prepare(experiment(**changes))


def test_a_faster_kernel_of_the_experts_speeds_up_the_run() -> None:
    plain_run, fast = (
        sim.run(experiment(kernels={"scale": scale})).summary["runs"][0] for scale in ({}, {"moe": 0.5})
    )
    assert fast["median_tpot_ms"] < 0.9 * plain_run["median_tpot_ms"]

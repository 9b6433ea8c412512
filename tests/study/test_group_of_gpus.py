"""Llama-3.1-70B on two H200s: every kind of policy runs, and the results say what was measured and what was not."""

from __future__ import annotations

from typing import Any

import pytest

from sim.api import run

BASE: dict[str, Any] = {
    "workload": {"trace": "sample-conv", "max_requests": 8},
    "model": "llama-3.1-70b",
    "gpu": "h200-sxm",
    "profile": "h200-sxm",
    "parallel": {"tp": 2},
    "slo": {"ttft_ms": 1000, "tpot_ms": 50},
    "jitter": False,
}


def summary(**changes: Any) -> dict[str, Any]:
    found = run({**BASE, **changes}).summary
    return {"profile": found["profile"], **found["runs"][0]}


@pytest.mark.parametrize(
    "policy",
    ["vllm", "static-split", "streams", "bullet", "nexus", "muxwise", "pod", "distserve", "splitwise"],
)
def test_every_kind_of_policy_serves_a_model_on_two_gpus(policy: str) -> None:
    found = summary(policies=[policy])
    assert found["completed"] == 8
    pools = 2 if policy in ("distserve", "splitwise") else 1
    assert found["num_gpus"] == 2 * pools
    labels = found["profile"]["provenance"]
    for name in (
        "allreduce/attention",
        "allreduce/ffn",
        "allgather/logits",
        "gemm/gate_up",
        "decode_attention",
    ):
        assert labels[name] == "measured", name
    assert labels["contention/collectives"] == "measured"
    assert labels["embedding"].startswith("extrapolated")
    assert sum(found["provenance"].values()) == pytest.approx(1.0)
    assert found["provenance"]["measured"] > 0.8
    # a decode step alone reads half the weights, and joins the halves 161 times
    assert 18 < found["median_itl_ms"] < 40


def test_four_gpus_are_faster_extrapolated_and_flagged() -> None:
    two, four = summary(policies=["vllm"]), summary(policies=["vllm"], parallel={"tp": 4})
    assert four["median_tpot_ms"] < two["median_tpot_ms"]
    label = four["profile"]["provenance"]["allreduce/ffn"]
    assert label == "extrapolated from h200-sxm's allreduce of 2 GPUs by a ring over 4"
    assert four["flagged_steps"] == four["iterations"]
    assert four["provenance"][label] > 0.02


def test_a_faster_all_reduce_is_worth_what_it_takes() -> None:
    plain = summary(policies=["vllm"])
    free = summary(policies=["vllm"], kernels={"scale": {"allreduce": 0.001}})
    # decode: 161 calls of 6 us, and what they cost within a step
    assert 0.9 < plain["median_itl_ms"] - free["median_itl_ms"] < 3.0

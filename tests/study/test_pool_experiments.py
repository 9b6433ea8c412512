"""Pools, links, tensor parallelism and power caps in experiment files: what runs, what it costs, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sim.api import run
from sim.errors import SimctlError
from sim.study.hardware import num_gpus
from sim.study.plan import memory_plans, prepare

BASE: dict[str, Any] = {
    "workload": {"arrivals": "poisson", "num_prompts": 40, "prompt_tokens": 700, "output_tokens": 20},
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm",
    "profile": "spec",
    "policies": ["distserve"],
    "sweep": {"request_rate": [10]},
    "jitter": False,
}


def one(**changes: Any) -> dict[str, Any]:
    """Summary of the single run of a changed experiment."""
    runs = run({**BASE, **changes}).summary["runs"]
    assert len(runs) == 1
    return runs[0]


@pytest.mark.parametrize("policy", ["distserve", "splitwise"])
def test_without_pools_there_is_one_replica_of_each(policy: str) -> None:
    summary = one(policies=[policy])
    assert summary["num_gpus"] == 2
    assert [(pool["name"], pool["replicas"]) for pool in summary["pools"]] == [("prefill", 1), ("decode", 1)]
    assert summary["link"]["source"] == "GPU table: NVLink of h100-sxm, one direction"
    assert summary["completed"] == 40
    assert summary["request_throughput_per_gpu"] == summary["request_throughput"] / 2
    assert summary["median_transfer_ms"] > 0


def test_all_gpus_count_and_what_they_wait_is_accounted() -> None:
    pools = {"prefill": {"count": 3}, "decode": {"count": 2, "tp": 2}}
    summary = one(pools=pools)
    assert summary["num_gpus"] == 7
    assert sum(summary["sm_time_pct"].values()) == pytest.approx(100)
    each = {pool["name"]: pool for pool in summary["pools"]}
    assert (each["prefill"]["num_gpus"], each["decode"]["num_gpus"]) == (3, 4)
    busy = (3 * each["prefill"]["busy_pct"] + 4 * each["decode"]["busy_pct"]) / 7
    assert summary["busy_pct"] == pytest.approx(busy)
    assert summary["energy_j"] == pytest.approx(sum(pool["energy_j"] for pool in summary["pools"]))
    assert sum(summary["provenance"].values()) == pytest.approx(1)


def test_unlike_sides_run_and_the_better_side_shows() -> None:
    alike = one()
    slow_prefill = one(pools={"prefill": {"gpu": "a100-80gb-sxm"}})
    slow_decode = one(pools={"decode": {"gpu": "a100-80gb-sxm"}})
    assert slow_prefill["gpu"] == "a100-80gb-sxm + h100-sxm"
    assert slow_prefill["median_ttft_ms"] > 1.5 * alike["median_ttft_ms"]
    assert slow_decode["median_ttft_ms"] == alike["median_ttft_ms"]
    assert slow_decode["median_tpot_ms"] > 1.2 * alike["median_tpot_ms"]
    assert slow_decode["link"]["source"] == "GPU table: network card of a100-80gb-sxm"


def test_a_cap_on_the_token_machines_saves_power_and_leaves_tokens_alone() -> None:
    """Splitwise-HHcap: token machines at half of the GPU's power."""
    free = one(policies=["splitwise"])
    capped = one(policies=["splitwise"], pools={"decode": {"power_cap_w": 350}})
    assert capped["median_ttft_ms"] == free["median_ttft_ms"]
    assert capped["median_tpot_ms"] < 1.02 * free["median_tpot_ms"]
    both = one(policies=["splitwise"], power_cap_w=250)
    assert both["median_ttft_ms"] > 1.1 * free["median_ttft_ms"]


def test_a_pool_at_its_tdp_lifts_the_experiments_cap() -> None:
    lifted = one(power_cap_w=300, pools={"decode": {"power_cap_w": 700}})
    assert lifted["mean_power_w"] == one(pools={"prefill": {"power_cap_w": 300}})["mean_power_w"]
    with pytest.raises(SimctlError, match="has no effect: the TDP"):
        one(pools={"decode": {"power_cap_w": 700}})


def test_a_link_moves_what_it_should() -> None:
    fast, slow = (one(link={"bandwidth_gb_s": rate}) for rate in (100, 2))
    assert slow["median_transfer_ms"] > 20 * fast["median_transfer_ms"]
    assert slow["median_ttft_ms"] == fast["median_ttft_ms"]
    assert slow["mean_tpot_ms"] > fast["mean_tpot_ms"]
    late = one(link={"bandwidth_gb_s": 100, "latency_us": 5000})
    assert late["median_transfer_ms"] == pytest.approx(fast["median_transfer_ms"] + 5, abs=0.02)
    early = one(link={"bandwidth_gb_s": 2, "overlap": "layer"})
    assert early["median_transfer_ms"] < 0.8 * slow["median_transfer_ms"]
    fair, fifo = (one(link={"bandwidth_gb_s": 1, "sharing": how}) for how in ("fair", "fifo"))
    assert fair["median_transfer_ms"] != fifo["median_transfer_ms"]


def test_tensor_parallelism_serves_every_policy() -> None:
    runs = {tp: one(policies=["sarathi-512"], parallel={"tp": tp}) for tp in (1, 2)}
    assert runs[2]["num_gpus"] == 2
    assert runs[2]["median_tpot_ms"] < 0.8 * runs[1]["median_tpot_ms"]
    assert runs[2]["kv_blocks"] > 1.1 * runs[1]["kv_blocks"]
    assert any("ring over 2 GPUs" in label for label in runs[2]["provenance"])


def test_results_do_not_depend_on_the_number_of_jobs() -> None:
    experiment = {**BASE, "policies": ["distserve", "splitwise"], "num_runs": 2, "jitter": True}
    one_job, two = (run(experiment, jobs=jobs) for jobs in (1, 2))
    assert one_job.summary["runs"] == two.summary["runs"]
    assert one_job.requests.equals(two.requests)


def test_policies_with_and_without_pools_stand_side_by_side() -> None:
    study = prepare({**BASE, "policies": ["distserve", "sarathi-512"], "pools": {"prefill": {"count": 2}}})
    policies = [study.setting.policy(run.policy) for run in study.runs]
    assert [num_gpus(study.setting.experiment, policy) for policy in policies] == [3, 1]
    assert [row["policy"] for row in memory_plans(study)] == [
        "distserve (prefill)",
        "distserve (decode)",
        "sarathi-512",
    ]


def test_another_gpus_profile_is_part_of_what_was_run() -> None:
    hashes = {
        gpu: prepare({**BASE, "pools": {"decode": {"gpu": gpu}}}).resolved["resolved"]["profile_sha256"]
        for gpu in ("h100-sxm", "a100-80gb-sxm")
    }
    assert len(set(hashes.values())) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"policies": ["vllm"], "pools": {}},
            "`pools` has no effect, since none of the policies splits prefill",
        ),
        ({"policies": ["vllm"], "link": {}}, "`link` has no effect"),
        (
            {"replicas": 2},
            "`replicas` has no effect, since none of the policies does all on one replica; say `pools`",
        ),
        ({"router": "least-outstanding"}, "`router` has no effect"),
        ({"pools": {"mixed": {}}}, "policy 'distserve' has no pool 'mixed'; its pools are prefill, decode"),
        ({"pools": {"decode": {"gpu": "h100"}}}, "Unknown GPU 'h100'. Did you mean 'h100-sxm'"),
        ({"pools": {"decode": {"tp": 3}}}, "tp = 3 does not divide"),
        ({"pools": {"decode": {"power_cap_w": 900}}}, "power_cap_w = 900 has no effect: the TDP"),
        ({"parallel": {"tp": 64}}, "tp = 64 is not modelled"),
        (
            {"power_cap_w": 10},
            "power_cap_w = 10 is not possible: the lowest power limit of h100-sxm is 200 W",
        ),
        (
            {"model": "llama-3.1-70b", "pools": {"prefill": {"tp": 4}}},
            "llama-3.1-70b does not fit on h100-sxm: 79.10 GiB x 0.9 = 71.19 GiB, less 131.42 GiB of weights",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SimctlError) as caught:
        prepare({**BASE, **changes})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)

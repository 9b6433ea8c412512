"""Two latency classes in one workload: a class's priority orders requests under policies that have such an order."""

from __future__ import annotations

from typing import Any

import sim

CLASSES = {"chat": {"ttft_ms": 1000, "priority": 0}, "batch": {"e2el_ms": 60000, "priority": 3}}


def experiment(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "workload": {
            "arrivals": "poisson",
            "num_prompts": 150,
            "prompt_tokens": 2000,
            "output_tokens": 30,
            "slo_class": {"chat": 0.3, "batch": 0.7},
        },
        "model": "llama-3.1-8b",
        "gpu": "h200-sxm",
        "profile": "spec",
        "policies": ["vllm", {"name": "vllm", "scheduling_policy": "priority", "label": "ranked"}],
        "sweep": {"request_rate": 40},
        "slo": {"classes": CLASSES},
    }
    return {**base, **changes}


def test_the_urgent_class_overtakes_under_a_policy_that_orders_by_priority() -> None:
    result = sim.run(experiment())
    assert set(result.requests["priority"]) == {0, 3}
    ttft = result.requests.groupby(["policy", "slo_class"])["ttft_ms"].mean()
    assert ttft["ranked", "chat"] < 0.5 * ttft["vllm", "chat"]
    assert ttft["ranked", "batch"] > ttft["vllm", "batch"]
    share = {run["policy"]: run["slo_attainment_by_class"]["chat"] for run in result.summary["runs"]}
    assert share["ranked"] > share["vllm"]


def test_without_classes_the_order_by_priority_is_first_come_first_served() -> None:
    result = sim.run(
        experiment(slo={"ttft_ms": 1000}, workload={**experiment()["workload"], "slo_class": "chat"})
    )
    plain, ranked = (result.requests[result.requests["policy"] == name] for name in ("vllm", "ranked"))
    assert plain["finish_s"].tolist() == ranked["finish_s"].tolist()

"""What an experiment asks of each SLO class reaches the policies, in seconds."""

from __future__ import annotations

import math

from sim.engine.deployment import Target
from sim.study.plan import prepare

BASE = {
    "workload": {"arrivals": "poisson", "num_prompts": 4, "prompt_tokens": 16, "output_tokens": 4},
    "model": "llama-3.1-8b",
    "gpu": "h200-sxm",
    "profile": "spec",
    "policies": ["vllm"],
    "sweep": {"request_rate": [1]},
}


def test_limits_without_classes() -> None:
    setting = prepare({**BASE, "slo": {"ttft_ms": 500, "ttft_ms_per_token": 3}}).setting
    assert setting.targets(("default",)) == (Target(ttft_s=0.5, ttft_per_token_s=0.003),)


def test_each_class_has_its_own_limits_in_the_workloads_order() -> None:
    slo = {"tpot_ms": 50, "classes": {"batch": {"e2el_ms": 60000}, "chat": {"itl_ms": 40}}}
    workload = {**BASE["workload"], "slo_class": {"batch": 0.5, "chat": 0.5}}  # type: ignore[dict-item]
    setting = prepare({**BASE, "workload": workload, "slo": slo}).setting
    names = setting.workload(1, 0).slo_classes
    by_name = dict(zip(names, setting.targets(names), strict=True))
    assert by_name == {"batch": Target(e2el_s=60.0), "chat": Target(itl_s=0.04)}
    assert by_name["chat"].tpot_s == math.inf


def test_rates_per_gpu_offer_a_larger_system_more() -> None:
    study = prepare({**BASE, "sweep": {"request_rate": [3], "per_gpu": True}, "replicas": 2})
    (run,) = study.runs
    assert (run.request_rate, run.rate_per_gpu) == (6, 3)

"""Keys that change nothing under any of the policies are refused, and only those."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest

from sim.errors import SimctlError
from sim.policies import BUILT_IN, make_policy
from sim.study.execute import execute
from sim.study.plan import prepare

SAME_OUTCOME = ("mean_ttft_ms", "mean_tpot_ms", "duration", "rejected")
# settings under which a policy has the steps, or the need to predict, that it may have
BUSY = {
    "splitwise": {"prompt_queue_tokens": 0},
    "semi-pd": {"window_size": 20, "switch_s": 0.1},
}
MORE = {
    "mixed sglang": {"name": "sglang", "mixed_chunk": True},
    "limited pod": {"name": "pod", "step_limit_ms": 9},
    "static semi-pd": {"name": "semi-pd-oss"},
    "bullet-oss": {"name": "bullet-oss"},
}
NAMES = [*BUILT_IN, *MORE]
COMPANIONS = {"companion vllm": {"name": "vllm"}, "companion muxwise": {"name": "muxwise"}}


def entry(name: str) -> dict[str, Any]:
    return {**{**MORE, **COMPANIONS}.get(name, {"name": name}), **BUSY.get(name, {})}


def experiment(*names: str, **changes: Any) -> dict[str, Any]:
    return {
        "workload": {"trace": "sample-conv", "max_requests": 60},
        "model": "llama-3.1-8b",
        "gpu": "h200-sxm",
        "profile": "spec",
        "jitter": False,
        "policies": [{**entry(name), "label": name} for name in names],
        "sweep": {"request_rate": [30]},
        "slo": {"ttft_ms": 300, "tpot_ms": 12},
        **changes,
    }


@lru_cache(maxsize=256)
def _outcome(name: str, changes: str) -> tuple[float, ...]:
    # companions heed every key, so that nothing is refused
    study = prepare(experiment("companion vllm", "companion muxwise", name, **json.loads(changes)))
    summary = execute(study.setting, study.runs[-1]).summary
    return tuple(summary[key] for key in SAME_OUTCOME)


def outcome_of(name: str, changes: dict[str, Any]) -> tuple[float, ...]:
    return _outcome(name, json.dumps(changes))


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_changes_something_or_is_refused(name: str) -> None:
    heeds = make_policy(entry(name)).heeds_estimator if name != "slo-admission" else True
    others = [{"noisy": {"sigma": 3.0, "bias": 2.0}}, "oracle"]
    changed = [outcome_of(name, {"estimator": belief}) != outcome_of(name, {}) for belief in others]
    assert any(changed) == heeds
    if not heeds:
        with pytest.raises(
            SimctlError, match="`estimator` has no effect, since none of the policies predicts"
        ):
            prepare(experiment(name, estimator="oracle"))


@pytest.mark.parametrize("name", NAMES)
def test_an_attention_mode_changes_something_or_is_refused(name: str) -> None:
    changes = {"kernels": {"attention": "hfuse"}}
    if outcome_of(name, changes) != outcome_of(name, {}):
        prepare(experiment(name, **changes))
        return
    with pytest.raises(SimctlError) as caught:
        prepare(experiment(name, **changes))
    sentence = str(caught.value)
    assert "`kernels.attention` has no effect, since none of the policies" in sentence
    assert "as vllm, sarathi and duetserve do" in sentence


def test_one_policy_that_heeds_a_key_is_enough() -> None:
    study = prepare(
        experiment("static-split", "vllm", "muxwise", kernels={"attention": "pod"}, estimator="oracle")
    )
    assert len(study.runs) == 3


def test_a_scale_of_fused_attention_needs_a_fused_kernel() -> None:
    kernels = {"scale": {"fused_attention": 0.5}}
    with pytest.raises(SimctlError, match=r"`kernels\.scale\.fused_attention` has no effect"):
        prepare(experiment("vllm", "bullet", kernels=kernels))
    prepare(experiment("vllm", "pod", kernels=kernels))
    prepare(experiment("vllm", kernels={"attention": "pod", **kernels}))


def test_policies_in_plain_python_may_heed_everything() -> None:
    class Mine:
        lanes = 1

        def plan(self, view: Any) -> None: ...

    e = experiment("vllm", kernels={"attention": "pod"}, estimator="oracle")
    prepare({**e, "policies": ["static-batch"]}, extra=[Mine()])


def test_a_policy_in_plain_python_may_say_what_it_does_not_heed() -> None:
    class Mine:
        mixes = heeds_estimator = False

        def plan(self, view: Any) -> None: ...

    for key, value in (("kernels", {"attention": "pod"}), ("estimator", "oracle")):
        with pytest.raises(SimctlError, match=f"`{key}.* has no effect"):
            prepare({**experiment("static-batch"), key: value}, extra=[Mine()])

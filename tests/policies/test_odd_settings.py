"""Settings at the edge of what a knob allows: refused in a sentence that names what was given, or served to the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.engine.deployment import Deployment
from sim.errors import SimctlError
from sim.policies import make_policy
from sim.study.execute import execute
from sim.study.plan import prepare


def test_a_gate_names_what_it_cannot_put_before() -> None:
    with pytest.raises(SimctlError, match=r"slo-admission.*knob 'policy' is 3"):
        make_policy({"name": "slo-admission", "policy": 3})


def test_a_share_that_cannot_be_made_is_told_by_the_side_that_was_given() -> None:
    policy = make_policy({"name": "static-split", "decode_sms": 1})
    with pytest.raises(SimctlError, match="decode_sms = 1 is no set"):
        policy.split(Deployment(1000, 16, 4096, "h200-sxm", 132))


def test_no_threshold_pulls_one_request_at_a_time() -> None:
    study = prepare(
        {
            "workload": {"trace": "sample-conv", "max_requests": 30},
            "model": "llama-3.1-8b",
            "gpu": "h200-sxm",
            "profile": "spec",
            "policies": [{"name": "distserve", "waiting_block_threshold": 0}],
            "sweep": {"request_rate": [8]},
        }
    )
    outcome = execute(study.setting, study.runs[0])
    assert outcome.summary["completed"] == 30


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_count_and_a_share_of_the_same_side_are_one_too_many(side: str) -> None:
    knobs = {f"{side}_sms": 64, f"{side}_share": 0.3}
    with pytest.raises(SimctlError, match=f"'mine': {side}_sms and {side}_share both say how many"):
        make_policy({"name": "static-split", "label": "mine", **knobs})


def test_a_count_of_one_side_leaves_the_other_its_share() -> None:
    gpu = Deployment(1000, 16, 4096, "h200-sxm", 132)
    both = make_policy({"name": "static-split", "decode_sms": 32, "prefill_share": 0.3})
    alone = make_policy({"name": "static-split", "decode_sms": 32})
    assert both.split(gpu) == (40, 32)
    assert alone.split(gpu) == (100, 32)


def test_faults_that_the_gpu_decides_are_told_with_their_line_before_anything_runs(tmp_path: Path) -> None:
    text = (
        "workload: {trace: sample-conv, max_requests: 3}\nmodel: llama-3.1-8b\ngpu: h200-sxm\nprofile: spec\n"
        "policies:\n- vllm\n- {name: static-split, decode_sms: 1}\n"
    )
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(
        SimctlError, match=r"e\.yaml, line 7: policy 'static-split': decode_sms = 1 is no set"
    ):
        prepare(tmp_path / "e.yaml")


def test_a_kernels_fault_names_its_policy() -> None:
    with pytest.raises(
        SimctlError, match=r"policy 'mine': attention ctas_per_sm is 1, but must be 2, 4 or 0"
    ):
        make_policy({"name": "pod", "label": "mine", "ctas_per_sm": 1})


def test_a_pass_has_a_least_length() -> None:
    # one token a pass through all layers served 25 requests in minutes
    with pytest.raises(SimctlError, match="'longest_pass' is 1; the least is 16"):
        make_policy({"name": "bullet", "longest_pass": 1})

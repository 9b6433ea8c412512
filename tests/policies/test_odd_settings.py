"""Settings at the edge of what a knob allows: refused in a sentence that names what was given, or served to the end."""

from __future__ import annotations

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

"""Admission by SLO before policies of one lane, of two, and a user's own: goodput in overload, and an account of it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from stub_cost import real_cost
from workloads import workload

from sim.engine import Decode, Mixed, Plan, RunRecords, View, simulate
from sim.engine.deployment import Target
from sim.errors import SimctlError
from sim.metrics.conservation import check_conservation
from sim.policies import make_policy
from sim.policies.slo_admission import SloAdmission
from sim.workload.workload import Workload

LIMITS = Target(ttft_s=0.5, tpot_s=0.03)
BEHIND = ["vllm", "sarathi-512", "sglang-1024", "vllm-v0", "static-batch", "static-split"]


class Greedy:
    """A policy in plain Python: all prompts of the queue at once, with the decodes aboard."""

    label = "greedy"
    max_num_seqs = 128

    def plan(self, view: View) -> Plan:
        budget, chunks = 8192 - len(view.running), []
        for i, size in zip(view.waiting.id, view.waiting.target_tokens, strict=True):
            if size > budget or len(view.running) + len(chunks) >= self.max_num_seqs:
                break
            chunks.append((int(i), int(size)))
            budget -= size
        return Plan([Mixed(chunks)] if chunks else [Decode()])


def overload(rate: float, n: int = 250, seed: int = 1) -> Workload:
    rng = np.random.default_rng(seed)
    return workload(
        np.cumsum(rng.exponential(1 / rate, n)).tolist(),
        rng.integers(200, 3000, n).tolist(),
        rng.integers(5, 120, n).tolist(),
    )


def run(
    policy: Any, load: Workload, limits: Target | tuple[Target, ...] = LIMITS, **options: Any
) -> RunRecords:
    targets = limits if isinstance(limits, tuple) else (limits,) * len(load.slo_classes)
    made = make_policy(policy) if isinstance(policy, str | dict) else policy
    records = simulate(load, made, real_cost(), targets=targets, **options)
    check_conservation(records)
    return records


def good(records: RunRecords, limit: Target = LIMITS) -> int:
    """Requests that met the limits."""
    frame = records.requests
    ttft = frame["first_token_s"] - frame["arrival_s"]
    tpot = (frame["finish_s"] - frame["first_token_s"]) / np.maximum(frame["output_tokens"] - 1, 1)
    return int(((ttft <= limit.ttft_s) & (tpot <= limit.tpot_s)).sum())


@lru_cache(maxsize=32)
def in_overload(policy: str, gate: tuple[tuple[str, Any], ...] | None, rate: float = 60.0) -> RunRecords:
    behind: Any = Greedy() if policy == "greedy" else policy
    entry = behind if gate is None else SloAdmission(policy=behind, **dict(gate))
    return run(entry, overload(rate))


@pytest.mark.parametrize("policy", [*BEHIND, "greedy"])
def test_it_raises_goodput_in_overload(policy: str) -> None:
    if policy == "static-batch":
        return  # who comes in the middle of a batch has lost already: refusing others cannot help
    without, gated = good(in_overload(policy, None)), good(in_overload(policy, ()))
    assert gated > 1.3 * without
    assert gated > 25


@pytest.mark.parametrize("policy", [*BEHIND, "greedy"])
def test_rejections_are_accounted(policy: str) -> None:
    frame = in_overload(policy, ()).requests
    rejected = frame["status"] == "rejected"
    assert 0 < rejected.sum() < len(frame)
    assert ((frame["status"] == "finished") | rejected).all()
    assert set(frame.loc[rejected, "reason"]) <= {
        "slo-admission: forecast of TTFT over 500 ms",
        "slo-admission: forecast of TPOT over 30 ms",
    }
    assert (frame.loc[~rejected, "reason"] == "").all()
    assert (frame.loc[rejected, "generated_tokens"] == 0).all()
    assert frame.loc[rejected, ["first_scheduled_s", "first_token_s", "finish_s"]].isna().all(axis=None)
    assert (frame.loc[rejected, "replica"] == -1).all()


@pytest.mark.parametrize("policy", ["vllm", "static-split"])
@pytest.mark.parametrize("on_miss", ["reject", "delay"])
def test_without_limits_or_load_it_is_not_there(policy: str, on_miss: str) -> None:
    gate = {"name": "slo-admission", "policy": policy, "on_miss": on_miss}
    for load, limits in ((overload(60, 80), Target()), (overload(2, 60), Target(ttft_s=5.0, tpot_s=0.2))):
        plain, gated = run(policy, load, limits), run(gate, load, limits)
        assert plain.requests.equals(gated.requests)
        assert np.array_equal(plain.itl_s, gated.itl_s)


@pytest.mark.parametrize("policy", ["vllm", "static-split", "greedy"])
def test_held_requests_are_all_served_in_the_end(policy: str) -> None:
    records = in_overload(policy, (("on_miss", "delay"),))
    assert (records.requests["status"] == "finished").all()
    assert good(records) > good(in_overload(policy, None))
    # an account of the wait outside: it is part of the time spent waiting
    waits = records.requests["first_scheduled_s"] - records.requests["arrival_s"]
    assert records.totals["waiting_s"] == pytest.approx(waits.sum(), rel=1e-9)


def test_each_class_has_its_own_limits() -> None:
    load = overload(60)
    kind = (np.arange(len(load)) % 2).astype(np.int16)
    load = replace(load, slo_class=kind, slo_classes=("chat", "batch"))
    frame = run(
        {"name": "slo-admission", "policy": "sarathi-512"}, load, (Target(ttft_s=0.4), Target())
    ).requests
    rejected = frame[frame["status"] == "rejected"]
    assert set(rejected["slo_class"]) == {"chat"}
    assert set(rejected["reason"]) == {"slo-admission: forecast of TTFT over 400 ms of class chat"}
    chat = frame[(frame["slo_class"] == "chat") & (frame["status"] == "finished")]
    met = (chat["first_token_s"] - chat["arrival_s"]) <= 0.4
    assert len(chat) > 5
    assert met.mean() > 0.6


def test_limits_that_grow_with_the_prompt_and_limits_on_the_whole() -> None:
    gate = {"name": "slo-admission", "policy": "vllm"}
    per_token = run(gate, overload(60), Target(ttft_per_token_s=2e-4)).requests
    whole = run(gate, overload(60), Target(e2el_s=2.0)).requests
    assert set(per_token["reason"]) == {"", "slo-admission: forecast of TTFT over 0.2 ms a token"}
    assert set(whole["reason"]) == {"", "slo-admission: forecast of E2E latency over 2000 ms"}


MOVES = [
    ("slack", 3.0, "rejected", 1, {}),
    ("ttft_ms", 100, "rejected", 1, {"policy": "sarathi-512"}),
    ("tpot_ms", 8, "rejected", 1, {}),
    ("on_miss", "delay", "rejected", -1, {}),
    ("policy", "static-split", "max_itl", -1, {}),
    # two partitions slow each other down, which the forecast of TTFT leaves out
    ("feedback", 0.5, "late", -1, {"policy": "static-split", "feedback": 0.0}),
]


def gate_metrics(**gate: Any) -> dict[str, float]:
    frame = run({"name": "slo-admission", "policy": "vllm", **gate}, overload(60)).requests
    return {
        "rejected": (frame["status"] == "rejected").sum(),
        "max_itl": frame["max_itl_s"].max(),
        "late": ((frame["first_token_s"] - frame["arrival_s"]) > LIMITS.ttft_s).sum(),
    }


@pytest.mark.parametrize(("knob", "value", "metric", "direction", "given"), MOVES, ids=[m[0] for m in MOVES])
def test_every_knob_moves_what_it_is_about(
    knob: str, value: Any, metric: str, direction: int, given: dict[str, Any]
) -> None:
    change = gate_metrics(**{**given, knob: value})[metric] - gate_metrics(**given)[metric]
    assert change * direction > 0


def test_the_list_of_knobs_is_complete() -> None:
    assert {row[0] for row in MOVES} == set(SloAdmission.knobs)


def test_a_wrong_belief_costs_goodput() -> None:
    entry = {"name": "slo-admission", "policy": "sarathi-512", "feedback": 0.0}
    truth = run(entry, overload(60), estimator="oracle")
    rash = run(entry, overload(60), estimator={"noisy": {"sigma": 0.0, "bias": -1.5}})
    timid = run(entry, overload(60), estimator={"noisy": {"sigma": 0.0, "bias": 1.5}})
    assert good(rash) < good(truth)
    assert good(timid) < good(truth)


def test_several_replicas_have_a_gate_each() -> None:
    records = run(
        {"name": "slo-admission", "policy": "vllm"}, overload(100), replicas=2, router="least-outstanding"
    )
    frame = records.requests
    assert set(frame.loc[frame["status"] == "finished", "replica"]) == {0, 1}
    assert (frame["status"] == "rejected").sum() > 0


def test_a_client_whose_request_is_refused_sends_the_next() -> None:
    n = 60
    load = replace(workload([0.0] * n, [4000] * n, [20] * n), max_concurrency=30)
    frame = run({"name": "slo-admission", "policy": "vllm"}, load, Target(ttft_s=0.3)).requests
    assert set(frame["status"]) == {"finished", "rejected"}
    # refused at once: the whole list is through before the first wave has finished
    assert (frame["status"] == "rejected").sum() > 20


def test_a_horizon_leaves_held_requests_unfinished() -> None:
    gate = {"name": "slo-admission", "policy": "vllm", "on_miss": "delay"}
    frame = run(gate, overload(60), horizon_s=4.0).requests
    assert set(frame["status"]) == {"finished", "unfinished"}
    never = frame[frame["replica"] == -1]
    assert len(never) > 0
    assert (never["status"] == "unfinished").all()


def test_bad_entries_are_refused_in_one_sentence() -> None:
    for entry, sentence in (
        ({"policy": "nosuch"}, "unknown policy 'nosuch'"),
        ({"policy": {"name": "sarathi", "token_budgt": 3}}, "has no knob 'token_budgt'"),
        ({"policy": "slo-admission"}, "an admission of its own"),
        ({"on_miss": "retry"}, "knob 'on_miss' is 'retry'; it takes reject or delay"),
        ({"slak": 2}, "policy 'slo-admission' has no knob 'slak'. Did you mean 'slack'"),
        ({"slack": -1}, "knob 'slack' is -1; the least is 0"),
        ({"ttft_ms": "fast"}, "knob 'ttft_ms' is 'fast'; it takes a number"),
    ):
        with pytest.raises(SimctlError, match=sentence.replace("?", r"\?")):
            make_policy({"name": "slo-admission", **entry})
    assert make_policy({"name": "slo-admission", "ttft_ms": 12.5})["ttft_ms"] == 12.5


def test_the_wrapper_shows_what_it_wraps() -> None:
    gate = make_policy({"name": "slo-admission", "policy": {"name": "sarathi", "token_budget": 256}})
    assert (gate.label, gate.wrapped["token_budget"], gate.lanes, gate.heeds_estimator) == (
        "slo-admission",
        256,
        1,
        True,
    )
    with pytest.raises(AttributeError):
        _ = gate.no_such_thing

"""What holds for every run: conservation, one order of time, and no trace of how the run was computed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from fingerprint import TIGHT, fingerprint, standard_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_cost import TICK, real_cost, rough_tables, stub_cost
from workloads import Case, cases, workload

from sim.engine import RunRecords, simulate
from sim.policies import make_policy

EXACT = stub_cost(rough_tables(TICK, wobble=True))
UGLY = stub_cost(rough_tables(1.1e-6, wobble=True))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    """A case on one or several replicas, open or closed, cut by a warm-up, a horizon, or the last arrival."""
    case = draw(cases())
    if draw(st.booleans()):
        case = replace(case, workload=replace(case.workload, max_concurrency=draw(st.integers(1, 6))))
    options: dict[str, Any] = {
        "replicas": draw(st.integers(1, 3)),
        "router": draw(st.sampled_from(["round-robin", "least-outstanding"])),
        "warmup_s": draw(st.sampled_from([0.0, 0.0, 0.01, 0.1])),
        "horizon_s": draw(st.sampled_from([None, None, 0.005, 0.05, 0.3])),
        "drain": draw(st.sampled_from([True, True, False])),
    }
    return case, options


def run(case: Case, cost: Any = EXACT, **options: Any) -> RunRecords:
    return simulate(
        case.workload,
        make_policy(case.entry),
        cost,
        num_gpu_blocks=case.blocks,
        block_size=case.block_size,
        record_steps=True,
        **options,
    )


def check_requests_and_tokens(case: Case, options: dict[str, Any], records: RunRecords) -> None:
    """Each ends once; its tokens are logged once; nothing is computed twice without an eviction."""
    frame = records.requests
    assert list(frame["request_id"]) == list(range(len(case.workload)))
    finished, rejected = frame["status"] == "finished", frame["status"] == "rejected"
    unfinished = frame["status"] == "unfinished"
    assert (finished.astype(int) + rejected + unfinished == 1).all()
    assert (frame.loc[finished, "generated_tokens"] == frame.loc[finished, "output_tokens"]).all()
    assert (frame.loc[unfinished, "generated_tokens"] < frame.loc[unfinished, "output_tokens"]).all()
    assert (frame.loc[rejected, "generated_tokens"] == 0).all()
    assert (frame.loc[rejected, "reason"] != "").all()
    assert (frame.loc[~rejected, "reason"] == "").all()
    if options["horizon_s"] is None and options["drain"]:
        assert not unfinished.any()
    assert records.itl_count.sum() + frame["first_token_s"].notna().sum() == frame["generated_tokens"].sum()
    assert (frame["first_token_s"].notna() == (frame["generated_tokens"] > 0)).all()
    steps = records.steps
    if steps is not None and frame["preemptions"].sum() == 0 and not unfinished.any():
        # nothing is computed twice
        assert steps["prefill_tokens"].sum() == frame.loc[finished, "prompt_tokens"].sum()
        assert steps["decode_batch"].sum() == (frame.loc[finished, "output_tokens"] - 1).sum()


def check_times(records: RunRecords) -> None:
    """Time never goes back, and a replica is never more than busy."""
    frame = records.requests
    for before, after in (
        ("arrival_s", "first_scheduled_s"),
        ("first_scheduled_s", "first_token_s"),
        ("first_token_s", "finish_s"),
    ):
        gap = (frame[after] - frame[before]).dropna()
        assert (gap >= 0).all()
    assert not (frame["finish_s"] > records.end_s).any()
    assert (records.itl_s > 0).all()
    assert (records.itl_end_s <= records.end_s).all()
    span = records.end_s * records.replicas
    assert records.totals["busy_s"] <= span * (1 + 1e-12)
    assert records.totals["kv_block_s"] <= records.num_blocks * span * (1 + 1e-12)
    if records.steps is None:
        return
    for _, mine in records.steps.groupby("replica"):
        starts, ends = mine["start_s"].to_numpy(), mine["end_s"].to_numpy()
        assert (starts < ends).all()
        assert (starts[1:] >= ends[:-1]).all()
    assert records.steps["end_s"].max() <= records.end_s
    busy = (records.steps["end_s"] - records.steps["start_s"]).sum()
    assert busy <= records.totals["busy_s"] * (1 + 1e-9)
    if not (frame["status"] == "unfinished").any():
        # else a step may be in flight at the end
        assert busy == pytest.approx(records.totals["busy_s"], rel=1e-9)


def check_queues(records: RunRecords) -> None:
    """Integral of the number inside = sum of times inside; of those waiting too, where nobody waits twice."""
    inside = records.requests[(records.requests["status"] != "rejected") & (records.requests["replica"] >= 0)]
    left = inside["finish_s"].fillna(records.end_s)
    total = records.totals["waiting_s"] + records.totals["running_s"]
    assert total == pytest.approx(float((left - inside["arrival_s"]).sum()), rel=1e-9, abs=1e-12)
    waits = float((inside["first_scheduled_s"].fillna(records.end_s) - inside["arrival_s"]).sum())
    if inside["preemptions"].sum() == 0:
        assert records.totals["waiting_s"] == pytest.approx(waits, rel=1e-9, abs=1e-12)
    else:
        assert records.totals["waiting_s"] >= waits - 1e-9


@given(drawn=runs())
@settings(max_examples=80)
def test_every_run_obeys_the_laws(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, options = drawn
    records = run(case, **options)
    check_requests_and_tokens(case, options, records)
    check_times(records)
    check_queues(records)


@pytest.mark.parametrize("name", ["vllm", "sarathi", "sglang"])
def test_sms_are_never_more_than_all_active(name: str) -> None:
    rng = np.random.default_rng(3)
    load = workload(
        np.cumsum(rng.exponential(0.01, 60)).tolist(),
        rng.integers(1, 3000, 60).tolist(),
        rng.integers(1, 80, 60).tolist(),
    )
    cost = real_cost()
    records = simulate(load, make_policy(name), cost)
    totals = records.totals
    assert 0 < totals["sm_active_s"] <= cost.gpu.sms * totals["busy_s"]
    assert 0 < totals["gpu_s"] <= totals["busy_s"] * 1.05  # jitter is within a few per cent
    assert totals["launches_graph"] + totals["launches_eager"] == totals["iterations"]


@given(drawn=runs(), ugly=st.booleans())
@settings(max_examples=60)
def test_bursts_change_nothing(drawn: tuple[Case, dict[str, Any]], ugly: bool) -> None:
    case, options = drawn
    cost = UGLY if ugly else EXACT
    one_by_one = run(case, cost, bursts=False, **options)
    assert fingerprint(run(case, cost, bursts=True, **options)) == fingerprint(one_by_one)


def test_bursts_are_taken() -> None:
    case = Case(
        workload([0.0], [10], [100]),
        {"name": "vllm", "max_num_seqs": 4, "max_num_batched_tokens": 64},
        50,
        16,
    )
    assert run(case).totals["decisions"] < 10
    assert run(case, bursts=False).totals["decisions"] >= 100


@given(drawn=runs())
@settings(max_examples=10)
def test_the_same_run_twice_gives_the_same_bytes(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, options = drawn
    assert fingerprint(run(case, **options)) == fingerprint(run(case, **options))


def test_the_seed_draws_the_jitter_and_nothing_else() -> None:
    load = workload([0.0, 0.01, 0.02], [100, 50, 10], [40, 30, 20])

    def once(**options: Any) -> str:
        return fingerprint(simulate(load, make_policy("sarathi"), real_cost(), **options))

    assert once(seed=1) == once(seed=1)
    assert once(seed=1) != once(seed=2)
    assert once(seed=1, jitter=False) == once(seed=2, jitter=False)
    assert once(seed=1, jitter=False) != once(seed=1)


def test_replicas_draw_their_own_jitter() -> None:
    load = workload([0.0, 0.0], [64, 64], [30, 30])
    records = simulate(load, make_policy("sarathi"), real_cost(), replicas=2)
    assert records.requests["finish_s"][0] != records.requests["finish_s"][1]
    same = simulate(load, make_policy("sarathi"), real_cost(), replicas=2, jitter=False)
    assert same.requests["finish_s"][0] == same.requests["finish_s"][1]


def test_a_preempted_request_keeps_its_first_token_and_waits_in_its_gaps() -> None:
    # 8 blocks of 1: both prompts fit, both outputs do not
    case = Case(
        workload([0.0, 0.0], [3, 3], [4, 4]),
        {"name": "vllm", "max_num_batched_tokens": 64, "max_num_seqs": 4},
        8,
        1,
    )
    records = run(case)
    first, second = records.requests.iloc[0], records.requests.iloc[1]
    assert (first["preemptions"], second["preemptions"]) == (0, 1)
    assert second["first_token_s"] == first["first_token_s"] == records.steps["end_s"][0]
    # evicted after 2 tokens, it starts again when the first is done, from 3 + 2 tokens
    assert second["max_itl_s"] > 2 * first["max_itl_s"]
    assert records.steps.iloc[-2][["prefill_tokens", "decode_batch"]].tolist() == [5, 0]


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed: there is nothing to compare")
@pytest.mark.parametrize(
    "name",
    ["sarathi", *(pytest.param(name, marks=pytest.mark.slow) for name in TIGHT if name != "sarathi")],
)
def test_machine_code_and_cpython_give_the_same_bytes(name: str) -> None:
    assert standard_runs(name, compiled=True) == standard_runs(name, compiled=False)

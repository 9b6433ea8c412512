"""What holds for every run with pools: conservation on both sides, one order of time, the same bytes either way."""

from __future__ import annotations

import numpy as np
import pytest
from fingerprint import fingerprint
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_runs import PoolCase, crowds, pool_cases
from stub_cost import TICK, rough_tables, stub_cost
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.engine.link import Link
from sim.engine.pools import Pool
from sim.errors import SimctlError
from sim.metrics.conservation import check_conservation
from sim.policies import make_policy

EXACT = stub_cost(rough_tables(TICK, wobble=True))
UGLY = stub_cost(rough_tables(1.1e-6, wobble=True))
OPTIONS = st.fixed_dictionaries(
    {
        "warmup_s": st.sampled_from([0.0, 0.0, 0.01, 0.1]),
        "horizon_s": st.sampled_from([None, None, 0.005, 0.05, 0.3]),
        "drain": st.sampled_from([True, True, False]),
    }
)


def check_tokens(case: PoolCase, records: RunRecords) -> None:
    """Each request ends once, with all its tokens; nothing is computed twice without an eviction."""
    frame = records.requests
    status = frame["status"]
    assert status.isin(["finished", "rejected", "unfinished"]).all()
    finished = frame[status == "finished"]
    assert (finished["generated_tokens"] == finished["output_tokens"]).all()
    assert (frame.loc[status == "rejected", "reason"] != "").all()
    assert records.itl_count.sum() + frame["first_token_s"].notna().sum() == frame["generated_tokens"].sum()
    if records.steps is not None and not (status == "unfinished").any():
        steps = records.steps
        decoded = int((finished["output_tokens"] - 1).sum())
        if case.entry.get("pressure") == "swap" and case.entry["swap_space_gib"] == 16.0:
            # the swapped compute nothing again
            assert steps["prefill_tokens"].sum() == finished["prompt_tokens"].sum()
            assert steps["decode_batch"].sum() == decoded
        else:
            assert steps["prefill_tokens"].sum() >= finished["prompt_tokens"].sum()


def check_places(case: PoolCase, records: RunRecords) -> None:
    """Prompts on prefill replicas, tokens on decode replicas, KV moved once for each request with a second token."""
    frame = records.requests
    prefills = case.counts["prefill"]
    moved = frame["transfer_s"].notna()
    assert (frame.loc[moved, "transfer_s"] >= 0).all()
    assert (frame.loc[moved, "pull_wait_s"] >= 0).all()
    assert (frame.loc[frame["output_tokens"] == 1, "transfer_s"].isna()).all()
    if "mixed" not in case.counts and case.entry["name"] == "distserve":
        assert (frame["replica"] < prefills).all()
        assert (frame.loc[moved, "decode_replica"] >= prefills).all()
        done = frame["status"] == "finished"
        assert (moved == (done & (frame["output_tokens"] > 1)))[done].all()


def check_times(records: RunRecords) -> None:
    """Time never goes back, no replica is more than busy, no pool more than full."""
    for pool in records.pools:
        span = records.end_s * pool.replicas
        assert pool.totals["busy_s"] <= span * (1 + 1e-9)
        assert -1e-12 <= pool.totals["kv_block_s"] <= pool.num_blocks * span * (1 + 1e-9) + 1e-12
    if records.steps is not None:
        for _, mine in records.steps.groupby("replica"):
            starts, ends = mine["start_s"].to_numpy(), mine["end_s"].to_numpy()
            assert (starts < ends).all()
            assert (starts[1:] >= ends[:-1]).all()
    link = records.link
    assert link is not None
    wires = len(records.pools) ** 2 * 9
    assert link["busy_s"] <= wires * max(records.end_s, 1e-9) * (1 + 1e-9) or link["sharing"] == "fifo"


@given(case=st.one_of(pool_cases(), crowds()), options=OPTIONS)
@settings(max_examples=60, deadline=None)
def test_laws(case: PoolCase, options: dict[str, object]) -> None:
    records = case.run(EXACT, **options)
    check_conservation(records)
    check_tokens(case, records)
    check_places(case, records)
    check_times(records)
    if options["horizon_s"] is None and options["drain"]:
        assert not (records.requests["status"] == "unfinished").any()
    sums = {name: sum(pool.totals[name] for pool in records.pools) for name in ("iterations", "kv_block_s")}
    assert sums == pytest.approx({name: records.totals[name] for name in sums})


@given(case=st.one_of(pool_cases(), crowds()), options=OPTIONS)
@settings(max_examples=60, deadline=None)
def test_bursts_leave_no_trace(case: PoolCase, options: dict[str, object]) -> None:
    assert fingerprint(case.run(UGLY, **options)) == fingerprint(case.run(UGLY, bursts=False, **options))


@given(case=pool_cases())
@settings(max_examples=10, deadline=None)
def test_a_run_is_its_inputs(case: PoolCase) -> None:
    first, second = case.run(UGLY), case.run(UGLY)
    assert fingerprint(first) == fingerprint(second)
    assert np.array_equal(first.requests["transfer_s"], second.requests["transfer_s"], equal_nan=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vllm", {"pools": [Pool("prefill", 1, EXACT)]}, "policy 'vllm' does not split prefill from decode"),
        ("vllm", {"link": Link(1e9)}, "has no use for `link`"),
        ("distserve", {"pools": [Pool("prefill", 1, EXACT)]}, "policy 'distserve' needs a decode pool"),
        ("distserve", {"pools": [Pool("mixed", 1, EXACT)]}, "has no pool 'mixed'"),
    ],
)
def test_pools_that_do_not_fit_the_policy_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SimctlError, match=message):
        simulate(workload([0.0], [4], [2]), make_policy(name), EXACT, **options)


def test_a_policy_in_plain_python_cannot_have_pools() -> None:
    class Own:
        pools = ("prefill", "decode")

        def plan(self, view: object) -> None: ...

    with pytest.raises(SimctlError, match="policy 'Own' is written in plain Python"):
        simulate(workload([0.0], [4], [2]), Own(), EXACT)

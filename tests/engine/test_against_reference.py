"""The engine against the reference simulator: every time, gap and counter of random runs, to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Outcome, run_naive
from naive_schedulers import naive_scheduler
from stub_cost import TICK, rough_tables, stub_cost
from workloads import ENTRIES, Case, cases, workload

from sim.engine import RunRecords, simulate
from sim.engine.deploying import deploy, largest_step
from sim.policies import make_policy

# the longest request of a case has 150 tokens: small tables for policies whose steps grow with the context
EXACT = stub_cost(rough_tables(TICK, wobble=True), max_context=256)
UGLY = stub_cost(rough_tables(1.1e-6, wobble=True), max_context=256)


def naive_run(case: Case, cost: Any) -> Outcome:
    """The run in the reference simulator."""
    scheduler = naive_scheduler(case.entry["name"], case.entry, case.blocks, case.block_size)
    deployment = deploy(make_policy(case.entry), cost, num_gpu_blocks=case.blocks, block_size=case.block_size)
    largest, seqs = largest_step(make_policy(case.entry), deployment)
    prices = cost.compile(max_tokens=largest, max_seqs=seqs, max_context=cost.model.max_context)
    return run_naive(case.workload, scheduler, prices)


def both(case: Case, cost: Any) -> tuple[RunRecords, Outcome]:
    """The same run in the engine and in the reference simulator."""
    policy = make_policy(case.entry)
    records = simulate(
        case.workload,
        policy,
        cost,
        num_gpu_blocks=case.blocks,
        block_size=case.block_size,
        jitter=False,
        record_steps=True,
    )
    return records, naive_run(case, cost)


def pooled(records: RunRecords) -> Counter[float]:
    """Gaps with their counts."""
    gaps: Counter[float] = Counter()
    for gap, count in zip(records.itl_s.tolist(), records.itl_count.tolist(), strict=True):
        gaps[gap] += count
    return gaps


def assert_same(records: RunRecords, naive: Outcome) -> None:
    """Every column and counter that both know."""
    frame = records.requests
    assert set(np.flatnonzero(frame["status"] == "rejected").tolist()) == naive.rejected
    for r in naive.requests:
        row = frame.iloc[r.row]
        if r.row in naive.rejected:
            continue
        assert row["status"] == "finished"
        assert row["first_scheduled_s"] == r.first_scheduled_s, f"request {r.row} starts"
        assert row["first_token_s"] == r.token_s[0], f"request {r.row} first token"
        assert row["finish_s"] == r.token_s[-1], f"request {r.row} finish"
        assert row["preemptions"] == r.preemptions, f"request {r.row} preemptions"
        assert row["generated_tokens"] == r.generated == r.output
        if r.output > 1:
            assert row["max_itl_s"] == max(np.diff(r.token_s)), f"request {r.row} longest gap"
        else:
            assert np.isnan(row["max_itl_s"])
    assert pooled(records) == naive.gaps
    steps = records.steps
    columns = ("start_s", "end_s", "prefill_tokens", "chunks", "decode_batch")
    listed = [] if steps is None else list(zip(*(steps[c].tolist() for c in columns), strict=True))
    assert listed == naive.steps
    totals = records.totals
    assert totals["iterations"] == len(naive.steps)
    assert totals["prefill_pairs"] == naive.pairs
    assert totals["prefill_kv_tokens"] == naive.prefill_keys
    assert totals["decode_kv_tokens"] == naive.decode_keys
    assert totals["dense_tokens"] == sum(s[2] + s[4] for s in naive.steps)
    assert totals["head_rows"] == sum(s[3] + s[4] for s in naive.steps)
    for name in ("busy_s", "waiting_s", "running_s", "kv_block_s"):
        assert totals[name] == pytest.approx(getattr(naive, name), rel=1e-9, abs=1e-12), name
    assert naive.pool.free == naive.pool.total


@pytest.mark.parametrize("name", list(ENTRIES))
def test_random_runs_equal_the_reference(name: str) -> None:
    @given(case=cases(policies=(name,)))
    @settings(max_examples=80)
    def check(case: Case) -> None:
        assert_same(*both(case, EXACT))

    check()


@given(case=cases())
@settings(max_examples=30)
def test_random_runs_equal_the_reference_where_sums_round(case: Case) -> None:
    assert_same(*both(case, UGLY))


def with_arrivals_on_boundaries(case: Case, cost: Any, picks: list[tuple[int, int, int]]) -> Case:
    """Add requests that arrive exactly when a step ends: each (which step, prompt, output)."""
    after = 0.0
    for which, prompt, output in picks:
        ends = [end for _, end, *_ in naive_run(case, cost).steps if end >= after]
        if not ends:
            break
        after = ends[which % len(ends)]
        load = case.workload
        order = np.argsort(np.append(load.arrival_s, after), kind="stable")
        columns = (
            np.append(column, value)[order].tolist()
            for column, value in (
                (load.arrival_s, after),
                (load.prompt_tokens, prompt),
                (load.output_tokens, output),
            )
        )
        case = replace(case, workload=workload(*columns))
    return case


PICKS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4
)


@given(case=cases(most=6), picks=PICKS, ugly=st.booleans())
@settings(max_examples=40)
def test_arrivals_on_step_boundaries(case: Case, picks: list[tuple[int, int, int]], ugly: bool) -> None:
    cost = UGLY if ugly else EXACT
    assert_same(*both(with_arrivals_on_boundaries(case, cost, picks), cost))

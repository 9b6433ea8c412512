"""Bytes and joules by unit of work agree with launches priced one by one; rows of a step log have theirs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from workloads import workload

from sim.cost import load_cost
from sim.cost.shapes import Launch
from sim.cost.step_work import work_columns
from sim.cost.work import byte_sums, joules_per, total_joules
from sim.engine import simulate
from sim.policies import make_policy

COST = load_cost("llama-3.1-8b", "h200-sxm", "auto")
ROWS = pd.DataFrame(
    {
        "start_s": [0.0, 1.0, 2.0],
        "end_s": [0.06, 1.01, 2.04],
        "layers": [32, 32, 32],
        "prefill_tokens": [2048, 0, 512],
        "chunks": [1, 0, 1],
        "history_tokens": [512, 0, 100],
        "decode_batch": [0, 40, 20],
        "context_sum": [0, 40 * 1500, 20 * 700],
    }
)
LAUNCHES = (
    Launch(((2048, 512),)),
    Launch((), 40, 40 * 1500, graph=True),
    Launch(((512, 100),), 20, 20 * 700),
)


def test_rows_have_the_joules_and_bytes_of_their_launches() -> None:
    found = work_columns(COST, ROWS)
    for row, launch in enumerate(LAUNCHES):
        priced = COST.solo(launch)
        # prefill attention reads its keys once here, padding to captured sizes is not counted
        assert found["hbm_bytes"][row] == pytest.approx(priced.hbm_bytes, rel=0.02)
        seconds = ROWS["end_s"][row] - ROWS["start_s"][row]
        joules = sum(part.joules for part in priced.by_operator)
        asked = COST.energy.idle_w + COST.energy.active_w + joules / seconds
        assert found["watts"][row] == pytest.approx(min(asked, COST.energy.cap_w), rel=0.02)
        assert found["joules"][row] == pytest.approx((found["watts"][row] - COST.energy.idle_w) * seconds)


def test_watts_of_a_launch_are_the_boards_mean_over_its_step() -> None:
    for launch in LAUNCHES:
        step = COST.solo(launch)
        joules = sum(part.joules for part in step.by_operator)
        terms = COST.energy
        asked = terms.idle_w + (terms.active_w * step.gpu_s + joules) / step.step_s
        assert step.watts == pytest.approx(min(asked, terms.cap_w))
    assert COST.solo(LAUNCHES[0]).watts == COST.energy.cap_w  # a long prefill is held by the limit
    assert COST.solo(LAUNCHES[1]).watts < COST.energy.cap_w


def test_operators_differ_in_what_a_flop_or_a_byte_costs() -> None:
    terms = COST.energy
    assert terms.work_j("gemm/qkv", 1.0, 0.0) == terms.j_per_flop
    assert terms.work_j("prefill_attention", 1.0, 0.0) > terms.j_per_flop
    assert terms.work_j("decode_attention", 1.0, 0.0) > 3 * terms.j_per_flop
    assert terms.work_j("norm/input", 0.0, 1.0) > terms.work_j("lm_head", 0.0, 1.0) == terms.j_per_byte
    per = joules_per(COST.model, terms)
    assert per.decode_key > per.prefill_key
    assert byte_sums(COST.model).prefill_key == COST.model.kv_bytes_per_token()


def test_a_runs_steps_add_up_to_its_sums() -> None:
    load = workload([0.0, 0.1, 0.2], [1000, 300, 2000], [40, 30, 20])
    records = simulate(load, make_policy("vllm"), COST, num_gpu_blocks=4000, jitter=False, record_steps=True)
    steps = records.steps
    assert steps is not None
    free = np.asarray(steps["watts"] < COST.energy.cap_w)
    assert free.any()
    work = total_joules(COST.model, COST.energy, records.totals)
    asked = steps["joules"].sum() - COST.energy.active_w * (steps["end_s"] - steps["start_s"]).sum()
    assert asked <= work * 1.01  # the limit holds some of it
    assert asked == pytest.approx(work, rel=0.25)

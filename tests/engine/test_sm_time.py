"""SM time by class adds up to SMs x window, whatever runs and wherever the window begins and ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_cost import LaneCost, lane_cost
from lane_frame import busy_load
from stub_cost import TICK, real_cost, rough_tables
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.metrics.utilisation import sm_time_pct, utilisation
from sim.policies import list_policies, make_policy
from sim.workload.workload import Workload

ENTRIES: list[dict[str, Any]] = [
    {"name": "vllm", "max_num_batched_tokens": 64, "max_num_seqs": 8},
    {"name": "sglang", "chunked_prefill_size": 64, "max_running_requests": 8, "page_size": 1},
    {"name": "static-split", "max_num_seqs": 8},
    {"name": "static-split", "max_num_seqs": 8, "expand_when_idle": True, "layer_step": 5},
    {"name": "static-split", "max_num_seqs": 8, "prefill_sms": 132, "decode_sms": 132},
]
COST = lane_cost(rough_tables(TICK, wobble=True), (1.5, 1.25))
CLASSES = ("active", "tail", "host", "contention", "switch", "lent")


def load(n: int = 40, seed: int = 4, gap_s: float = 0.004) -> Workload:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(gap_s, n)).tolist()
    return workload(arrivals, rng.integers(1, 200, n).tolist(), rng.integers(1, 30, n).tolist())


def share(records: RunRecords, cost: LaneCost = COST) -> dict[str, float]:
    seconds = (records.window_s[1] - records.window_s[0]) * records.replicas
    return sm_time_pct(records.window_totals, seconds, cost.gpu.sms)


@given(
    entry=st.sampled_from(ENTRIES),
    replicas=st.integers(1, 2),
    warmup_s=st.sampled_from([0.0, 0.0, 0.0133, 0.1]),
    horizon_s=st.sampled_from([None, 0.02, 0.15, 0.3]),
    seed=st.integers(0, 50),
    jitter=st.booleans(),
)
@settings(max_examples=30)
def test_the_classes_add_up_to_the_window(entry: dict[str, Any], seed: int, **options: Any) -> None:
    records = simulate(load(20, seed), make_policy(entry), COST, num_gpu_blocks=900, block_size=1, **options)
    found = share(records)
    assert sum(found.values()) == pytest.approx(100, rel=1e-9)
    assert min(found.values()) >= -1e-9


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_launch_is_split_into_what_it_holds(entry: dict[str, Any]) -> None:
    records = simulate(load(), make_policy(entry), COST, num_gpu_blocks=900, block_size=1, record_steps=True)
    steps = records.steps
    assert steps is not None
    parts = steps[[f"{name}_sm_s" for name in CLASSES]]
    held = steps["sms"] * (steps["end_s"] - steps["start_s"])
    assert (parts >= 0).all().all()
    if "decode_sms" in entry or "expand_when_idle" in entry:
        # lanes on common SMs: together they hold them once
        used = parts.sum().sum() + records.totals["sm_idle_lane_s"]
        assert used == pytest.approx(COST.gpu.sms * records.totals["busy_s"])
        assert (parts.sum(axis=1) <= held * (1 + 1e-9)).all()
    else:
        np.testing.assert_allclose(parts.sum(axis=1), held, rtol=1e-9)
    for name in (*CLASSES, "attention", "lockstep"):
        assert steps[f"{name}_sm_s"].sum() == pytest.approx(records.totals[f"sm_{name}_s"], rel=1e-9)
    assert (steps["attention_sm_s"] + steps["lockstep_sm_s"] <= steps["active_sm_s"] * (1 + 1e-12)).all()


def test_decode_attention_is_lockstep_only_where_prompts_wait_for_it() -> None:
    cost = real_cost()
    entry = {"name": "sarathi", "token_budget": 256}
    records = simulate(load(60, gap_s=0.01), make_policy(entry), cost, record_steps=True, jitter=False)
    steps = records.steps
    assert steps is not None
    alone, mixed = steps["prefill_tokens"] == 0, (steps["prefill_tokens"] > 0) & (steps["decode_batch"] > 0)
    assert mixed.sum() > 5
    assert (steps.loc[alone, "attention_sm_s"] > 0).all()
    assert (steps.loc[~alone, "attention_sm_s"] == 0).all()
    assert (steps.loc[mixed, "lockstep_sm_s"] > 0).all()
    assert (steps.loc[~mixed, "lockstep_sm_s"] == 0).all()
    # a step's decode attention as the cost model has it
    row = steps[alone].iloc[-1]
    batch, context = np.array([row["decode_batch"]]), np.array([float(row["context_sum"])])
    one = cost.decode(batch, context, cost.gpu.sms)
    assert row["attention_sm_s"] == pytest.approx(cost.model.layers * float(one.sm_s[0]), rel=0.02)


def test_a_window_cut_anywhere_gives_parts_of_the_whole() -> None:
    entry = ENTRIES[3]

    def total(**options: Any) -> dict[str, float]:
        records = simulate(load(), make_policy(entry), COST, num_gpu_blocks=900, block_size=1, **options)
        return records.window_totals

    whole = total()
    for cut_s in (0.011, 0.0777, 0.14):
        before, after = total(horizon_s=cut_s), total(warmup_s=cut_s)
        for name in (*CLASSES, "idle_lane"):
            both = before[f"sm_{name}_s"] + after[f"sm_{name}_s"]
            assert both == pytest.approx(whole[f"sm_{name}_s"], rel=1e-9, abs=1e-12), name
        assert before["busy_s"] + after["busy_s"] == pytest.approx(whole["busy_s"], rel=1e-9)


NEEDS: dict[str, dict[str, Any]] = {"slo-admission": {"policy": "vllm"}}


@pytest.mark.parametrize("name", [info.name for info in list_policies() if not info.base])
def test_the_classes_add_up_under_every_policy(name: str) -> None:
    entry = {"name": name, **NEEDS.get(name, {})}
    records = simulate(busy_load(n=40), make_policy(entry), real_cost(), warmup_s=0.3, horizon_s=2.0)
    found = utilisation(records, real_cost(), output_tokens=1)["sm_time_pct"]
    assert sum(found.values()) == pytest.approx(100, rel=1e-9)
    assert min(found.values()) >= 0
    assert found["active"] > 20

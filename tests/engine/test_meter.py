"""Readings of the work counters: they end at the run's sums, never fall, and know nothing of bursts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lane_frame import busy_load
from stub_cost import real_cost
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.engine.meter import METER_S
from sim.engine.records import METER_FIELDS
from sim.policies import make_policy

POLICIES = (
    "vllm",
    "sarathi-512",
    "bullet",
    {"name": "static-split", "prefill_sms": 64},
    "muxwise",
    "streams",
)
SPARSE = workload([0.0, 0.3, 4.0, 4.001], [1500, 900, 3000, 40], [60, 4, 200, 1])


def run(entry: Any, load: Any = None, **options: Any) -> RunRecords:
    return simulate(
        busy_load(40) if load is None else load,
        make_policy(entry),
        real_cost(),
        num_gpu_blocks=4000,
        jitter=False,
        **options,
    )


@pytest.mark.parametrize("entry", POLICIES, ids=str)
@pytest.mark.parametrize("load", [None, SPARSE], ids=["busy", "sparse"])
def test_readings_end_at_the_sums_and_never_fall(entry: Any, load: Any) -> None:
    records = run(entry, load)
    read = records.readings[0]
    sums = dict(zip(METER_FIELDS, read[-1], strict=True))
    totals = records.totals
    launches = totals["launches_graph"] + totals["launches_eager"]
    assert sums["launches"] == pytest.approx(launches)
    assert sums["gpu_s"] == pytest.approx(totals["gpu_s"])
    for name in ("dense_tokens", "head_rows", "prefill_pairs", "prefill_kv_tokens", "decode_kv_tokens"):
        assert sums[name] == pytest.approx(totals[name]), name
    # to rounding: what is in flight is a share of whole counts
    assert (np.diff(read, axis=0) >= -1e-6 * np.maximum(1.0, read[1:])).all()


@pytest.mark.parametrize("entry", ["vllm", "sarathi-512"])
def test_bursts_leave_no_trace(entry: str) -> None:
    one, other = (run(entry, bursts=bursts) for bursts in (True, False))
    assert one.readings[0].tobytes() == other.readings[0].tobytes()


@pytest.mark.parametrize("entry", ["vllm", {"name": "static-split", "prefill_sms": 64}], ids=str)
def test_idle_gaps_have_readings_at_both_ends(entry: Any) -> None:
    read = run(entry, SPARSE).readings[0]
    time, gpu = read[:, 0], read[:, 1]
    still = np.flatnonzero((np.diff(time) > 1.0) & (np.diff(gpu) == 0.0))
    assert len(still) >= 1  # from the first two requests' end until 4 s
    assert time[still[-1] + 1] == pytest.approx(4.0)


def test_readings_are_as_dense_as_the_grid_and_no_denser_than_three_a_step_of_it() -> None:
    records = run("vllm")
    read = records.readings[0]
    assert len(read) <= 3 * (records.end_s / METER_S + 1) + 1
    busy = np.diff(read[:, 1]) > 0
    longest = np.diff(read[:, 0])[busy].max()
    assert longest <= METER_S + 0.5  # a launch at most


def test_a_horizon_cuts_lanes_in_the_middle_of_their_work() -> None:
    """Two long prompts beside decodes: until the horizon about its share of the work is done."""
    load = workload([0.0, 0.0], [6000, 6000], [2, 2])
    whole = run({"name": "static-split", "prefill_sms": 64}, load)
    cut = run({"name": "static-split", "prefill_sms": 64}, load, horizon_s=whole.end_s / 3)
    at = METER_FIELDS.index("dense_tokens")
    share = cut.readings[0][-1, at] / whole.readings[0][-1, at]
    assert share == pytest.approx(1 / 3, abs=0.05)

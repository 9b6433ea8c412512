"""Two plain streams and fixed shares: starvation, limits in which they are sums of their halves, sets, knobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from knob_frame import DOWN, UP, Moves
from lane_frame import busy_load, check_laws, check_move, lane
from stub_cost import real_cost
from workloads import workload

import sim
from sim.cost import load_cost
from sim.cost.shapes import Launch
from sim.engine import RunRecords, simulate
from sim.engine.deployment import GREEN, LIBSMCTRL, MECHANISMS, MPS, Deployment
from sim.errors import SimctlError
from sim.policies import list_policies, make_policy
from sim.workload.workload import Workload

H200 = Deployment(10_000, 16, 4096, "h200-sxm", sms=132, layers=32)
A100 = Deployment(10_000, 16, 4096, "a100-80gb-sxm", sms=108, layers=32, compute_capability=8.0)


def run(entry: Any, load: Workload | None = None, cost: Any = None, **options: Any) -> RunRecords:
    settings = {"jitter": False, "record_steps": True, **options}
    return simulate(load or busy_load(), make_policy(entry), cost or real_cost(), **settings)


# starvation


def test_without_a_partition_decode_starves_behind_prefill() -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm", "h200-sxm")
    load = busy_load(rate=12.0)
    gaps = {}
    for name, entry in {
        "streams": "streams",
        "high": {"name": "streams", "decode_stream": "high"},
        "static": "static-split",
    }.items():
        records = run(entry, load, cost)
        check_laws(records)
        gaps[name] = float(np.quantile(np.repeat(records.itl_s, records.itl_count), 0.99))
    assert gaps["streams"] > 5 * gaps["static"]
    # a higher priority of decode's stream helps, and is no partition
    assert 2 * gaps["static"] < gaps["high"] < 0.8 * gaps["streams"]


def test_streams_are_a_split_in_which_both_sides_have_all_sms() -> None:
    same = {"name": "static-split", "prefill_share": 1.0, "decode_share": 1.0}
    one, other = (run({**entry, "max_num_seqs": 32}).requests for entry in ({"name": "streams"}, same))
    assert one.equals(other)


# limits


@pytest.fixture
def free_switching(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(MECHANISMS, "free", replace(GREEN, name="free", switch_s=0.0))
    return "free"


def test_one_phase_alone_is_serial_on_its_sms() -> None:
    cost = real_cost()
    for prefill_sms in (32, 64, 112):
        entry = {"name": "static-split", "prefill_sms": prefill_sms, "max_prefill_tokens": 1}
        # two prompts of one token each: no decode; then a prompt whose decode runs without a prefill
        records = run(entry, workload([0.0, 0.0, 9.0], [1000, 500, 700], [1, 1, 6]), cost)
        solo = [cost.solo(Launch(chunks=((n, 0),)), prefill_sms).step_s for n in (1000, 500, 700)]
        ends = [solo[0], solo[0] + solo[1], 9.0 + solo[2]]
        assert records.requests["first_token_s"].tolist() == pytest.approx(ends, rel=2e-3)
        steps = lane(records, 1)
        assert set(steps["sms"]) == {132 - prefill_sms}
        for _, step in steps.iterrows():
            context = int(step["context_sum"])
            shape = Launch(decode_batch=1, decode_context_sum=context, decode_context_max=context, graph=True)
            took = step["end_s"] - step["start_s"]
            assert took == pytest.approx(cost.solo(shape, 132 - prefill_sms).step_s, rel=2e-3)
        assert records.totals["sm_contention_s"] == records.totals["sm_switch_s"] == 0


@pytest.mark.parametrize("layer_step", [0, 4])
def test_without_contention_and_with_free_switching_the_halves_are_independent(
    layer_step: int, free_switching: str
) -> None:
    load = busy_load(n=60)
    entry = {"name": "static-split", "prefill_sms": 88, "layer_step": layer_step}
    both = run(entry, load, contention=False, mechanism=free_switching)
    alone = run(entry, replace(load, output_tokens=np.ones_like(load.output_tokens)))
    # prefill is what it would be without any decode
    np.testing.assert_allclose(both.requests["first_token_s"], alone.requests["first_token_s"], rtol=1e-12)
    assert both.steps is not None
    assert both.steps["slowdown"].to_numpy() == pytest.approx(1.0, abs=1e-12)
    assert both.totals["sm_contention_s"] == pytest.approx(0.0, abs=1e-9)
    # and decode: every step is the price of its shape on its SMs
    cost = real_cost()
    for _, step in lane(both, 1).iloc[::50].iterrows():
        batch, context = int(step["decode_batch"]), int(step["context_sum"])
        shape = Launch(decode_batch=batch, decode_context_sum=context, graph=True)
        took = step["end_s"] - step["start_s"]
        assert took == pytest.approx(cost.solo(shape, 44).step_s, rel=0.01)
    slowed = run(entry, load)
    assert slowed.requests["first_token_s"].sum() > both.requests["first_token_s"].sum()


# sets


def split(deployment: Deployment = H200, **knobs: Any) -> tuple[int, int]:
    found: tuple[int, int] = make_policy({"name": "static-split", **knobs}).split(deployment)
    return found


def test_shares_become_sets_that_the_mechanism_makes() -> None:
    assert split() == (64, 68)
    assert split(A100) == (54, 54)
    assert split(prefill_share=0.75) == (96, 36)
    assert split(prefill_sms=112) == (112, 20)
    assert split(decode_sms=20) == (112, 20)
    assert split(replace(H200, mechanism=LIBSMCTRL), prefill_share=0.7) == (92, 40)
    assert split(replace(H200, mechanism=MPS), prefill_share=0.33) == (44, 88)
    # Bullet's static arms on an A100, and shares as MuxServe gives them
    assert split(A100, prefill_sms=84, decode_sms=108) == (84, 108)
    assert split(A100, prefill_sms=108, decode_sms=108) == (108, 108)
    assert split(prefill_share=0.6, decode_share=0.8) == (80, 104)
    assert split(prefill_share=1.0, decode_share=0.5) == (132, 64)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"prefill_share": 1.0}, r"prefill takes all 132 SMs and leaves none; give decode_sms as well"),
        ({"decode_sms": 132}, r"decode takes all 132 SMs and leaves none; give prefill_sms as well"),
        ({"prefill_sms": 50}, r"prefill_sms = 50 is no set that 'green' can make .*the nearest is 48"),
        ({"prefill_sms": 64, "decode_sms": 67}, r"decode_sms = 67 is no set .*the nearest is 64"),
    ],
)
def test_sets_that_cannot_be_are_told(knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SimctlError, match=sentence):
        split(**knobs)


@pytest.mark.parametrize("knob", ["prefill_share", "decode_share", "watermark"])
def test_shares_lie_within_the_whole(knob: str) -> None:
    for value, words in ((1.5, "the most is 1"), (-0.1, "the least is 0")):
        with pytest.raises(SimctlError, match=f"{knob}.*{words}"):
            make_policy({"name": "static-split", knob: value})


def test_bullets_static_arms_on_common_sms_keep_the_laws() -> None:
    cost = load_cost("llama-3.1-8b", "a100-80gb-sxm", "spec")
    for prefill_sms in (84, 108):
        entry = {"name": "static-split", "prefill_sms": prefill_sms, "decode_sms": 108}
        records = run(entry, busy_load(n=60, rate=8.0), cost)
        check_laws(records)
        held = sum(
            records.totals[f"sm_{name}_s"]
            for name in ("active", "tail", "host", "contention", "switch", "idle_lane")
        )
        assert held == pytest.approx(108 * records.totals["busy_s"], rel=1e-9)


# knobs

TIGHT = {"num_gpu_blocks": 900}
MOVES = [
    Moves("static-split", "prefill_sms", 96, "mean_ttft", DOWN),
    Moves("static-split", "prefill_sms", 96, "mean_tpot", UP),
    Moves("static-split", "decode_sms", 20, "mean_ttft", DOWN),
    Moves("static-split", "prefill_share", 0.8, "mean_ttft", DOWN),
    Moves("static-split", "decode_share", 1.0, "decode_sms", UP),
    Moves("static-split", "expand_when_idle", True, "decode_sms", UP),
    Moves("static-split", "layer_step", 4, "most_layers", DOWN),
    Moves("static-split", "max_prefill_tokens", 2048, "tokens_of_several", DOWN),
    Moves("static-split", "max_prompt_tokens", 3000, "served", DOWN),
    Moves("streams", "max_prompt_tokens", 3000, "served", DOWN),
    Moves("static-split", "max_num_seqs", 8, "largest_batch", DOWN),
    Moves("streams", "layer_step", 4, "most_layers", DOWN),
    Moves("streams", "max_prefill_tokens", 2048, "tokens_of_several", DOWN),
    Moves("streams", "max_num_seqs", 8, "largest_batch", DOWN),
]
PRESSED = [
    Moves("static-split", "watermark", 0.3, "preemptions", DOWN),
    Moves("streams", "watermark", 0.3, "preemptions", DOWN),
]


@pytest.mark.parametrize("row", MOVES, ids=str)
def test_every_knob_moves_what_it_is_about(row: Moves) -> None:
    check_move(row)


@pytest.mark.parametrize("row", PRESSED, ids=str)
def test_knobs_of_a_full_pool(row: Moves) -> None:
    check_move(row, **TIGHT)


def test_the_list_of_knobs_is_complete() -> None:
    for name in ("static-split", "streams"):
        knobs = {knob for info in list_policies() if info.name == name for knob in info.knobs}
        # the priority of decode's stream is tested above, on the profile that has measured it
        assert {row.knob for row in [*MOVES, *PRESSED] if row.policy == name} == knobs - {"decode_stream"}


def test_a_request_that_no_pass_could_compute_is_refused_with_the_arithmetic() -> None:
    load = workload([0.0, 0.1], [900, 1000], [101, 2])
    records = run({"name": "static-split", "max_prompt_tokens": 1000}, load)
    assert records.requests["status"].tolist() == ["finished", "rejected"]
    assert records.requests["reason"][1] == (
        "1000 + 2 tokens are more than one pass takes: max_prompt_tokens is 1000"
    )


def test_an_experiment_may_do_without_contention() -> None:
    experiment = {
        "workload": {"trace": "sample-conv", "max_requests": 40},
        "model": "llama-3.1-8b",
        "gpu": "h200-sxm",
        "policies": ["fixed-50-50"],
        "sweep": {"request_rate": [20]},
    }
    lost = [
        sim.run({**experiment, **more}).summary["runs"][0]["sm_time_pct"]["contention"]
        for more in ({}, {"contention": False})
    ]
    assert lost[0] > 1
    assert lost[1] == pytest.approx(0, abs=1e-9)
    with pytest.raises(
        SimctlError, match="`contention` has no effect, since none of the policies shares the SMs"
    ):
        sim.run({**experiment, "policies": ["vllm"], "contention": False})

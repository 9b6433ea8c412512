"""KV transfers by what was measured: the curve of a link, what it and compute do to each other, and which link a run
takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_collectives as fake
import pytest
from stub_cost import plain_tables, stub_cost
from workloads import workload

from sim.api import run as run_experiment
from sim.cost import load_cost
from sim.cost.collectives import Knots, SideFactors, Transfer
from sim.engine import RunRecords, simulate
from sim.engine.link import Link, default_link
from sim.engine.pools import Pool
from sim.errors import SimctlError
from sim.policies import make_policy

LATENCY_S, RATE = 1e-5, 1e10
PROMPT_S, TOKEN_S = 1e-3, 10e-3
COST = stub_cost(plain_tables(0.0, PROMPT_S, TOKEN_S), max_context=8192)
KV = COST.kv_bytes_per_token
CURVE = Transfer(
    "copy", "contiguous", 0, 2, Knots((1024.0, 2.0**30), (LATENCY_S, LATENCY_S + 2.0**30 / RATE))
)


def link(curve: Transfer = CURVE, **options: Any) -> Link:
    return Link(RATE, LATENCY_S, curve=curve, **options)


def run(over: Link, arrivals: list[float], policy: str = "distserve", output: int = 10) -> RunRecords:
    work = workload(arrivals, [1024] * len(arrivals), [output] * len(arrivals))
    return simulate(
        work,
        make_policy({"name": policy}),
        COST,
        pools=[Pool("prefill", 1, COST), Pool("decode", 1, COST)],
        link=over,
        num_gpu_blocks=10_000,
        jitter=False,
        record_steps=True,
    )


def test_one_message_takes_what_its_curve_says() -> None:
    size = KV * 1024
    alone = run(link(), [0.0]).requests["transfer_s"][0]
    assert alone == pytest.approx(float(CURVE.knots.at(size)), rel=1e-9)
    slow = replace(CURVE, knots=Knots((1024.0, float(size), 2.0**31), (LATENCY_S, 0.5, 1.0)))
    assert run(link(slow), [0.0]).requests["transfer_s"][0] == pytest.approx(0.5, rel=1e-9)


def test_layers_go_one_after_the_other_as_messages_of_their_own() -> None:
    layers, size = COST.model.layers, KV * 1024
    assert link().carried(size) / RATE == pytest.approx(size / RATE, rel=1e-5)
    one = float(CURVE.knots.at(size / layers))
    expected = layers * one - LATENCY_S
    assert link().carried(size, layers) / RATE == pytest.approx(expected, rel=1e-12)
    stretched = replace(CURVE, layered=1.25)
    assert link(stretched).carried(size, layers) / RATE == pytest.approx(
        1.25 * layers * one - LATENCY_S, rel=1e-12
    )
    # the last layer's KV goes after the prompt: about a layer's message is seen
    seen = run(link(overlap="layer"), [0.0]).requests["transfer_s"][0]
    assert seen == pytest.approx(one, rel=1e-6)


def test_shards_go_side_by_side() -> None:
    two = Link(2 * RATE, LATENCY_S, curve=CURVE, shards=2)
    assert two.carried(KV * 1024) / two.bytes_per_s == pytest.approx(
        link().carried(KV * 512) / RATE, rel=1e-12
    )


def test_a_transfer_slows_down_beside_prefill_and_decode() -> None:
    """The second prompt's transfer meets no prompt but the first one's decodes; the first meets the second prompt."""
    both = replace(CURVE, prefill=SideFactors(1.5, 1.0), decode=SideFactors(2.0, 1.0))
    size_s = KV * 1024 / RATE
    first, second = run(link(both), [0.0, 0.1], output=200).requests["transfer_s"]
    assert first == pytest.approx(1.5 * size_s + LATENCY_S, rel=1e-4)
    assert second == pytest.approx(2.0 * size_s + LATENCY_S, rel=1e-4)
    alone = run(link(both), [0.0]).requests["transfer_s"][0]
    assert alone == pytest.approx(size_s + LATENCY_S, rel=1e-4)


def test_compute_loses_what_transfers_take_from_it() -> None:
    """While a transfer of time t is beside it, compute with factor f gets t / f done."""
    size_s = KV * 1024 / RATE + LATENCY_S
    factors = replace(CURVE, prefill=SideFactors(1.0, 4.0), decode=SideFactors(1.0, 2.0))
    plain, slowed = (run(link(curve), [0.0, 0.1, 0.2], output=300) for curve in (CURVE, factors))
    spans = []
    for records in (plain, slowed):
        steps = records.steps
        assert steps is not None
        spans.append([steps[steps["replica"] == k].eval("end_s - start_s").sum() for k in (0, 1)])
    # prompts two and three run beside the transfer of the one before, decodes beside those of two and three
    assert spans[1][0] - spans[0][0] == pytest.approx(1 * size_s * (1 - 1 / 4), rel=0.01)
    assert spans[1][1] - spans[0][1] == pytest.approx(2 * size_s * (1 - 1 / 2), rel=0.01)
    assert slowed.requests["finish_s"].max() > plain.requests["finish_s"].max()


def test_the_measured_transfer_is_taken_within_a_machine_only(tmp_path: Path) -> None:
    made = fake.folder(tmp_path)
    one = load_cost("llama-3.1-8b", "h200-sxm", str(made))
    two = load_cost("llama-3.1-8b", "h200-sxm", str(made), {"tp": 2})
    spec = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    found = default_link(one, one, 2)
    assert found.curve is not None
    assert found.source == "measured: copy between two GPUs, contiguous"
    assert found.latency_s == pytest.approx(fake.COPY_S + 1024 / fake.COPY_RATE)
    assert found.bytes_per_s == pytest.approx(fake.COPY_RATE)
    assert default_link(one, one, 9).source == "GPU table: network card of h200-sxm"
    assert default_link(one, one, 2, "network").source == "GPU table: network card of h200-sxm"
    assert default_link(spec, spec, 2).source == "GPU table: NVLink of h200-sxm, one direction"
    assert default_link(two, two, 4).source == "measured: 2 x copy between two GPUs, contiguous"
    assert default_link(two, two, 4).bytes_per_s == pytest.approx(2 * fake.COPY_RATE)
    assert default_link(two, one, 3).shards == 1


@pytest.mark.parametrize(
    ("decode", "gpus", "message"),
    [("h200-sxm", 9, "not 9 of h200-sxm"), ("h100-sxm", 2, "not 2 of h200-sxm and h100-sxm")],
)
def test_nvlink_where_there_is_none_is_refused(decode: str, gpus: int, message: str) -> None:
    ends = (load_cost("llama-3.1-8b", gpu, "spec") for gpu in ("h200-sxm", decode))
    with pytest.raises(SimctlError, match=message):
        default_link(*ends, gpus, "nvlink")


def test_an_experiment_says_which_link_it_took(tmp_path: Path) -> None:
    made = fake.folder(tmp_path)
    base = {
        "workload": {"num_prompts": 6, "arrivals": "poisson", "prompt_tokens": 4000, "output_tokens": 8},
        "sweep": {"request_rate": 4},
        "model": "llama-3.1-8b",
        "gpu": "h200-sxm",
        "profile": str(made),
        "policies": ["distserve"],
        "jitter": False,
    }

    def summary(**changes: Any) -> dict[str, Any]:
        return run_experiment({**base, **changes}).summary["runs"][0]  # type: ignore[no-any-return]

    auto, modelled = summary(), summary(link={"bandwidth_gb_s": 450, "latency_us": 10})
    assert auto["link"]["source"] == "measured: copy between two GPUs, contiguous"
    assert modelled["link"]["source"] == "the experiment"
    assert auto["median_transfer_ms"] == pytest.approx(
        modelled["median_transfer_ms"] * 450e9 / fake.COPY_RATE, rel=0.02
    )
    network = summary(link={"kind": "network"})
    assert network["link"]["source"] == "GPU table: network card of h200-sxm"
    assert network["median_transfer_ms"] > 5 * auto["median_transfer_ms"]
    assert summary(link={"sharing": "fifo"})["link"]["source"].startswith("measured")
    assert summary(link={"latency_us": 20})["link"]["source"].startswith("GPU table: NVLink")

"""Validation without a GPU: loads, replay against known answers, the whole command on a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from lane_cost import lane_cost
from stub_cost import TICK, plain_tables, real_cost
from workloads import workload

from calib.validate.cases import STEP_FACTOR, with_step
from calib.validate.hosts import fit_hosts
from calib.validate.page import write_pages
from calib.validate.replay import Replay, Shape
from sim.cli import cli
from sim.cost.shapes import Launch

EXPERIMENT = """
workload: {trace: sample-conv, max_requests: 40}
model: llama-3.1-8b
gpu: h200-sxm
profile: spec
policies: [sarathi-512, fixed-50-50]
sweep: {request_rate: [8]}
slo: {ttft_ms: 1000, tpot_ms: 50}
jitter: false
"""


def test_a_load_step_is_denser_for_a_stretch_and_loses_no_request() -> None:
    load = workload(np.arange(0.0, 100.0).tolist(), [10] * 100, [2] * 100)
    stepped = with_step(load)
    gaps = np.diff(stepped.arrival_s)
    assert len(stepped) == 100
    assert gaps.min() == pytest.approx(1.0 / STEP_FACTOR)
    assert (np.isclose(gaps, 1.0 / STEP_FACTOR)).sum() == pytest.approx(25, abs=2)
    assert np.isclose(gaps, 1.0).sum() > 70


def shape(lane: int, start: float, end: float, chunks: Any = (), batch: int = 0, sms: int = 66) -> Shape:
    return Shape(lane, sms, (0, 32), tuple(chunks), batch, 100 * batch, 0, start, end)


def test_alone_a_launch_is_priced_as_the_engine_prices_it() -> None:
    cost = real_cost()
    one = Shape(0, 132, (0, 32), ((512, 0),), 0, 0, 0, 0.0, 1.0)
    assert Replay(cost, [one]).seconds([one])[0][0] == pytest.approx(
        cost.solo(Launch(((512, 0),))).step_s, rel=2e-3
    )


def test_a_neighbour_slows_only_while_it_runs() -> None:
    """Prefill beside decode is twice as slow: it starts alone, meets a decode for a while, and ends alone."""
    cost: Any = lane_cost(plain_tables(TICK), factors=(2.0, 1.0))
    prefill = shape(0, 0.0, 9.0, [(64, 0)])
    alone = Replay(cost, [prefill]).seconds([prefill])[0][0]
    decode = shape(1, 0.25 * alone, 0.75 * alone, batch=4)
    both = Replay(cost, [prefill, decode]).seconds([prefill, decode])[0][0]
    assert both == pytest.approx(1.25 * alone)


def test_a_neighbour_in_its_own_host_gap_slows_nobody() -> None:
    """Decode is on the GPU for half of its time: a slowdown of 2 costs the prefill beside it a half."""

    def tables(*limits: int) -> dict[str, Any]:
        made = plain_tables(TICK)(*limits)
        return {**made, "gap_graph_s": made["gap_graph_s"] + TICK}

    cost: Any = lane_cost(tables, factors=(2.0, 1.0))
    prefill, decode = shape(0, 0.0, 9.0, [(64, 0)]), shape(1, 0.0, 2 * TICK, batch=4)
    both = Replay(cost, [prefill, decode]).seconds([prefill, decode])[0][0]
    assert both == pytest.approx(TICK * 1.5)


def test_host_terms_are_fitted_from_the_log() -> None:
    """A gap for each kind of launch, one for each sequence, one for each group of layers."""
    terms = real_cost().launching.terms
    gpu_s = [5e-3] * 6 + [12e-3, 12e-3, 0.5e-3]
    launch_s = [2e-4] * 6 + [3.2e-3, 3.2e-3, 0.8e-3]
    batch = [1, 2, 10, 30, 40, 50, 0, 0, 0]
    base = [7e-4] * 6 + [1.1e-3, 1.1e-3, 0.25 * 1.1e-3 + 2e-4]
    rows = [*batch[:6], 1, 1, 0.25]
    gaps = [one + 1e-5 * n for one, n in zip(base, rows, strict=True)]
    log = pd.DataFrame(
        {
            "launch": ["graph"] * 6 + ["piecewise"] * 3,
            "q_tokens": [""] * 6 + ["64"] * 3,
            "decode_batch": batch,
            "start_s": 1.0,
            "end_s": [1.0 + max(g, h) + gap for g, h, gap in zip(gpu_s, launch_s, gaps, strict=True)],
            "gpu_s": gpu_s,
            "launch_s": launch_s,
            "first_layer": 0,
            "last_layer": [32] * 8 + [8],
        }
    )
    found = fit_hosts(log, terms, 32, "fitted from a test")
    assert found.gap_graph_s == pytest.approx(7e-4)
    assert found.gap_eager_s == pytest.approx(1.1e-3)
    assert found.gap_per_sequence_s == pytest.approx(1e-5)
    assert found.gap_group_s == pytest.approx(2e-4)
    assert found.piecewise_layer_s == pytest.approx(1e-4)
    assert found.label == "fitted from a test"


def test_the_whole_command_on_a_dry_run(tmp_path: Path) -> None:
    """With a device that follows the tables, replay has no error and open mode is the simulation."""
    experiment, out = tmp_path / "e.yaml", tmp_path / "out"
    experiment.write_text(EXPERIMENT)
    arguments = [
        *("validate", str(experiment), "--dry-run", "-o", str(out), "--load", "0.5", "--load-step", "0.5"),
        *("--repeats", "1", "-q", "--json"),
    ]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {(row["policy"], row["mode"]) for row in rows} == {
        (policy, mode)
        for policy in ("sarathi-512", "fixed-50-50")
        for mode in ("replay", "open", "load_step")
    }
    for row in rows:
        if row["policy"] == "sarathi-512":
            assert abs(row["error"]) < 1e-3, row
    assert json.loads((out / "fidelity.json").read_text())["rows"] == rows
    page = (out / "fidelity.md").read_text()
    for name in (out / "fidelity-img").iterdir():
        assert name.name in page
    # several studies have an overview; a dry run's says nothing of the GPU's seconds
    write_pages([out / "cases", out / "cases"], tmp_path / "two")
    overview = (tmp_path / "two" / "fidelity.md").read_text().split("## All studies")[1]
    assert "| - | - | 4 of 4 |" in overview.split("###")[0]
    again = CliRunner().invoke(cli, [*arguments, "--resume"])
    assert again.exit_code == 0
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code != 0

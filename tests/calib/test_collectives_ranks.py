"""Two ranks on the CPU through gloo: results of every collective, transfers, shards, agreed counts, hanging points."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch (any build) for two ranks on the CPU")

from calib.collectives.crew import Crew, CrewLab
from calib.collectives.sizes import COLLECTIVES
from calib.fake import FACTS
from calib.measure import SMOKE
from calib.models import MODELS
from sim.errors import CalibrationError

SHARD = {"model": "llama-3.1-70b-tp2", "attention": "sdpa"}


@pytest.fixture(scope="module")
def lab() -> Iterator[CrewLab]:
    crew = Crew([0, 1], 3, SMOKE, "llama-3.1-8b", cpu=True, point_s=15.0)
    crew.facts = {"gpu": FACTS, "group": {}}
    yield CrewLab(MODELS["llama-3.1-8b"], SMOKE, crew)
    crew.close()


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_give_the_known_result_and_times_of_both_launches(lab: CrewLab, kind: str) -> None:
    rows = lab.ask({"do": "collective", "kind": kind, "message_bytes": 24 << 10})
    assert [row["launch"] for row in rows] == ["eager", "graph"]
    for row in rows:
        assert row["time_s"] > 0
        assert row["count"] >= SMOKE.least
        assert row["error"] <= 1e-2
    if kind in ("allgather", "alltoall", "sendrecv", "exchange"):
        assert rows[0]["error"] == 0.0  # nothing is added up


@pytest.mark.parametrize(
    ("method", "layout"), [("copy", "blocks"), ("sendrecv", "contiguous"), ("sendrecv", "blocks")]
)
def test_pages_arrive_whole(lab: CrewLab, method: str, layout: str) -> None:
    point = {
        "do": "transfer",
        "method": method,
        "layout": layout,
        "message_bytes": 64 << 10,
        "piece_bytes": 16 << 10,
    }
    rows = lab.ask({**point, "layers": 2})
    assert [row["launch"] for row in rows] == ["eager", "graph"]
    assert all(row["time_s"] > 0 for row in rows)
    assert rows[0]["label"] == f"{method}/{layout}"


@pytest.mark.parametrize("shape", [{"q": [20], "h": [12]}, {"contexts": [30] * 3}])
def test_a_layer_in_two_shards_gives_the_layer(lab: CrewLab, shape: dict[str, Any]) -> None:
    kind = "prefill_layer" if "q" in shape else "decode_layer"
    (row,) = lab.ask({"do": "shard_error", "kind": kind, "allreduces": 1, **shape, **SHARD})
    assert row["error"] < 2e-2
    assert (row["gpus"], row["allreduces"]) == (2, 1)


def test_a_shards_step_runs_with_and_without_what_joins_it(lab: CrewLab) -> None:
    for joined in (1, 0):
        point = {"do": "shard", "kind": "decode_step", "contexts": [9, 9], "layers": 2, "allreduces": joined}
        rows = lab.ask({**point, **SHARD})
        assert [row["allreduces"] for row in rows] == [joined, joined]
        assert all(row["time_s"] > 0 for row in rows)


def test_both_sides_of_a_corun_have_times_alone_and_beside(lab: CrewLab) -> None:
    compute = {"kind": "norm", "m": 8}
    point = {"do": "beside", "kind": "allreduce", "model": SHARD["model"], "sms": 132, "message_bytes": 4096}
    mine, theirs = lab.ask({**point, "compute": compute})
    assert (mine["kind"], mine["neighbour_kind"], mine["neighbour_mode"]) == ("norm", "allreduce", "streams")
    assert (theirs["kind"], theirs["neighbour_kind"]) == ("allreduce", "norm")
    assert all(row["time_s"] > 0 and row["alone_s"] > 0 for row in (mine, theirs))


def test_a_refused_point_leaves_the_ranks_running(lab: CrewLab) -> None:
    starts = lab.crew.starts
    with pytest.raises(CalibrationError, match="no collective 'gather'"):
        lab.ask({"do": "collective", "kind": "gather", "message_bytes": 1024})
    lab.ask({"do": "collective", "kind": "allgather", "message_bytes": 1024})
    assert lab.crew.starts == starts


def test_ranks_that_die_or_hang_cost_one_point_and_a_kind_that_does_it_again_is_left_out(
    lab: CrewLab,
) -> None:
    crew, point = lab.crew, {"do": "collective", "kind": "alltoall", "message_bytes": 2048}
    starts, patient = crew.starts, crew.point_s
    crew._members[1][0].kill()
    with pytest.raises(CalibrationError, match=r"rank 1 ended|closed by peer|Connection"):
        lab.ask(point)
    lab.ask({**point, "kind": "allreduce"})
    os.kill(crew._members[1][0].pid, signal.SIGSTOP)
    crew.point_s = 1.0
    with pytest.raises(CalibrationError, match="No answer of rank 0 within 1 s"):
        lab.ask(point)
    crew.point_s = patient
    with pytest.raises(CalibrationError, match="Left out: 2 points of the same kind"):
        lab.ask(point)
    assert lab.ask({**point, "kind": "allreduce"})
    assert crew.starts == starts + 2

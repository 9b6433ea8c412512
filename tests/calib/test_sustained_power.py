"""Paced runs and runs of phases on a stub of the GPU: pauses, turns and clocks, by a host clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from calib import energy
from calib.bench import Side
from calib.device import Meter, Reading
from calib.fake import FakeLab
from calib.measure import FULL, Sample
from calib.models import MODELS
from calib.sweeps.watts import ClockStepSweep, PowerDutySweep, PowerMixSweep

MODEL = MODELS["llama-3.1-8b"]


class Event:
    at = 0.0

    def record(self, stream: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class StubMeter(Meter):
    """500 W at 1500 MHz, and a counter that agrees."""

    def __init__(self) -> None:
        self._handle = None

    def read(self) -> Reading:
        return Reading(1500.0, 400.0, True, 500.0, 60.0)

    def energy_j(self) -> float:
        return 500.0 * time.perf_counter()


def stub(replay_s: float) -> Any:
    """The parts of a lab that sustained runs touch; a replay occupies host and GPU for `replay_s`."""

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    stream = SimpleNamespace(synchronize=lambda: None)
    whole = SimpleNamespace(stream=lambda: stream)
    graph = SimpleNamespace(replay=lambda: time.sleep(replay_s))
    return SimpleNamespace(
        torch=SimpleNamespace(cuda=SimpleNamespace(stream=on, synchronize=lambda: None)),
        meter=StubMeter(),
        protocol=FULL,
        whole=(whole, whole),
        partition=lambda sms: whole,
        ready=lambda kernel, sms, slot, padded: None,
        graphed=lambda kernel, sms, slot, stream: (graph, 2, replay_s),
        replays=lambda graph, stream, count, launches: Sample([replay_s / launches] * count),
        events=lambda count: [Event() for _ in range(count)],
    )


def test_a_pause_is_told_for_each_launch() -> None:
    side = Side(SimpleNamespace(), 132)  # type: ignore[arg-type]
    drawn = energy.paced(stub(0.004), side, 0.006, 0.3)
    assert drawn.gap_s == pytest.approx(0.003, rel=0.3)  # two launches in a graph
    assert drawn.hot[0].median_s == pytest.approx(0.002, rel=0.3)
    assert drawn.power_w == pytest.approx(500.0, rel=0.01)


def test_turns_follow_the_order_and_readings_their_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "REST_S", 0.01)
    side = Side(SimpleNamespace(), 132)  # type: ignore[arg-type]
    ran = energy.phases(stub(0.002), [side, side], [(0, 0.02), (1, 0.01), (0, 0.006)])
    assert [(turn.phase, turn.which) for turn in ran.turns] == [(0, 0)] * 10 + [(1, 1)] * 5 + [(2, 0)] * 3
    ends = [turn.end_s for turn in ran.turns]
    assert ends == sorted(ends)
    assert all(turn.launches == 2 for turn in ran.turns)
    inside = [at for at, _ in ran.readings if 0 <= at <= ends[-1]]
    assert len(inside) >= 5


def test_long_phases_leave_stretches_and_short_ones_a_row_a_kernel() -> None:
    lab = FakeLab(MODEL, FULL, 0)
    sweep = ClockStepSweep()
    points = sweep.points(lab, True)
    stretches = sweep.measure(lab, points[0])
    assert [row["phase"] for row in stretches] == sorted(row["phase"] for row in stretches)
    assert {row["phase"] for row in stretches} == {0, 1, 2, 3}
    alternating = next(p for p in points if p["alternate"])
    assert [row["kind"] for row in sweep.measure(lab, alternating)] == ["prefill_layer", "decode_step"]


def test_mixes_are_drawn_from_the_seed_and_pauses_rise() -> None:
    lab = FakeLab(MODEL, FULL, 0)
    mixes = PowerMixSweep(3).points(lab, True)
    assert mixes == PowerMixSweep(3).points(lab, True)
    assert mixes != PowerMixSweep(4).points(lab, True)
    assert all(p["sms"] + p["sms_b"] == 132 for p in mixes if "a" in p)
    duty = PowerDutySweep()
    rows = [row for p in duty.points(lab, True) for row in duty.measure(lab, p)]
    assert len({round(row["gap_s"], 6) for row in rows}) == 7

"""The timing protocol's arithmetic: statistics, throttle marks, graph sizes, which co-run iterations count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.device import Meter, Reading, require_idle
from calib.measure import Protocol, Sample, clocks, overlapped, statistics
from sim.errors import CalibrationError


def test_statistics_of_known_numbers() -> None:
    found = statistics([4.0, 1.0, 2.0, 3.0, 100.0])
    assert found["time_s"] == 3.0
    assert (found["p25_s"], found["p75_s"]) == (2.0, 4.0)
    assert (found["min_s"], found["max_s"], found["count"]) == (1.0, 100.0, 5)
    assert found["mean_s"] == 22.0
    assert found["sd_s"] == pytest.approx(43.617657, rel=1e-6)


def test_statistics_of_nothing_and_of_one() -> None:
    assert statistics([]) == {"count": 0}
    assert statistics([2.0])["sd_s"] == 0.0


def test_a_throttled_reading_marks_the_point() -> None:
    cool, hot = Reading(1980.0, 300.0, False), Reading(1500.0, 700.0, True)
    assert clocks([cool])["throttled"] == 0
    assert clocks([cool, hot]) == {"sm_mhz": 1740.0, "power_w": 500.0, "throttled": 1}
    assert clocks([Reading()]) == {"sm_mhz": None, "power_w": None, "throttled": None}
    assert Sample([1.0], readings=[hot]).columns()["throttled"] == 1


class FakeNvml:
    """NVML's answers: mW, MHz, clock event bits."""

    def __init__(self, bits: int, busy: tuple[int, ...] = (0,)) -> None:
        self.bits, self.busy = bits, list(busy)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return "gpu"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 682_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert kind == 1
        return 1515

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.bits

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self.busy.pop(0) if len(self.busy) > 1 else self.busy[0])


@pytest.mark.parametrize(("bits", "throttled"), [(0x0, False), (0x1, False), (0x4, True), (0x40, True)])
def test_nvml_bits(bits: int, throttled: bool) -> None:
    # 0x1 is "idle", 0x4 the power cap, 0x40 a thermal slowdown (nvml.h)
    assert Meter(nvml=FakeNvml(bits)).read() == Reading(1515.0, 682.0, throttled)


def test_no_nvml_gives_empty_readings() -> None:
    assert Meter(nvml=SimpleNamespace()).read() == Reading()


def test_only_a_gpu_that_stays_busy_is_refused() -> None:
    require_idle(Meter(nvml=FakeNvml(0, (90, 80, 3))), "X", pause_s=0.0)
    with pytest.raises(CalibrationError, match="X is 95 % busy"):
        require_idle(Meter(nvml=FakeNvml(0, (95,))), "X", looks=3, pause_s=0.0)


@given(st.floats(1e-6, 1.0), st.integers(1, 64), st.integers(1, 100))
def test_graph_sizes_are_bounded(estimate_s: float, copies: int, cold: int) -> None:
    protocol = Protocol()
    launches = protocol.per_replay(estimate_s, copies, cold)
    assert 1 <= launches <= protocol.longest_graph
    assert launches >= min(cold, copies, protocol.longest_graph)
    if launches < protocol.longest_graph:
        assert launches * estimate_s >= protocol.replay_s * 0.999
    assert protocol.least <= protocol.samples(estimate_s) <= protocol.most


def test_only_iterations_wholly_beside_the_other_count() -> None:
    mine = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    other = [0.5, 1.5, 2.5, 3.5, 4.5]
    kept, window = overlapped(mine, other)
    assert window == (1.5, 4.5)
    assert kept == [1.0, 1.0]  # 2..3 and 3..4; 1..2 began before the other was warm, 4..5 outlasted it


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=30),
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=30),
)
def test_overlap_never_exceeds_the_window(a: list[float], b: list[float]) -> None:
    def bounds(steps: list[float]) -> list[float]:
        total, out = 0.0, [0.0]
        for step in steps:
            total += step
            out.append(total)
        return out

    kept, (start, end) = overlapped(bounds(a), bounds(b))
    assert sum(kept) <= max(0.0, end - start) + 1e-9

"""SM partitions: legal sizes, the proof that masks hold, and the libsmctrl back end on a fake library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from calib.libsmctrl import LibSmctrl, disabled_mask
from calib.partition import (
    GreenContexts,
    LeakError,
    Partition,
    check,
    legal_sizes,
    prove,
    prove_split,
)
from sim.errors import CalibrationError


def partition(name: str, sms: int) -> Partition:
    return Partition(name, sms, lambda priority: f"{name}-{priority}")


def test_hopper_sizes_are_multiples_of_eight() -> None:
    assert legal_sizes(132, 8, 8) == list(range(8, 132, 8))


def test_fine_alignment_is_thinned() -> None:
    sizes = legal_sizes(108, 4, 2)
    assert len(sizes) <= 16
    assert sizes[0] == 4
    assert all(size % 2 == 0 and size < 108 for size in sizes)


def test_streams_are_made_once_per_priority() -> None:
    made: list[str] = []
    part = Partition("a", 8, lambda priority: made.append(priority) or len(made))
    assert part.stream() == part.stream() == 1
    assert part.stream("high") == part.stream("high") == 2
    assert made == ["normal", "high"]


def test_a_partition_that_keeps_its_promise_is_proved() -> None:
    part = partition("a16", 16)
    assert prove(part, lambda stream: frozenset(range(16))) == part.smids == frozenset(range(16))


@pytest.mark.parametrize("seen", [frozenset(range(132)), frozenset(range(15))])
def test_more_or_fewer_sms_than_promised_is_refused(seen: frozenset[int]) -> None:
    with pytest.raises(LeakError, match="promised 16 SMs"):
        prove(partition("a16", 16), lambda stream: seen)


def test_sides_that_share_sms_are_refused() -> None:
    seen = {"a8-normal": frozenset(range(8)), "b8-normal": frozenset(range(7, 131))}
    with pytest.raises(LeakError, match=r"share the SMs \[7\]"):
        prove_split(partition("a8", 8), partition("b8", 124), seen.__getitem__)


def test_driver_errors_name_the_call() -> None:
    code = SimpleNamespace(value=1, name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(CalibrationError, match="cuGreenCtxCreate failed with CUDA_ERROR_INVALID_VALUE"):
        check((code, None), "cuGreenCtxCreate")
    assert check((SimpleNamespace(value=0), 7), "x") == 7


class FakeDriver:
    """The driver calls of a 132-SM Hopper: rounds splits up to eight and leaves the rest."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        self.contexts = 0

    @staticmethod
    def resource(sms: int) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=sms))

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[int, Any]:
        return 0, self.resource(132)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, 9

    def cuDevSmResourceSplitByCount(
        self, groups: int, resource: Any, flags: int, least: int
    ) -> tuple[Any, ...]:
        got = -(-least // 8) * 8
        return 0, [self.resource(got)], 1, self.resource(resource.sm.smCount - got)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[int, str]:
        return 0, "descriptor"

    def cuGreenCtxCreate(self, descriptor: str, device: int, flags: int) -> tuple[int, int]:
        self.contexts += 1
        return 0, self.contexts


@pytest.fixture
def green(monkeypatch: pytest.MonkeyPatch) -> GreenContexts:
    driver = FakeDriver()
    bindings = SimpleNamespace(driver=driver)
    monkeypatch.setitem(__import__("sys").modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", bindings)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", driver)
    return GreenContexts()


def test_green_contexts_round_up_and_give_the_rest(green: GreenContexts) -> None:
    assert (green.total, green.minimum, green.alignment) == (132, 8, 8)
    a, b = green.split(66)
    assert (a.sms, b.sms) == (72, 60)
    assert green.split(72) is green.split(66)
    a, b = green.split(124)
    assert (a.sms, b.sms) == (128, 4)


def test_each_split_is_made_once(green: GreenContexts) -> None:
    green.split(112), green.split(112), green.split(64)
    assert green._driver.contexts == 4


@pytest.mark.parametrize("sms", [0, 4, 132, 200])
def test_impossible_sizes_are_refused(green: GreenContexts, sms: int) -> None:
    with pytest.raises(CalibrationError, match="between 8 and 131"):
        green.split(sms)


class FakeSmctrl:
    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def libsmctrl_set_stream_mask_ext(self, stream: int, mask: Any) -> None:
        self.masks[stream] = mask.low | mask.high << 64

    def libsmctrl_set_stream_mask(self, stream: int, mask: int) -> None:
        self.masks[stream] = mask


def streams() -> Any:
    made: list[Any] = []

    def new(priority: str) -> Any:
        made.append(SimpleNamespace(cuda_stream=len(made) + 1))
        return made[-1]

    return new


def test_libsmctrl_masks_disable_the_other_side_of_a_large_gpu() -> None:
    library = FakeSmctrl()
    a, b = LibSmctrl("x", 132, 12040, library, streams()).split(32)
    assert (a.sms, b.sms) == (32, 100)
    a.stream(), b.stream()
    tpcs = (1 << 66) - 1
    assert ~library.masks[1] & tpcs == (1 << 16) - 1
    assert ~library.masks[2] & tpcs == tpcs ^ ((1 << 16) - 1)


def test_libsmctrl_uses_one_word_up_to_64_tpcs() -> None:
    library = FakeSmctrl()
    a, b = LibSmctrl("x", 108, 12040, library, streams()).split(54)
    a.stream(), b.stream()
    assert library.masks[1] & library.masks[2] == disabled_mask(0, 54, 54)
    assert library.masks[1] | library.masks[2] == (1 << 64) - 1


def test_libsmctrl_refuses_what_would_abort_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASK_OFF", raising=False)
    with pytest.raises(CalibrationError, match=r"driver 13\.0"):
        LibSmctrl("x", 132, 13000, FakeSmctrl(), streams())


def test_libsmctrl_that_is_missing_or_too_old_is_refused(tmp_path: Any) -> None:
    with pytest.raises(CalibrationError, match="could not be loaded from"):
        LibSmctrl(tmp_path / "none.so", 132, 12040)
    with pytest.raises(CalibrationError, match="libsmctrl_set_stream_mask_ext"):
        LibSmctrl("old", 132, 12040, SimpleNamespace(), streams())

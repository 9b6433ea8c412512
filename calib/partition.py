"""SM partitions: sets of SMs with streams that only use those SMs, made once and proved before anything is timed.

Green contexts (CUDA driver API) are the mechanism; a partition is side A (the asked size) or side B (the rest)
of one split of the whole GPU, so sets of different splits overlap. `libsmctrl` is a second mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sim.errors import CalibrationError

NORMAL, HIGH = "normal", "high"


class LeakError(CalibrationError):
    """Kernels ran on SMs that their partition does not own, or not on all that it does."""


@dataclass
class Partition:
    """A set of `sms` SMs. `stream(priority)` gives a torch stream confined to it, made once and reused."""

    name: str
    sms: int
    make_stream: Callable[[str], Any]
    smids: frozenset[int] | None = None
    _streams: dict[str, Any] = field(default_factory=dict)

    def stream(self, priority: str = NORMAL) -> Any:
        """The torch stream of `priority` ("normal" or "high")."""
        if priority not in self._streams:
            self._streams[priority] = self.make_stream(priority)
        return self._streams[priority]


class Mechanism(Protocol):
    """A way to confine work to SMs."""

    name: str
    total: int
    minimum: int
    alignment: int

    def split(self, sms: int) -> tuple[Partition, Partition]:
        """(side A with `sms` SMs or the next legal size above, side B with the remainder)."""
        ...


def legal_sizes(total: int, minimum: int, alignment: int, most: int = 16) -> list[int]:
    """At most `most` evenly spaced sizes that side A can have with a non-empty side B, ascending."""
    first = -(-minimum // alignment) * alignment
    sizes = list(range(first, total, alignment))
    return sizes[:: -(-len(sizes) // most)] if sizes else []


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack a cuda-bindings result; CalibrationError if the driver call `call` failed."""
    code, *values = result
    if int(getattr(code, "value", code)) != 0:
        raise CalibrationError(f"The driver call {call} failed with {getattr(code, 'name', code)}.")
    return values[0] if len(values) == 1 else tuple(values)


class GreenContexts:
    """Partitions by CUDA green contexts (driver 12.4 or newer). Needs a current primary context."""

    name = "green"

    def __init__(self, index: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CalibrationError(
                "SM partitions need the package cuda-bindings, which is not installed: pip install cuda-bindings."
            ) from error
        self._driver = driver
        self._device = check(driver.cuDeviceGet(index), "cuDeviceGet")
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._all = check(driver.cuDeviceGetDevResource(self._device, kind), "cuDeviceGetDevResource")
        self.total = int(self._all.sm.smCount)
        major = check(
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device
            ),
            "cuDeviceGetAttribute",
        )
        # CUDA 13 answers both; before, the driver guide's table: (4, 2) on 8.x and (8, 8) from 9.0 on
        small, step = (8, 8) if int(major) >= 9 else (4, 2)
        self.minimum = int(getattr(self._all.sm, "minSmPartitionSize", 0) or small)
        self.alignment = int(getattr(self._all.sm, "smCoscheduledAlignment", 0) or step)
        self._splits: dict[int, tuple[Partition, Partition]] = {}

    def split(self, sms: int) -> tuple[Partition, Partition]:
        if sms not in self._splits:
            if not self.minimum <= sms < self.total:
                raise CalibrationError(
                    f"A partition of {sms} SMs is impossible: between {self.minimum} and {self.total - 1} are."
                )
            groups, _, rest = check(
                self._driver.cuDevSmResourceSplitByCount(1, self._all, 0, sms), "cuDevSmResourceSplitByCount"
            )
            group = groups[0]
            got = int(group.sm.smCount)
            if got not in self._splits:
                self._splits[got] = (self._partition(f"a{got}", group), self._partition(f"b{got}", rest))
            self._splits[sms] = self._splits[got]
        return self._splits[sms]

    def _partition(self, name: str, resource: Any) -> Partition:
        driver = self._driver
        sms = int(resource.sm.smCount)
        if sms == 0:
            return Partition(name, 0, self._refuse)
        descriptor = check(driver.cuDevResourceGenerateDesc([resource], 1), "cuDevResourceGenerateDesc")
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = check(driver.cuGreenCtxCreate(descriptor, self._device, flag), "cuGreenCtxCreate")

        def make_stream(priority: str) -> Any:
            import torch

            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            level = -5 if priority == HIGH else 0  # clamped by the driver to the greatest priority there is
            pointer = check(driver.cuGreenCtxStreamCreate(context, flags, level), "cuGreenCtxStreamCreate")
            return torch.cuda.ExternalStream(int(pointer))

        return Partition(name, sms, make_stream)

    @staticmethod
    def _refuse(priority: str) -> Any:
        raise CalibrationError("This split leaves no SM to the other side, so it has no stream.")


def whole_gpu(total: int, name: str = "all") -> Partition:
    """All SMs: plain streams of the primary context."""

    def make_stream(priority: str) -> Any:
        import torch

        return torch.cuda.Stream(priority=-5 if priority == HIGH else 0)

    return Partition(name, total, make_stream)


def prove(partition: Partition, smids: Callable[[Any], frozenset[int]]) -> frozenset[int]:
    """The SM ids that `partition` uses; raises LeakError if they are not as many as promised.

    `smids(stream)` launches a probe on the stream and returns the ids seen.
    """
    seen = smids(partition.stream())
    if len(seen) != partition.sms:
        raise LeakError(
            f"Partition {partition.name} promised {partition.sms} SMs, but its kernels ran on {len(seen)}: "
            "the SM mask leaks or is not honoured, so no profile is written."
        )
    partition.smids = seen
    return seen


def prove_split(a: Partition, b: Partition, smids: Callable[[Any], frozenset[int]]) -> None:
    """Prove both sides and that they are disjoint; raises LeakError otherwise."""
    both = prove(a, smids) & (prove(b, smids) if b.sms else frozenset())
    if both:
        raise LeakError(
            f"Partitions {a.name} and {b.name} should be disjoint but share the SMs {sorted(both)}: "
            "the SM mask leaks, so no profile is written."
        )

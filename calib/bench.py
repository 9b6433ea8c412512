"""What sweeps need of a bench, and what it answers; `calib.lab` is the real GPU, `calib.fake` has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from typing import Protocol as Interface

from calib.device import DeviceFacts
from calib.kernels.base import Kernel
from calib.measure import Protocol, Sample
from calib.models import ModelShape
from calib.partition import NORMAL

if TYPE_CHECKING:
    from calib.energy import Drawn, Phased
    from calib.kernels.tickets import Mix, Ran


@dataclass(frozen=True)
class Side:
    """One of two kernels that run at a time: on how many SMs, at which stream priority."""

    kernel: Kernel
    sms: int
    priority: str = NORMAL


@dataclass
class Pair:
    """A co-run: times of the fully overlapped iterations of each side, and of each side alone."""

    a: Sample
    b: Sample
    alone_a: Sample
    alone_b: Sample
    shared_sms: int


@dataclass
class Stagger:
    """One side beside a burst of the other: `a` once a repeat, `b` from start_s to end_s after a's start."""

    a: Sample
    alone_a: Sample
    start_s: float
    end_s: float
    count: int


class Bench(Interface):
    """What sweeps need of a bench."""

    facts: DeviceFacts
    model: ModelShape
    protocol: Protocol

    def clock(self) -> float: ...
    def sizes(self) -> list[int]: ...
    def proofs(self) -> list[dict[str, Any]]: ...
    def description(self) -> dict[str, Any]: ...
    def healthy(self) -> bool: ...
    def time(self, kernel: Kernel, sms: int, launch: str = "graph", priority: str = NORMAL) -> Sample: ...
    def error(self, kernel: Kernel) -> float: ...
    def replayed_error(self, kernel: Kernel) -> float: ...
    def pair(self, a: Side, b: Side, mode: str) -> Pair: ...
    def stagger(self, a: Side, b: Side, mode: str, delay_s: float, share: float) -> Stagger: ...
    def sustained(
        self, kernel: Kernel, sms: int, launch: str, seconds: float
    ) -> list[tuple[float, Sample]]: ...
    def host_costs(self, label: str, batch: int) -> tuple[dict[str, Any], Sample]: ...
    def draw(self, sides: Sequence[Side], mode: str, seconds: float, rest_s: float = 0.4) -> Drawn: ...
    def paced(self, side: Side, gap_s: float, seconds: float) -> Drawn: ...
    def phases(self, sides: Sequence[Side], order: Sequence[tuple[int, float]]) -> Phased: ...
    def mix(self, mix: Mix, sms: int) -> Ran: ...
    def launched(self, kernels: list[Kernel]) -> list[list[dict[str, Any]]]: ...

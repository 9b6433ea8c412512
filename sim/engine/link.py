"""Links that carry KV from one replica's GPUs to another's: shared fairly, or first in, first out.

A link is one direction between two replicas. Bytes go first, the latency comes on top, so a transfer that has the link
to itself takes bytes / rate + latency. Under `fair` the n transfers under way each get an n-th of the rate. A link that
was measured takes, alone, what its curve says of the message, or of as many as there are layers one after the other;
more than the latency of that is shared as bytes are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

from sim.cost.base import CostModel
from sim.cost.collectives import Transfer
from sim.engine.clock import TRANSFER, Clock
from sim.errors import SimctlError

KINDS = ("auto", "nvlink", "network")
SHARING = ("fair", "fifo")
OVERLAP = ("layer", "none")
DEFAULT_LATENCY_S = 10e-6  # point to point, aiconfigurator-core 0.12.0
MACHINE_GPUS = 8  # that NVLink joins


@dataclass(frozen=True)
class Link:
    """Between every prefill and every decode replica: bytes/s and seconds.

    `overlap`: `layer` sends each layer's KV once it is computed, `none` all after the prompt; None leaves it to the
    policy. `source`: where the figures come from. `curve`: what was measured of one GPU's transfers, `shards` of which
    go side by side; rate and latency are then those of its largest and its smallest message.
    """

    bytes_per_s: float
    latency_s: float = DEFAULT_LATENCY_S
    sharing: str = "fair"
    overlap: str | None = None
    source: str = "the experiment"
    curve: Transfer | None = None
    shards: int = 1

    def carried(self, size: float, messages: int = 1) -> float:
        """Bytes that take as long at the link's rate as `size` bytes do in so many messages of one transfer."""
        if self.curve is None:
            return size
        one = float(self.curve.knots.at(size / self.shards / messages))
        seconds = messages * one * (self.curve.layered if messages > 1 else 1.0)
        return max(0.0, seconds - self.latency_s) * self.bytes_per_s

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise SimctlError(f"a link needs a rate above 0 and a latency of 0 or more, not {self}")
        if self.sharing not in SHARING or self.overlap not in (*OVERLAP, None):
            raise SimctlError(
                f"a link's sharing is one of {SHARING} and its overlap one of {OVERLAP}, not {self}"
            )


def in_one_machine(prefill: CostModel, decode: CostModel, gpus: int) -> bool:
    """Does NVLink join the GPUs of a prefill and a decode replica, in a cluster of so many GPUs?"""
    a, b = prefill.gpu, decode.gpu
    return bool(a.name == b.name and a.nvlink_gb_s and gpus <= MACHINE_GPUS)


def default_rate(prefill: CostModel, decode: CostModel, gpus: int, kind: str = "auto") -> tuple[float, str]:
    """(bytes/s, source) by the GPU table of the link between a prefill and a decode replica.

    NVLink where all GPUs are alike and fit one machine, else the network, one card a GPU; shards go side by side.
    `kind`: one of `KINDS`; SimctlError for NVLink between GPUs that it does not join.
    """
    shards = min(prefill.tp, decode.tp)
    a, b = prefill.gpu, decode.gpu
    joined = in_one_machine(prefill, decode, gpus)
    if kind == "nvlink" and not joined:
        raise SimctlError(
            f"link.kind: nvlink joins up to {MACHINE_GPUS} GPUs of one kind that have it, not {gpus} of "
            f"{a.name if a.name == b.name else f'{a.name} and {b.name}'}; use network, or auto."
        )
    if joined and kind != "network":
        rate, what = a.nvlink_gb_s / 2, f"NVLink of {a.name}, one direction"
    else:
        slower = min(a, b, key=lambda gpu: gpu.nic_gb_s)
        rate, what = slower.nic_gb_s, f"network card of {slower.name}"
    count = "" if shards == 1 else f"{shards} x "
    return shards * rate * 1e9, f"GPU table: {count}{what}"


def default_link(
    prefill: CostModel,
    decode: CostModel,
    gpus: int,
    kind: str = "auto",
    sharing: str = "fair",
    overlap: str | None = None,
) -> Link:
    """The link between a prefill and a decode replica of a cluster of so many GPUs.

    Within one machine the transfer that the profile measured, if it did; otherwise by the GPU table (`default_rate`).
    """
    rate, source = default_rate(prefill, decode, gpus, kind)
    # an optional part of a cost model, as of one that somebody brings
    curve: Transfer | None = getattr(prefill, "kv_transfer", None)
    if curve is None or kind == "network" or not in_one_machine(prefill, decode, gpus):
        return Link(rate, sharing=sharing, overlap=overlap, source=source)
    shards = min(prefill.tp, decode.tp)
    (a, b), (s, t) = curve.knots.sizes[-2:], curve.knots.seconds[-2:]
    latency_s = curve.knots.seconds[0]
    rate = (b - a) / (t - s) if t > s else b / t
    count = "" if shards == 1 else f"{shards} x "
    return Link(shards * rate, latency_s, sharing, overlap, f"measured: {count}{curve.source}", curve, shards)


@dataclass
class Wire:
    """The link of one pair of replicas in use. `deliver(key)` is called when all of a transfer has arrived."""

    clock: Clock
    link: Link
    receiver: int
    deliver: Callable[[Any], None]
    busy_s: float = 0.0
    # (level if through, number, key, floor)
    _queue: list[tuple[float, int, Any, float]] = field(default_factory=list)
    _level: float = 0.0  # bytes that each transfer under way has been sent since the wire was last empty
    _since_s: float = 0.0
    _free_s: float = 0.0
    _number: int = 0

    def send(self, key: Any, size: float, floor_s: float = 0.0) -> None:
        """Carry `size` bytes from now on; the last of them cannot go before `floor_s`."""
        now, rate = self.clock.now, self.link.bytes_per_s
        if self.link.sharing == "fifo" or math.isinf(rate):
            begins = max(now, self._free_s)
            self._free_s = begins + size / rate
            self.busy_s += size / rate
            self._through(key, self._free_s, floor_s)
            return
        self._pass_time(now)
        self._number += 1
        heappush(self._queue, (self._level + size, self._number, key, floor_s))
        self._expect()

    def _pass_time(self, now: float) -> None:
        if self._queue:
            self._level += (now - self._since_s) * self.link.bytes_per_s / len(self._queue)
            self.busy_s += now - self._since_s
        else:
            self._level = 0.0
        self._since_s = now

    def _expect(self) -> None:
        """Wake when the next transfer is through, at the present shares."""
        left = (self._queue[0][0] - self._level) * len(self._queue) / self.link.bytes_per_s
        event = self.clock.at(self.clock.now + max(0.0, left), TRANSFER, self.receiver)
        event.callbacks.append(partial(self._first_is_through, self._number, self._queue[0][1]))

    def _first_is_through(self, sent: int, first: int, _event: Any) -> None:
        if sent != self._number or not self._queue or first != self._queue[0][1]:
            return  # the shares have changed since
        now = self.clock.now
        self._pass_time(now)
        self._level = self._queue[0][0]
        while self._queue and self._queue[0][0] <= self._level:
            _, _, key, floor_s = heappop(self._queue)
            self._through(key, now, floor_s)
        if self._queue:
            self._expect()

    def _through(self, key: Any, time_s: float, floor_s: float) -> None:
        event = self.clock.at(max(time_s, floor_s) + self.link.latency_s, TRANSFER, self.receiver)
        event.callbacks.append(lambda _event: self.deliver(key))

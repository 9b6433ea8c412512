"""Measured collectives of the GPUs of one machine, and transfers of KV between them.

Message sizes are counted as NCCL's own tests count them: an all-reduce by the buffer of one GPU, an all-gather by the
gathered result, a reduce-scatter by the whole input of one GPU, an all-to-all by its send buffer, the rest by what
goes one way. `sim.cost.collectives_file` reads the file of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.cost.shapes import Elementwise, Floats, Shape

COLLECTIVES = (
    "allreduce",
    "allgather",
    "reduce_scatter",
    "broadcast",
    "alltoall",
    "sendrecv",  # one way
    "exchange",  # both ways at once
)
USED = ("allreduce", "allgather")  # by a pass of a group with tensor parallelism
LAUNCHES = ("graph", "eager")
COMPUTE = ("gemm", "prefill_attention", "decode_attention", "elementwise", "allreduce")
OVERLAPS = ("shared", "disjoint")  # one set of SMs for both, or one each
METHODS = ("copy", "sendrecv", "kernel")  # copy engines, NCCL, a kernel that gathers
LAYOUTS = ("contiguous", "blocks")
SIDES = ("prefill", "decode")  # what runs on the sending, and on the receiving GPU


@dataclass(frozen=True)
class Knots:
    """Seconds at message sizes in bytes, ascending: linear between them, held below the first, and beyond the last on
    the line of the last two."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: Any) -> Floats:
        """Seconds of messages of that many bytes."""
        size = np.asarray(size, dtype=np.float64)
        (a, b), (s, t) = self.sizes[-2:], self.seconds[-2:]
        beyond = np.maximum(size - b, 0.0) * max(0.0, (t - s) / (b - a))
        return np.asarray(np.interp(size, self.sizes, self.seconds) + beyond)

    def holds(self, size: Any) -> bool:
        """Do all sizes lie between the first knot and the last? Less than the first is a call of the same cost."""
        return bool(np.all(np.asarray(size) <= self.sizes[-1] * (1 + 1e-9)))


@dataclass(frozen=True)
class HeldOut:
    """Errors as fractions on points that a curve had not seen."""

    points: int = 0
    median: float | None = None
    p95: float | None = None
    bias: float | None = None


@dataclass(frozen=True)
class Measured:
    """One collective among `gpus` GPUs, captured in a graph or launched eagerly.

    `sms`: SMs that it holds, from a size on (`sms_by_bytes`); `host_s`: host seconds of an eager call; `sms_given`:
    (SMs that its stream may use, factor on its seconds), linear between; `sd`: relative standard error. `in_step_s`:
    what a call within a captured decode step takes beyond one of many alike: GPUs wait for each other, and the next
    kernel's launch is not hidden.
    """

    collective: str
    gpus: int
    launch: str
    knots: Knots
    sms: float = 0.0
    sms_by_bytes: tuple[tuple[float, float], ...] = ()
    host_s: float = 0.0
    sms_given: tuple[tuple[float, float], ...] = ()
    in_step_s: float = 0.0
    sd: float = 0.0
    measured_points: int = 0
    held_out: HeldOut = field(default_factory=HeldOut)

    @property
    def name(self) -> str:
        """`allreduce/graph-2` and the like."""
        return f"{self.collective}/{self.launch}-{self.gpus}"

    def held(self, size: Any) -> Floats:
        """SMs that the kernel of a message occupies."""
        size = np.asarray(size, dtype=np.float64)
        if not self.sms_by_bytes:
            return np.full(size.shape, float(self.sms))
        sizes, counts = (np.array(column) for column in zip(*self.sms_by_bytes, strict=True))
        return np.asarray(counts[np.maximum(np.searchsorted(sizes, size, side="right") - 1, 0)])

    def given(self, size: Any, sms: float, whole: int) -> Floats:
        """Factor on the seconds where the stream may use `sms` of `whole` SMs: none for a message that holds no more;
        where it was not measured the channels that find no SM wait for the others."""
        held = self.held(size)
        factor = held / sms
        if self.sms_given:
            counts, factors = zip(*self.sms_given, strict=True)
            factor = np.full(held.shape, float(np.interp(sms, counts, factors)))
        return np.where((held > sms) & (sms < whole), factor, 1.0)


@dataclass(frozen=True)
class Beside:
    """A collective of `size` bytes and `compute` at once on the same GPUs all of the time: factors on the seconds of
    each alone. `overlap`: on the same SMs, or the compute on `compute_sms` of its own."""

    collective: str
    gpus: int
    size: float
    compute: str
    overlap: str
    compute_sms: int
    collective_factor: float
    compute_factor: float
    points: int = 0
    spread: float = 0.0


@dataclass(frozen=True)
class SideFactors:
    """Factors on a transfer and on the compute that runs beside it."""

    transfer_factor: float
    compute_factor: float
    points: int = 0


@dataclass(frozen=True)
class Transfer:
    """KV from one GPU to another of the machine: seconds of one message by its bytes.

    `piece_bytes`: of a contiguous piece where pages are scattered (0: contiguous); `prefill` and `decode`: what the
    transfer and the compute on the sending or the receiving GPU do to each other; `layered`: seconds of a message a
    layer, one after the other, over so many messages apart.
    """

    method: str
    layout: str
    piece_bytes: int
    gpus: int
    knots: Knots
    sms: float = 0.0
    sd: float = 0.0
    measured_points: int = 0
    held_out: HeldOut = field(default_factory=HeldOut)
    prefill: SideFactors | None = None
    decode: SideFactors | None = None
    layered: float = 1.0

    @property
    def name(self) -> str:
        """`kv_transfer/copy-contiguous`, `kv_transfer/copy-blocks-64k` and the like."""
        pieces = f"-{self.piece_bytes / 1024:g}k" if self.piece_bytes else ""
        return f"kv_transfer/{self.method}-{self.layout}{pieces}"

    @property
    def source(self) -> str:
        """What a report says of it."""
        pages = f", pieces of {self.piece_bytes / 1024:g} KiB" if self.piece_bytes else ""
        return f"{self.method} between two GPUs, {self.layout}{pages}"


@dataclass(frozen=True)
class Collectives:
    """All that a profile's file holds. `default`: the transfer that hand-overs are priced by, None without any."""

    curves: tuple[Measured, ...]
    beside: tuple[Beside, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    default: Transfer | None = None
    label: str = "measured"
    coverage: str = ""

    def find(self, collective: str, gpus: int, launch: str) -> Measured | None:
        """The curve of just that, or None."""
        asked = (collective, gpus, launch)
        return next((one for one in self.curves if (one.collective, one.gpus, one.launch) == asked), None)

    def basis(self, collective: str, gpus: int, launch: str) -> Measured | None:
        """The curve to answer by: of as many GPUs or of the nearest number below, else above; of the other launch
        where this one was not measured."""
        for way in (launch, *(other for other in LAUNCHES if other != launch)):
            counts = [c.gpus for c in self.curves if (c.collective, c.launch) == (collective, way)]
            if counts:
                below = [count for count in counts if count <= gpus]
                return self.find(collective, max(below) if below else min(counts), way)
        return None

    def beside_rows(self, compute: Sequence[str], overlap: str) -> list[Beside]:
        """Rows of the first of these kinds of compute that has any, most bytes last."""
        for kind in compute:
            rows = [one for one in self.beside if (one.compute, one.overlap) == (kind, overlap)]
            if rows:
                return sorted(rows, key=lambda one: one.size)
        return []


def ring_share(collective: str, gpus: int) -> float:
    """Bytes that the link of each GPU carries in one direction for a byte of the message, over a ring."""
    if collective == "allreduce":
        return 2 * (gpus - 1) / gpus
    return (gpus - 1) / gpus if collective in ("allgather", "reduce_scatter", "alltoall") else 1.0


def ring_hops(collective: str, gpus: int) -> int:
    """Hops one after the other around a ring."""
    if collective == "allreduce":
        return 2 * (gpus - 1)
    return 1 if collective in ("alltoall", "sendrecv", "exchange") else gpus - 1


def message_bytes(shape: Shape) -> Floats:
    """Bytes of a collective's messages."""
    if not isinstance(shape, Elementwise):
        raise TypeError(f"a collective has rows of bytes, not a {type(shape).__name__}")
    return np.asarray(shape.rows, np.float64) * shape.bytes_per_row


def is_collective(operator: str) -> bool:
    """Is this operator one of a group of GPUs, whose time no SM clock and no composition factor touches?"""
    return operator.split("/")[0] in USED

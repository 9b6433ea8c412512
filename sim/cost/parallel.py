"""Tensor parallelism: each GPU of a group holds a shard of every layer, and collectives add up what the shards made.

Cut as Megatron-LM cuts (arXiv:1909.08053 section 3): heads, FFN columns and the vocabulary are divided, norms and the
residual are whole on every GPU, a layer ends its attention and its FFN with an all-reduce, and the logits are gathered
before sampling. A collective is priced by what the profile measured of it; for a number of GPUs that was not measured
the link of each GPU carries what a ring carries; without any measurement by a ring at the data sheet's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.cost.base import HostTerms
from sim.cost.collectives import USED, Measured, message_bytes, ring_hops, ring_share
from sim.cost.gpu import GpuSpec
from sim.cost.model import ModelSpec
from sim.cost.operators import Operator, linear_operators
from sim.cost.profile import CurveProfile, digest
from sim.cost.shapes import Elementwise, Shape, Timing
from sim.errors import SimctlError

MAX_GROUP = 8  # GPUs of one machine; beyond it the ring would cross the network
# Fixed cost, cost of a hop and share of the peer link's rate: median error 10 % on H100 and 14 % on A100 against
# aiconfigurator-core 0.12.0's tables of vLLM's own all-reduce in graphs, 2 to 8 GPUs, up to 64 MB
RING_FIXED_S, RING_HOP_S, RING_SHARE = 4.3e-6, 0.15e-6, 0.7
RING_SMS = 24  # SMs that the kernel holds, an assumption
# A hop of NCCL, for other numbers of GPUs than were measured: from its own 2 GPUs, aiconfigurator-core 0.12.0 tables of
# all-reduce and all-gather on H200, H100 and A100 are met to 8 % on 4 and 11 % on 8 GPUs (median; p95 24 and 39 %)
NCCL_HOP_S = 0.9e-6
EXTRAPOLATED_SD = 0.2


@dataclass(frozen=True)
class RingCurve:
    """A collective of `rows` x `bytes_per_row` over a ring: hops one after the other, each with its share of bytes."""

    gpu: GpuSpec
    gpus: int
    label: str
    collective: str = "allreduce"
    coverage: str = ""
    extrapolation: str = "flag"

    def covered(self, shape: Shape, sms: int) -> bool:
        """True: the form claims every size, by extrapolation."""
        return True

    def fixed_s(self, shape: Shape) -> float:
        """Time of a call that carries nothing."""
        return RING_FIXED_S + ring_hops(self.collective, self.gpus) * RING_HOP_S

    def label_for(self, shape: Shape) -> str:
        """The label, whatever the shape."""
        return self.label

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds per array element; the SM clock does not matter to a link."""
        carried = ring_share(self.collective, self.gpus) * message_bytes(shape)
        seconds = self.fixed_s(shape) + carried / (RING_SHARE * self.gpu.peer_gb_s * 1e9)
        return Timing(seconds=seconds, sm_s=seconds * min(sms, RING_SMS))


@dataclass(frozen=True)
class GroupCurve:
    """A measured collective for a group of `gpus` GPUs; `uncaptured`: the one of eager launches.

    Another number of GPUs than `measured` has takes what the measured group takes for the message with which each link
    carries as many bytes, and the further hops of a ring.
    """

    gpu: GpuSpec
    measured: Measured
    gpus: int
    label: str
    coverage: str
    extrapolation: str = "flag"
    uncaptured: GroupCurve | None = None

    @property
    def same(self) -> bool:
        """Was just this number of GPUs measured?"""
        return self.measured.gpus == self.gpus

    def covered(self, shape: Shape, sms: int) -> bool:
        """Was a group of as many GPUs measured, up to messages of this size?"""
        return self.same and self.measured.knots.holds(message_bytes(shape))

    def fixed_s(self, shape: Shape) -> float:
        """Time of the smallest message."""
        return float(self.measured.knots.seconds[0]) + self._hops_s()

    def label_for(self, shape: Shape) -> str:
        """The label, whatever the shape."""
        return self.label

    def spread(self, shape: Shape, sms: int) -> float:
        """Relative standard error."""
        return max(self.measured.sd, 0.0 if self.same else EXTRAPOLATED_SD)

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds per array element; the SM clock does not matter to a link."""
        size = message_bytes(shape)
        name = self.measured.collective
        alike = size * ring_share(name, self.gpus) / ring_share(name, self.measured.gpus)
        seconds = np.asarray(self.measured.knots.at(alike) + self._hops_s())
        seconds = seconds * self.measured.given(alike, sms, self.gpu.sms)
        return Timing(seconds=seconds, sm_s=seconds * np.minimum(sms, self.measured.held(alike)))

    def launched(self, shape: Shape, sms: int, captured: Callable[[Any], Any]) -> Timing:
        """`timing` of calls from a graph where the rows are `captured`, else of eager ones."""
        found = self.timing(shape, sms)
        if self.uncaptured is None or not isinstance(shape, Elementwise):
            return found
        eager, held = self.uncaptured.timing(shape, sms), captured(shape.rows)
        return Timing(
            seconds=np.where(held, found.seconds, eager.seconds), sm_s=np.where(held, found.sm_s, eager.sm_s)
        )

    def _hops_s(self) -> float:
        name = self.measured.collective
        return NCCL_HOP_S * max(0, ring_hops(name, self.gpus) - ring_hops(name, self.measured.gpus))


def shard(model: ModelSpec, tp: int) -> ModelSpec:
    """The part of a model that one of `tp` GPUs holds; KV heads are repeated where there are fewer than GPUs.

    Raises SimctlError where the model cannot be cut so.
    """
    if tp == 1:
        return model
    if not 1 <= tp <= MAX_GROUP:
        raise SimctlError(f"tp = {tp} is not modelled: a group is 1 to the {MAX_GROUP} GPUs of one machine.")
    columns = (("FFN columns", model.ffn), ("columns of the shared expert", model.shared_ffn))
    for what, count in (("query heads", model.q_heads), *columns):
        if count % tp:
            raise SimctlError(f"tp = {tp} does not divide the {count} {what} of {model.name}.")
    if model.kv_heads % tp and tp % model.kv_heads:
        raise SimctlError(
            f"tp = {tp} neither divides the {model.kv_heads} KV heads of {model.name} nor is a multiple of them."
        )
    return replace(
        model,
        q_heads=model.q_heads // tp,
        kv_heads=max(1, model.kv_heads // tp),
        ffn=model.ffn // tp,
        shared_ffn=model.shared_ffn // tp,
        vocab=-(-model.vocab // tp),
    )


def parallel_operators(part: ModelSpec, tp: int) -> tuple[Operator, ...]:
    """Operators of one GPU's shard, with the collectives behind them; logits are gathered before sampling."""
    operators = linear_operators(part)
    if tp == 1:
        return operators
    residual = part.hidden * part.dtype_bytes
    ffn_end = "routing/unpermute" if part.experts else "gemm/down"
    logits = part.vocab * tp * part.dtype_bytes
    behind = {
        "embedding": Operator("allreduce/embedding", scope="first", bytes_per_row=residual),
        "gemm/o": Operator("allreduce/attention", bytes_per_row=residual),
        ffn_end: Operator("allreduce/ffn", bytes_per_row=residual),
        "lm_head": Operator("allgather/logits", scope="last", rows="sequences", bytes_per_row=logits),
    }
    made: list[Operator] = []
    for operator in operators:
        whole = operator.name == "sampling"
        made.append(replace(operator, bytes_per_row=operator.bytes_per_row * tp) if whole else operator)
        if operator.name in behind:
            made.append(behind[operator.name])
    return tuple(made)


def with_group(profile: CurveProfile, tp: int) -> CurveProfile:
    """The profile with curves for the collectives of a group of `tp` GPUs, and the host's time to launch them."""
    if tp == 1:
        return profile
    curves = {**profile.curves, **{name: group_curve(profile, name, tp) for name in USED}}
    return replace(
        profile,
        curves=curves,
        host=_host(profile, tp),
        content_hash=digest([profile.content_hash, "group", tp]),
    )


def group_curve(profile: CurveProfile, collective: str, gpus: int) -> GroupCurve | RingCurve:
    """The curve of one collective: measured, extrapolated from another number of GPUs, or by the data sheet."""
    eager, graph = (_measured_curve(profile, collective, gpus, launch) for launch in ("eager", "graph"))
    if graph is None:
        link = "NVLink" if profile.gpu.nvlink_gb_s else "PCIe"
        label = f"extrapolated from the data sheet's {link} rate by a ring over {gpus} GPUs"
        return RingCurve(profile.gpu, gpus, label, collective)
    return replace(graph, uncaptured=eager)


def _measured_curve(profile: CurveProfile, collective: str, gpus: int, launch: str) -> GroupCurve | None:
    source = profile.collectives
    found = None if source is None else source.basis(collective, gpus, launch)
    if source is None or found is None:
        return None
    label = source.label
    if found.launch != launch:
        label = f"extrapolated from {profile.name} by {collective} launched as {found.launch}"
    if found.gpus != gpus:
        label = f"extrapolated from {profile.name}'s {collective} of {found.gpus} GPUs by a ring over {gpus}"
    largest = found.knots.sizes[-1]
    coverage = f"{collective} of {found.gpus} GPUs, {launch}, to {largest / 2**20:g} MiB"
    return GroupCurve(profile.gpu, found, gpus, label, coverage)


def _host(profile: CurveProfile, tp: int) -> HostTerms:
    """Host terms with the eager launches of a layer's two all-reduces, and of the embedding's and the logits'."""
    costs = []
    for name in USED:
        found = None if profile.collectives is None else profile.collectives.basis(name, tp, "eager")
        costs.append(0.0 if found is None else found.host_s)
    reduce_s, gather_s = costs
    terms = profile.host
    return replace(
        terms,
        eager_layer_s=terms.eager_layer_s + 2 * reduce_s,
        eager_base_s=terms.eager_base_s + reduce_s + gather_s,
    )

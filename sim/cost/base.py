"""The interfaces of the cost model: a curve per operator, a profile of curves, and the priced whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sim.cost.attention import AttentionMode
from sim.cost.energy import EnergyTerms
from sim.cost.gpu import GpuSpec
from sim.cost.memory import MemoryPlan
from sim.cost.model import ModelSpec
from sim.cost.prices import Prices
from sim.cost.shapes import Floats, Launch, Shape, StepCost, Timing

# the operators that a profile can hold a curve for; a name may carry a /variant
OPERATORS = (
    "gemm",
    "moe",
    "routing",
    "quantise",
    "prefill_attention",
    "decode_attention",
    "norm",
    "rope",
    "activation",
    "kv_write",
    "embedding",
    "sampling",
    "lm_head",
    "allreduce",
    "allgather",
)
EXTRAPOLATION = ("raise", "flag", "clip")


class Curve(Protocol):
    """Time of one operator as a function of its shape and the SMs it is given.

    `label`: `measured`, `fitted from SOURCE` or `extrapolated from SOURCE by RULE`. `extrapolation`: what
    happens off `coverage` (a sentence; empty: unbounded): `raise`, `flag` (answer by the form, and flag) or
    `clip` (answer as at the edge, and flag).
    """

    @property
    def label(self) -> str: ...

    @property
    def coverage(self) -> str: ...

    @property
    def extrapolation(self) -> str: ...

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds per array element; `clock`: SM clock relative to the profile's own."""
        ...

    def covered(self, shape: Shape, sms: int) -> bool:
        """Does every element of the shape lie within the coverage?"""
        ...

    def fixed_s(self, shape: Shape) -> float:
        """The part of a call's time that does not depend on how much it computes."""
        ...

    def label_for(self, shape: Shape) -> str:
        """The label of an answer for this shape: a measured curve extrapolates to constants that it has not seen."""
        ...


@dataclass(frozen=True)
class HostTerms:
    """Host time per step: base + layers x per layer + sequences x per sequence overlap with the GPU, gaps do not.

    `graph`: one captured graph; `piecewise`: graphs between attention calls; `eager`: each kernel launched by
    the host. A gap grows by `gap_per_sequence_s` with each sequence of the step: page tables, plans, tokens. A pass
    launched in groups of layers spends `gap_group_s` more on each: it is decided, launched and waited for by itself.
    `gap_cools`: share of the gaps that lets the clock recover as idle time does (`sim.engine.heat`).
    """

    graph_base_s: float
    piecewise_base_s: float
    piecewise_layer_s: float
    eager_base_s: float
    eager_layer_s: float
    per_sequence_s: float
    gap_graph_s: float
    gap_eager_s: float
    label: str
    gap_per_sequence_s: float = 0.0
    gap_group_s: float = 0.0
    gap_cools: float = 1.0


class Profile(Protocol):
    """Curves, host and energy terms of one GPU."""

    @property
    def name(self) -> str: ...

    @property
    def gpu(self) -> GpuSpec: ...

    @property
    def content_hash(self) -> str: ...

    @property
    def host(self) -> HostTerms: ...

    @property
    def energy(self) -> EnergyTerms: ...

    def curve(self, operator: str) -> Curve:
        """The curve of an operator, by full name (`gemm/qkv`) or by family (`gemm`)."""
        ...


class CostModel(Protocol):
    """Pure functions from shapes to seconds, activity and bytes; no clock and no state."""

    @property
    def gpu(self) -> GpuSpec: ...

    @property
    def model(self) -> ModelSpec: ...

    @property
    def profile_hash(self) -> str: ...

    @property
    def tp(self) -> int:
        """GPUs of a replica; all figures are those of one of them."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, on all GPUs of a replica together, each once."""
        ...

    def solo(self, launch: Launch, sms: int | None = None, sm_mhz: float | None = None) -> StepCost:
        """Price of a launch that runs alone on `sms` SMs (None: all) at an SM clock (None: the profile's)."""
        ...

    def slowdown(self, a: Launch, b: Launch, split: tuple[int, int], overlap: int = 0) -> tuple[float, float]:
        """Factors >= 1 on the solo times of two launches side by side on (SMs of a, SMs of b)."""
        ...

    def slowdowns(
        self,
        a: Sequence[Launch],
        b: Sequence[Launch],
        split: tuple[int, int],
        overlap: int = 0,
        priority: str = "normal",
    ) -> tuple[Floats, Floats]:
        """`slowdown` of every a beside every b: two arrays of shape (len(a), len(b)). `priority` of the stream of b,
        normal or high, where SMs are shared."""
        ...

    def compile(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_context: int,
        partitions: Sequence[int] = (),
        seed: int = 0,
        replica: int = 0,
        jitter: bool = False,
        compiled: bool = True,
        attention: AttentionMode | None = None,
        page_size: int = 16,
    ) -> Prices:
        """The price tables for steps of up to that size; `partitions`: SM counts beside the whole GPU; `attention` of
        mixed steps (None: as the cost model has it); `page_size`: tokens of a KV block."""
        ...

    def fused_label(self, attention: AttentionMode | None = None) -> str:
        """Label of the prices of a mode of attention; empty for separate kernels."""
        ...

    def energy_j(self, totals: Mapping[str, float], seconds: float) -> float:
        """Joules of one GPU that did the work of a run's totals within so many seconds."""
        ...

    def memory(self, **knobs: Any) -> MemoryPlan:
        """KV blocks that fit; SimctlError with the arithmetic when the model does not."""
        ...

    def provenance(self) -> Mapping[str, str]:
        """Label of each operator's curve, and of the host, energy and contention terms."""
        ...


__all__ = [
    "EXTRAPOLATION",
    "OPERATORS",
    "CostModel",
    "Curve",
    "EnergyTerms",
    "Floats",
    "HostTerms",
    "Profile",
]

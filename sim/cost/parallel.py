"""Tensor parallelism: each GPU of a group holds a shard of every layer, and rings add up what the shards made.

Cut as Megatron-LM cuts (arXiv:1909.08053 section 3): heads, FFN columns and the vocabulary are divided, norms and the
residual are whole on every GPU, and a layer ends its attention and its FFN with an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

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


@dataclass(frozen=True)
class AllReduceCurve:
    """All-reduce of `rows` x `bytes_per_row` over a ring: 2 (n - 1) hops, each carrying an n-th of the bytes."""

    gpu: GpuSpec
    gpus: int
    label: str
    coverage: str = ""
    extrapolation: str = "flag"

    def covered(self, shape: Shape, sms: int) -> bool:
        """True: the form claims every size, by extrapolation."""
        return True

    def fixed_s(self, shape: Shape) -> float:
        """Time of a call that carries nothing."""
        return RING_FIXED_S + 2 * (self.gpus - 1) * RING_HOP_S

    def label_for(self, shape: Shape) -> str:
        """The label, whatever the shape."""
        return self.label

    def timing(self, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """Seconds and SM-seconds per array element; the SM clock does not matter to a link."""
        if not isinstance(shape, Elementwise):
            raise TypeError(f"an all-reduce has rows of bytes, not a {type(shape).__name__}")
        carried = 2 * (self.gpus - 1) / self.gpus * np.asarray(shape.rows, np.float64) * shape.bytes_per_row
        seconds = self.fixed_s(shape) + carried / (RING_SHARE * self.gpu.peer_gb_s * 1e9)
        return Timing(seconds=seconds, sm_s=seconds * min(sms, RING_SMS))


def shard(model: ModelSpec, tp: int) -> ModelSpec:
    """The part of a model that one of `tp` GPUs holds; KV heads are repeated where there are fewer than GPUs.

    Raises SimctlError where the model cannot be cut so.
    """
    if tp == 1:
        return model
    if not 1 <= tp <= MAX_GROUP:
        raise SimctlError(f"tp = {tp} is not modelled: a group is 1 to the {MAX_GROUP} GPUs of one machine.")
    for what, count in (("query heads", model.q_heads), ("FFN columns", model.ffn)):
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
        vocab=-(-model.vocab // tp),
    )


def parallel_operators(part: ModelSpec, tp: int) -> tuple[Operator, ...]:
    """Operators of one GPU's shard, with the all-reduces behind them; logits are gathered before sampling."""
    operators = linear_operators(part)
    if tp == 1:
        return operators
    residual = part.hidden * part.dtype_bytes
    # gathering moves half of what reducing does
    logits = part.vocab * tp * part.dtype_bytes // 2
    behind = {
        "embedding": Operator("allreduce/embedding", scope="first", bytes_per_row=residual),
        "gemm/o": Operator("allreduce/attention", bytes_per_row=residual),
        "gemm/down": Operator("allreduce/ffn", bytes_per_row=residual),
        "lm_head": Operator("allreduce/logits", scope="last", rows="sequences", bytes_per_row=logits),
    }
    made: list[Operator] = []
    for operator in operators:
        whole = operator.name == "sampling"
        made.append(replace(operator, bytes_per_row=operator.bytes_per_row * tp) if whole else operator)
        if operator.name in behind:
            made.append(behind[operator.name])
    return tuple(made)


def with_ring(profile: CurveProfile, tp: int) -> CurveProfile:
    """The profile with a curve for the all-reduces of a group of `tp` GPUs."""
    if tp == 1:
        return profile
    link = "NVLink" if profile.gpu.nvlink_gb_s else "PCIe"
    curve = AllReduceCurve(
        profile.gpu, tp, f"extrapolated from the data sheet's {link} rate by a ring over {tp} GPUs"
    )
    return replace(
        profile,
        curves={**profile.curves, "allreduce": curve},
        content_hash=digest([profile.content_hash, "ring", tp]),
    )

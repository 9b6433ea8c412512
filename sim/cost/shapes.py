"""What the cost model is asked and what it answers: frozen shapes, never requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Launch:
    """One forward pass over some layers: prefill chunks, decodes, or both with shared linear layers.

    `chunks`: (new tokens, tokens of earlier context) of each prefill chunk. `decode_context_sum` and `_max`
    count the context of each decoding sequence, the token being computed included (max 0: unknown).
    `layers`: first and one past the last layer (None: all, with embedding and LM head; a range that starts
    at 0 has the embedding, one that ends at the last layer has the head). `graph`: replayed as a CUDA graph.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decode_batch: int = 0
    decode_context_sum: int = 0
    decode_context_max: int = 0
    layers: tuple[int, int] | None = None
    attention: str = "serial"
    graph: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the linear layers see."""
        return sum(q for q, _ in self.chunks) + self.decode_batch

    @property
    def sequences(self) -> int:
        """Rows of the LM head: engines compute logits for one token of each sequence in the pass."""
        return len(self.chunks) + self.decode_batch


@dataclass(frozen=True)
class Demand:
    """Mean load of a launch on the GPU's shared resources while it runs, each a share of the whole GPU's."""

    hbm: float
    l2: float
    tensor: float
    power: float


@dataclass(frozen=True)
class OperatorCost:
    """All calls of one operator in a launch. `sm_s`: SM-seconds with a resident warp; `joules`: of its work."""

    name: str
    calls: int
    seconds: float
    sm_s: float
    flops: float
    hbm_bytes: float
    label: str
    joules: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """Price of one launch. `gpu_s`: first kernel to last; `step_s`: with host time.

    `sm_active` and `tensor_active` are SM-seconds with a resident warp and with busy tensor cores;
    `watts` is the mean board power over `step_s`.
    """

    gpu_s: float
    step_s: float
    demand: Demand
    sm_active: float
    tensor_active: float
    hbm_bytes: float
    flops: float
    watts: float
    by_operator: tuple[OperatorCost, ...] = ()
    flags: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Gemm:
    """y[m, n] = x[m, k] W[n, k]; `m` is an array of token counts, `dtype_bytes` 1 of x and W in e4m3 (y in 16 bits)."""

    m: Ints
    n: int
    k: int
    dtype_bytes: int


@dataclass(frozen=True)
class Experts:
    """Grouped products of a mixture's experts: each of `m` tokens (an array) goes to `chosen` of `experts`, and what
    comes to an expert is multiplied by its own W[n, k].

    `skew`: the odds of an expert are its rank ** -skew; `counts`: rows of each expert, shape (len(m), experts), where
    they are known (None: in expectation, `sim.cost.experts`).
    """

    m: Ints
    n: int
    k: int
    dtype_bytes: int
    experts: int
    chosen: int
    skew: float = 0.0
    counts: Ints | None = None


@dataclass(frozen=True)
class Elementwise:
    """A kernel that streams `bytes_per_row` bytes for each of `rows` rows (an array), one CTA a row."""

    rows: Ints
    bytes_per_row: int


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of `q` new tokens over `h` earlier ones (arrays of one shape)."""

    q: Ints
    h: Ints
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None


@dataclass(frozen=True)
class DecodeAttention:
    """One new token of each of `batch` sequences whose contexts add up to `context_sum` (arrays).

    `context_max`: the longest context (None: not known, all alike).
    """

    batch: Ints
    context_sum: Floats
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None
    context_max: Floats | None = None


Shape = Gemm | Experts | Elementwise | PrefillAttention | DecodeAttention


@dataclass(frozen=True)
class Timing:
    """One call of an operator, per array element: seconds from launch to launch of the next kernel, SM-seconds."""

    seconds: Floats
    sm_s: Floats

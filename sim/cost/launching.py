"""How a step is launched: captured graph sizes, the token grid of the price tables, and host time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.cost.base import HostTerms
from sim.cost.model import ModelSpec
from sim.cost.operators import linear_operators
from sim.cost.shapes import Floats, Ints
from sim.cost.waves import ceil_div
from sim.errors import SimctlError
from sim.suggest import nearest

MODES = ("graph", "eager")
# batch sizes that vLLM captures by default (vllm:vllm/config, cudagraph_capture_sizes), up to 512
MAX_CAPTURED = 512
LAYER_KERNELS = 11  # of a dense layer whose host time was measured, attention of both kinds included


def captured_tokens(m: Any) -> Ints:
    """The captured batch size that m tokens are padded to: 1, 2, 4, multiples of 8 to 256, of 16 to 512.

    Larger batches aren't captured and keep their size.
    """
    m = np.asarray(m, dtype=np.int64)
    small = np.where(m <= 2, m, np.where(m <= 4, 4, ceil_div(m, 8) * 8))
    padded: Ints = np.where(m <= 256, small, np.where(m <= MAX_CAPTURED, ceil_div(m, 16) * 16, m))
    return padded


def layer_launches(terms: HostTerms, model: ModelSpec) -> HostTerms:
    """Host terms of a model whose layers have more kernels than a dense one's: routing, casts, norms of heads.

    Each takes the host as long as one of the measured layer, launched eagerly; pieces of a graph hold any number.
    """
    kernels = 2 + sum(operator.scope == "layer" for operator in linear_operators(model))
    if kernels <= LAYER_KERNELS:
        return terms
    return replace(terms, eager_layer_s=terms.eager_layer_s * kernels / LAYER_KERNELS)


def grid_tokens(m: Any) -> Ints:
    """The size at which linear layers are priced for m tokens: rounded up to multiples that grow with m.

    Multiples of 8 to 256, 16 to 512, 32 to 1024, 64 beyond (captured sizes are among them).

    GEMM time against tokens is a staircase, and the value of the next multiple up is nearer than a line
    (own fits to public tables: median 0.6-1.4 % for multiples of 32, against 1.4-1.6 % for lines).
    """
    m = np.asarray(m, dtype=np.int64)
    step = np.select([m <= 16, m <= 256, m <= 512, m <= 1024], [1, 8, 16, 32], default=64)
    grid: Ints = ceil_div(m, step) * step
    return grid


@dataclass(frozen=True)
class Launching:
    """Host time of steps under one launch mode: `graph` (full graphs for decode, piecewise ones for steps with
    a chunk, as vLLM v1 does by default) or `eager` (the host launches every kernel).

    `pads`: are batches padded to captured sizes, and larger ones launched eagerly? Otherwise each is captured as it is.
    """

    mode: str
    terms: HostTerms
    pads: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SimctlError(
                f"Unknown kernels.launch '{self.mode}'.{nearest(self.mode, MODES)} Use graph or eager."
            )

    def padded(self, m: Any, graph: bool) -> Ints:
        """Tokens that the linear layers compute for a batch of m."""
        padded = graph and self.pads and self.mode == "graph"
        return captured_tokens(m) if padded else np.asarray(m, dtype=np.int64)

    def captured(self, m: Any) -> Any:
        """Do the kernels between attention calls come from a graph, in steps of m tokens?"""
        small = np.asarray(m) <= (MAX_CAPTURED if self.pads else np.inf)
        return np.logical_and(self.mode == "graph", small)

    def host_s(self, sequences: Any, graph: bool, layers: int) -> Floats:
        """Host time that the GPU's work can overlap, for steps of so many sequences."""
        t = self.terms
        n = np.asarray(sequences, dtype=np.int64)
        piecewise = t.piecewise_base_s + layers * t.piecewise_layer_s
        if self.mode == "eager":
            base: Any = t.eager_base_s + layers * t.eager_layer_s
        elif graph:
            base = np.where(n <= MAX_CAPTURED, t.graph_base_s, piecewise)
        else:
            base = piecewise
        return np.asarray(base + t.per_sequence_s * n, dtype=np.float64)

    def gap_s(self, sequences: Any, graph: bool) -> Floats:
        """Time that overlaps with nothing, for steps of so many sequences."""
        t = self.terms
        base = t.gap_graph_s if graph and self.mode == "graph" else t.gap_eager_s
        return np.asarray(base + t.gap_per_sequence_s * np.asarray(sequences), dtype=np.float64)

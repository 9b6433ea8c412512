"""Grouped GEMMs of a mixture of experts (torch._grouped_mm), rows dealt to experts evenly or by popularity."""

from __future__ import annotations

from typing import Any

import numpy as np

from calib.arena import Arena
from calib.kernels.base import Kernel, relative_error
from calib.models import EXPERTS, ModelShape
from sim.errors import CalibrationError

ROLES = ("gate_up", "down")
DEALT, DRAWN = "dealt", "drawn"  # how rows come to experts: in proportion, or each token by its own draw
FP8 = "float8_e4m3"
DRAW_SEED = 17


def dealt(rows: int, experts: int, skew: float) -> list[int]:
    """Rows of each expert: shares fall as rank ** -skew (0: alike), largest remainders make up the total."""
    share = np.arange(1, experts + 1, dtype=float) ** -skew
    exact = rows * share / share.sum()
    counts = np.floor(exact).astype(int)
    for i in np.argsort(-(exact - counts), kind="stable")[: rows - int(counts.sum())]:
        counts[i] += 1
    return [int(count) for count in counts]


def drawn(m: int, experts: int, chosen: int, skew: float, seed: int = DRAW_SEED) -> list[int]:
    """Rows of each expert where each of `m` tokens draws `chosen` distinct ones with odds of rank ** -skew."""
    rng = np.random.default_rng([seed, m, experts])
    # the largest of log odds + Gumbel noise are draws without replacement
    noise = -np.log(-np.log(np.maximum(rng.random((m, experts)), 1e-300)))
    odds = -skew * np.log(np.arange(1, experts + 1, dtype=float))
    picked = np.argpartition(-(odds + noise), chosen - 1, axis=1)[:, :chosen]
    return [int(count) for count in np.bincount(picked.ravel(), minlength=experts)]


def rows_of(m: int, experts: int, chosen: int, skew: float, routing: str) -> list[int]:
    """Rows of each expert of a point of the sweeps."""
    if routing == DRAWN:
        return drawn(m, experts, chosen, skew)
    return dealt(m * chosen, experts, skew)


class GroupedGemm(Kernel):
    """All experts' `role` (gate_up or down) of one layer over `m` tokens, each of which goes to several experts."""

    kind = "moe"

    def __init__(
        self,
        model: ModelShape,
        experts_of: str,
        role: str,
        m: int,
        skew: float = 0.0,
        routing: str = DEALT,
        dtype: str = "bfloat16",
    ) -> None:
        if experts_of not in EXPERTS or role not in ROLES:
            raise CalibrationError(f"No experts '{experts_of}' with a layer '{role}' are known.")
        if routing not in (DEALT, DRAWN) or dtype not in ("bfloat16", FP8):
            raise CalibrationError(f"Experts are not timed with routing '{routing}' and type '{dtype}'.")
        shape = EXPERTS[experts_of]
        self.model, self.shape, self.role, self.m, self.skew = model, shape, role, m, skew
        self.routing, self.dtype = routing, dtype
        wide = 2 * shape.intermediate
        self.n, self.k = (wide, shape.hidden) if role == "gate_up" else (shape.hidden, shape.intermediate)
        self.label = f"{experts_of}/{role}"
        self.rows = rows_of(m, shape.experts, shape.chosen, skew, routing)
        total, active = sum(self.rows), sum(count > 0 for count in self.rows)
        size = 1.0 if dtype == FP8 else 2.0
        self.flops = 2.0 * total * self.n * self.k
        self.bytes = size * (total * self.k + active * self.n * self.k) + 2.0 * total * self.n

    def columns(self) -> dict[str, Any]:
        shape = {"m": self.m, "n": self.n, "k": self.k, "layers": 1}
        other = {"dtype": self.dtype} if self.dtype == FP8 else {}
        routing = {"routing": self.routing} if self.routing == DRAWN else {}
        return {**shape, "experts": self.shape.experts, "spread": self.skew, **routing, **other}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        torch, experts = arena.torch, self.shape.experts
        self._torch = torch
        total, size = sum(self.rows), experts * self.n * self.k
        self._x = arena.refresh(arena.scratch(slot, "gemm-in", (total, self.k)))
        self._ends = torch.cumsum(torch.tensor(self.rows), 0).to(device=arena.device, dtype=torch.int32)
        # the experts of one layer exceed the L2; two layers' worth in turn keep it cold
        flat = arena.scratch(0, "experts", (2 * size,))
        if self.dtype == FP8:
            flat = self._as_fp8(arena, flat, total)
        self._weights = [
            flat[i * size :][:size].view(experts, self.n, self.k).transpose(1, 2) for i in (0, 1)
        ]
        self.copies = 2

    def _as_fp8(self, arena: Arena, flat: Any, total: int) -> Any:
        """The weights in e4m3, the inputs too, and a scale for each row and each column of an expert."""
        torch, fp8 = arena.torch, arena.torch.float8_e4m3fn
        held = arena.scratch(0, "experts-fp8", (flat.numel(),), torch.uint8).view(fp8)
        for start in range(0, flat.numel(), 1 << 28):
            held[start : start + (1 << 28)].copy_(flat[start : start + (1 << 28)])
        self._x = self._x.to(fp8)
        ones = {"device": arena.device, "dtype": torch.float32}
        self._scale_x = torch.ones(total, **ones)
        self._scale_w = torch.ones((self.shape.experts, self.n), **ones)
        return held

    def run(self, i: int = 0) -> Any:
        weight = self._weights[i % 2]
        if self.dtype == FP8:
            return self._torch._scaled_grouped_mm(
                self._x,
                weight,
                self._scale_x,
                self._scale_w,
                offs=self._ends,
                out_dtype=self._torch.bfloat16,
                use_fast_accum=True,
            )
        return self._torch._grouped_mm(self._x, weight, offs=self._ends)

    def reference_error(self) -> float:
        torch, out = self._torch, self.run(0)
        expert = int(np.argmax(self.rows))
        end = sum(self.rows[: expert + 1])
        rows = slice(end - self.rows[expert], min(end, end - self.rows[expert] + 256))
        return relative_error(out[rows], torch.mm(self._x[rows].float(), self._weights[0][expert].float()))

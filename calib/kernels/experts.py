"""Grouped GEMMs of a mixture of experts (torch._grouped_mm), rows dealt to experts evenly or by popularity."""

from __future__ import annotations

from typing import Any

import numpy as np

from calib.arena import Arena
from calib.kernels.base import Kernel, relative_error
from calib.models import EXPERTS, ModelShape
from sim.errors import CalibrationError


def dealt(rows: int, experts: int, skew: float) -> list[int]:
    """Rows of each expert: shares fall as rank ** -skew (0: alike), largest remainders make up the total."""
    share = np.arange(1, experts + 1, dtype=float) ** -skew
    exact = rows * share / share.sum()
    counts = np.floor(exact).astype(int)
    for i in np.argsort(-(exact - counts), kind="stable")[: rows - int(counts.sum())]:
        counts[i] += 1
    return [int(count) for count in counts]


class GroupedGemm(Kernel):
    """All experts' `role` (gate_up or down) of one layer over `m` tokens, each of which goes to several experts."""

    kind = "moe"

    def __init__(self, model: ModelShape, experts_of: str, role: str, m: int, skew: float = 0.0) -> None:
        if experts_of not in EXPERTS or role not in ("gate_up", "down"):
            raise CalibrationError(f"No experts '{experts_of}' with a layer '{role}' are known.")
        shape = EXPERTS[experts_of]
        self.model, self.shape, self.role, self.m, self.skew = model, shape, role, m, skew
        wide = 2 * shape.intermediate
        self.n, self.k = (wide, shape.hidden) if role == "gate_up" else (shape.hidden, shape.intermediate)
        self.label = f"{experts_of}/{role}"
        self.rows = dealt(m * shape.chosen, shape.experts, skew)
        total, active = sum(self.rows), sum(count > 0 for count in self.rows)
        self.flops = 2.0 * total * self.n * self.k
        self.bytes = 2.0 * (total * (self.k + self.n) + active * self.n * self.k)

    def columns(self) -> dict[str, Any]:
        shape = {"m": self.m, "n": self.n, "k": self.k, "layers": 1}
        return {**shape, "experts": self.shape.experts, "spread": self.skew}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        torch, experts = arena.torch, self.shape.experts
        self._torch = torch
        total, size = sum(self.rows), experts * self.n * self.k
        self._x = arena.refresh(arena.scratch(slot, "gemm-in", (total, self.k)))
        self._ends = torch.cumsum(torch.tensor(self.rows), 0).to(device=arena.device, dtype=torch.int32)
        # the experts of one layer exceed the L2; two layers' worth in turn keep it cold
        flat = arena.scratch(0, "experts", (2 * size,))
        self._weights = [
            flat[i * size :][:size].view(experts, self.n, self.k).transpose(1, 2) for i in (0, 1)
        ]
        self.copies = 2

    def run(self, i: int = 0) -> Any:
        return self._torch._grouped_mm(self._x, self._weights[i % 2], offs=self._ends)

    def reference_error(self) -> float:
        torch, out = self._torch, self.run(0)
        expert = int(np.argmax(self.rows))
        end = sum(self.rows[: expert + 1])
        rows = slice(end - self.rows[expert], min(end, end - self.rows[expert] + 256))
        return relative_error(out[rows], torch.mm(self._x[rows].float(), self._weights[0][expert].float()))

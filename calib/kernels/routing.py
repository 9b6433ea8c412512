"""What surrounds the grouped GEMMs of experts, and the quantisation of inputs: kernels bound by bytes.

Plain PyTorch. Gathering and scattering rows are single kernels there as in engines; the choice of experts and the
dynamic scale are several, which engines fuse.
"""

from __future__ import annotations

from typing import Any

from calib.arena import Arena
from calib.kernels.base import Kernel, relative_error
from calib.models import EXPERTS, ModelShape
from sim.errors import CalibrationError

ROUTING = ("topk", "permute", "unpermute")
QUANTISE = ("static", "dynamic")


class Routing(Kernel):
    """`topk`: experts and weights of m tokens from router logits; `permute`: rows in the order of their experts;
    `unpermute`: each token's results, weighted and added up."""

    kind = "routing"

    def __init__(self, model: ModelShape, experts_of: str, label: str, m: int) -> None:
        if experts_of not in EXPERTS or label not in ROUTING:
            raise CalibrationError(f"No experts '{experts_of}' with a step '{label}' are known.")
        self.model, self.m, self.shape = model, m, EXPERTS[experts_of]
        self.label, self.step = f"{experts_of}/{label}", label
        rows, hidden = m * self.shape.chosen, self.shape.hidden
        self.bytes = {
            "topk": 2.0 * m * self.shape.experts + 12.0 * rows,
            "permute": 4.0 * rows * hidden,
            "unpermute": 2.0 * (rows + m) * hidden,
        }[label]
        self.launches = 1 if label == "permute" else 3

    def columns(self) -> dict[str, Any]:
        return {"m": self.m, "n": self.shape.hidden, "experts": self.shape.experts, "layers": 1}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        torch, shape = arena.torch, self.shape
        self._torch, rows = torch, self.m * shape.chosen
        generator = {"generator": arena.generator, "device": arena.device}
        if self.step == "topk":
            self._logits = arena.refresh(arena.scratch(slot, "router-logits", (self.m, shape.experts)))
            return
        self._x = arena.refresh(arena.scratch(slot, "moe-x", (self.m, shape.hidden)))
        self._many = arena.refresh(arena.scratch(slot, "moe-rows", (rows, shape.hidden)))
        order = torch.randperm(rows, **generator)
        self._source, self._place = order // shape.chosen, torch.argsort(order)
        self._weight = torch.rand((self.m, 1, shape.chosen), **generator).to(torch.bfloat16)

    def run(self, i: int = 0) -> Any:
        torch, shape = self._torch, self.shape
        if self.step == "topk":
            shares = torch.softmax(self._logits, dim=-1, dtype=torch.float32)
            values, picked = torch.topk(shares, shape.chosen, dim=-1, sorted=False)
            return values / values.sum(dim=-1, keepdim=True), picked
        if self.step == "permute":
            return torch.index_select(self._x, 0, self._source, out=self._many)
        back = torch.index_select(self._many, 0, self._place).view(self.m, shape.chosen, shape.hidden)
        return torch.bmm(self._weight, back)

    def reference_error(self) -> float:
        if self.step == "topk":
            values, _ = self.run()
            best = self._logits.float().softmax(dim=-1).sort(dim=-1, descending=True).values
            best = best[:, : self.shape.chosen]
            return relative_error(
                values.sort(dim=-1, descending=True).values, best / best.sum(-1, keepdim=True)
            )
        if self.step == "permute":
            return relative_error(self.run(), self._x[self._source])
        back = self._many[self._place].float().view(self.m, self.shape.chosen, -1)
        return relative_error(self.run()[:, 0], (self._weight[:, 0, :, None].float() * back).sum(dim=1))


class Quantise(Kernel):
    """Inputs [m, k] of an e4m3 linear layer from bf16: cast with a given scale (`static`), or with one a row that has
    to be found first (`dynamic`)."""

    kind = "quantise"

    def __init__(self, model: ModelShape, label: str, m: int, k: int) -> None:
        if label not in QUANTISE:
            raise CalibrationError(f"Inputs are quantised {' or '.join(QUANTISE)}, not '{label}'.")
        self.model, self.m, self.k, self.label = model, m, k, label
        self.bytes = 3.0 * m * k
        self.launches = 1 if label == "static" else 3

    def columns(self) -> dict[str, Any]:
        return {"m": self.m, "k": self.k, "layers": 1}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        torch = self._torch = arena.torch
        shape = (self.m, self.k)
        self._x = arena.refresh(arena.scratch(slot, "quantise-in", shape))
        self._scaled = arena.scratch(slot, "quantise-scaled", shape)
        self._out = arena.scratch(slot, "quantise-out", shape, torch.uint8).view(torch.float8_e4m3fn)

    def run(self, i: int = 0) -> Any:
        if self.label == "static":
            return self._out.copy_(self._x)
        largest = self._torch.linalg.vector_norm(self._x, float("inf"), dim=-1, keepdim=True)
        self._torch.mul(self._x, 448.0 / largest, out=self._scaled)
        return self._out.copy_(self._scaled)

    def reference_error(self) -> float:
        out = self.run().float()
        if self.label == "static":
            return relative_error(out, self._x) / 4.0  # e4m3 keeps three bits: 3 % where bf16 has 0.3 %
        largest = self._x.float().abs().amax(dim=-1, keepdim=True)
        return relative_error(out, self._x.float() * 448.0 / largest) / 4.0

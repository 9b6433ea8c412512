"""Linear layers through cuBLAS (torch.mm), weights going round the model's layers so that they come from HBM."""

from __future__ import annotations

from typing import Any

from calib.arena import Arena
from calib.kernels.base import Kernel, relative_error
from calib.models import ModelShape

# Tile edges are where the time steps: both sides of the multiples of 64 and 128 that decode and chunks meet,
# every 32 to 1024 and every 64 to 2048 (ceil-step tables need that, see docs of the GEMM curve), some beyond.
EDGES = (
    1,
    2,
    4,
    8,
    16,
    17,
    24,
    33,
    63,
    65,
    127,
    129,
    191,
    193,
    255,
    257,
    383,
    385,
    511,
    513,
    769,
    1023,
    1025,
)
M_FINE = tuple(range(32, 1025, 32)) + tuple(range(1088, 2049, 64))
M_LARGE = (2049, 2304, 2560, 3072, 3584, 4096, 4097, 5120, 6144, 7168, 8192)
M_AXIS = tuple(sorted({*EDGES, *M_FINE, *M_LARGE}))
HEAD_M_AXIS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 257, 320, 384, 448, 512)


class Gemm(Kernel):
    """out[m, n] = x[m, k] @ weight[n, k].T for one linear layer of a model, or for any (n, k) with role ""."""

    kind = "gemm"

    def __init__(self, model: ModelShape, role: str, m: int, n: int = 0, k: int = 0) -> None:
        self.model, self.role, self.m = model, role, m
        self.n, self.k = (n, k) if not role else model.linear(role)
        self.label = role or "custom"
        if role == "lm_head":
            self.kind = "lm_head"  # its own operator: weights of one matrix, rows are sequences
        self.flops = 2.0 * m * self.n * self.k
        self.bytes = 2.0 * (m * self.k + self.n * self.k + m * self.n)

    def columns(self) -> dict[str, Any]:
        return {"m": self.m, "n": self.n, "k": self.k, "layers": 1}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        self._torch = arena.torch
        self._x = arena.refresh(arena.scratch(slot, "gemm-in", (self.m, self.k)))
        self._out = arena.scratch(slot, "gemm-out", (self.m, self.n))
        if self.role and arena.linear(self.role, 0).shape == (self.n, self.k):
            count = 1 if self.role == "lm_head" else arena.layers
            self._weights = [arena.linear(self.role, i).t() for i in range(count)]
        else:
            self._weights = self._from_gate_up(arena)
        self.copies = len(self._weights)

    def _from_gate_up(self, arena: Arena) -> list[Any]:
        # a foreign (n, k) borrows the memory of the largest linear layers, as many as it has room for
        flats = [arena.linear("gate_up", i).view(-1) for i in range(arena.layers)]
        size = self.n * self.k
        if size <= flats[0].numel():
            return [flat[:size].view(self.n, self.k).t() for flat in flats]
        return [arena.scratch(0, "gemm-weight", (self.n, self.k)).t()]

    def run(self, i: int = 0) -> Any:
        return self._torch.mm(self._x, self._weights[i % self.copies], out=self._out)

    def reference_error(self) -> float:
        self._out.fill_(float("nan"))
        out = self.run(0)
        rows = slice(0, min(self.m, 256))
        return relative_error(out[rows], self._x[rows].float() @ self._weights[0].float())


class GemmFp8(Gemm):
    """The same with e4m3 operands, one scale a tensor and a bf16 result (torch._scaled_mm, as engines call it)."""

    kind = "gemm_fp8"

    def __init__(self, model: ModelShape, m: int, n: int, k: int) -> None:
        super().__init__(model, "", m, n, k)
        self.label = "fp8"
        self.bytes = 1.0 * (m * k + n * k) + 2.0 * m * n

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "dtype": "float8_e4m3"}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        torch = self._torch = arena.torch
        fp8 = torch.float8_e4m3fn
        x = arena.refresh(arena.scratch(slot, "gemm-in", (self.m, self.k)))
        self._x = x.to(fp8)
        self._out = arena.scratch(slot, "gemm-out", (self.m, self.n))
        self._weights = self._cut(arena)
        self._scale = torch.ones((), device=arena.device, dtype=torch.float32)
        self.copies = len(self._weights)

    def _cut(self, arena: Arena) -> list[Any]:
        # random e4m3 values once, and as many matrices of it as exceed the L2 three times
        torch, size = self._torch, self.n * self.k
        count = max(1, min(16, (192 << 20) // size))
        flat = arena.scratch(0, "gemm-fp8", (count * size,), torch.uint8).view(torch.float8_e4m3fn)
        flat.copy_(arena.draw((count * size,)))
        return [flat[i * size : (i + 1) * size].view(self.n, self.k).t() for i in range(count)]

    def run(self, i: int = 0) -> Any:
        return self._torch._scaled_mm(
            self._x,
            self._weights[i % self.copies],
            scale_a=self._scale,
            scale_b=self._scale,
            out_dtype=self._torch.bfloat16,
            use_fast_accum=True,
            out=self._out,
        )

"""Norm, RoPE, activation, KV write, sampling and a streaming read: the operators bound by bytes."""

from __future__ import annotations

from typing import Any

from calib.arena import Arena
from calib.kernels.base import Kernel, relative_error
from calib.kernels.ops import Append, TorchOps, ops_of
from calib.models import ModelShape

M_AXIS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROWS_AXIS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
READ_AXIS = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)


class _Rows(Kernel):
    def __init__(self, model: ModelShape, m: int) -> None:
        self.model, self.m = model, m

    def columns(self) -> dict[str, Any]:
        return {"m": self.m, "layers": 1}


class Norm(_Rows):
    """Residual add fused with RMSNorm, in place: what stands between every two linear blocks."""

    kind = "norm"

    def __init__(self, model: ModelShape, m: int) -> None:
        super().__init__(model, m)
        self.flops, self.bytes = 6.0 * m * model.hidden, 2.0 * (4 * m + 1) * model.hidden

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        self._ops, self._arena = ops_of(arena), arena
        self.label = self._ops.source["add_norm"]
        self._x = arena.refresh(arena.scratch(slot, "norm-x", (self.m, self.model.hidden)))
        self._residual = arena.refresh(arena.scratch(slot, "norm-residual", (self.m, self.model.hidden)))
        own = arena.final_norm.shape[0] == self.model.hidden
        self._weight = arena.final_norm if own else arena.scratch(slot, "norm-weight", (self.model.hidden,))

    def run(self, i: int = 0) -> Any:
        self._ops.add_norm(self._x, self._residual, self._weight)
        return self._x

    def reference_error(self) -> float:
        x, residual = self._x.float(), self._residual.float()
        TorchOps(self._arena.torch).add_norm(x, residual, self._weight.float())
        return relative_error(self.run(), x)


class Rope(_Rows):
    """Rotary embedding of queries and keys, in place, as slices of the fused QKV output."""

    kind = "rope"

    def __init__(self, model: ModelShape, m: int) -> None:
        super().__init__(model, m)
        width = (model.heads + model.kv_heads) * model.head_dim
        self.flops, self.bytes = 3.0 * m * width, 4.0 * m * width + 4.0 * m * model.head_dim

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        self._ops, self._arena = ops_of(arena), arena
        self.label = self._ops.source["rope"]
        self._q, self._k, _ = split_qkv(self.model, arena.refresh(qkv_buffer(arena, slot, self.m)))
        torch = arena.torch
        self._positions = torch.arange(self.m, device=arena.device, dtype=torch.int32) % 4096

    def run(self, i: int = 0) -> Any:
        self._ops.rope(self._positions, self._q, self._k, self._arena.rope_cache)
        return self._q

    def reference_error(self) -> float:
        q, k = self._q.float(), self._k.float()
        TorchOps(self._arena.torch).rope(self._positions, q, k, self._arena.rope_cache)
        out = self.run()
        return max(relative_error(out, q), relative_error(self._k, k))


class Activation(_Rows):
    """silu(gate) * up."""

    kind = "activation"

    def __init__(self, model: ModelShape, m: int) -> None:
        super().__init__(model, m)
        self.flops, self.bytes = 5.0 * m * model.intermediate, 6.0 * m * model.intermediate

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        self._ops, self._arena = ops_of(arena), arena
        self.label = self._ops.source["silu_mul"]
        self._in = arena.refresh(arena.scratch(slot, "act-in", (self.m, 2 * self.model.intermediate)))
        self._out = arena.scratch(slot, "act-out", (self.m, self.model.intermediate))

    def run(self, i: int = 0) -> Any:
        self._ops.silu_mul(self._in, self._out)
        return self._out

    def reference_error(self) -> float:
        expected = self._arena.torch.empty_like(self._out, dtype=self._arena.torch.float32)
        TorchOps(self._arena.torch).silu_mul(self._in.float(), expected)
        self._out.fill_(float("nan"))
        return relative_error(self.run(), expected)


class KvWrite(_Rows):
    """New keys and values of `m` tokens of one sequence into their pages."""

    kind = "kv_write"

    def __init__(self, model: ModelShape, m: int) -> None:
        super().__init__(model, m)
        self.bytes = 2.0 * m * model.kv_bytes_per_token

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        self._ops, self._arena = ops_of(arena), arena
        self.label = self._ops.source["append"]
        _, self._k, self._v = split_qkv(self.model, arena.refresh(qkv_buffer(arena, slot, self.m)))
        pages = arena.pages([self.m])
        self._where = Append(arena, pages, [self.m], [self.m])
        self._caches = [arena.cache(slot, i, pages) for i in range(pages.copies)]
        self.copies = pages.copies

    def run(self, i: int = 0) -> Any:
        self._ops.append(self._k, self._v, self._where, self._caches[i % self.copies])

    def reference_error(self) -> float:
        self.run(0)
        held = self._caches[0][self._where.indices.long()]
        k, v = (held[:, j].reshape(-1, *held.shape[3:])[: self.m] for j in (0, 1))
        return max(relative_error(k, self._k), relative_error(v, self._v))


class Sampling(_Rows):
    """Next tokens of `m` sequences from their logits: "greedy" (argmax) or "random" (Gumbel maximum)."""

    kind = "sampling"

    def __init__(self, model: ModelShape, m: int, label: str = "greedy") -> None:
        super().__init__(model, m)
        self.label = label
        self.flops, self.bytes = 1.0 * m * model.vocab, 2.0 * m * model.vocab

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        torch = self._torch = arena.torch
        self._logits = arena.refresh(arena.scratch(slot, "logits", (self.m, self.model.vocab)))
        self._out = arena.scratch(slot, "tokens", (self.m,), torch.int64)
        if self.label == "random":
            self._noise = arena.scratch(slot, "noise", (self.m, self.model.vocab), torch.float32)
            self._scores = arena.scratch(slot, "scores", (self.m, self.model.vocab), torch.float32)

    def run(self, i: int = 0) -> Any:
        if self.label == "greedy":
            return self._torch.argmax(self._logits, dim=-1, out=self._out)
        # softmax(x) / exponential noise has its maximum where a draw from softmax(x) would fall
        self._torch.softmax(self._logits, dim=-1, dtype=self._torch.float32, out=self._scores)
        self._scores.div_(self._noise.exponential_())
        return self._torch.argmax(self._scores, dim=-1, out=self._out)

    def reference_error(self) -> float:
        out = self.run()
        if self.label == "random":
            return 0.0 if bool(((out >= 0) & (out < self.model.vocab)).all()) else float("nan")
        picked = self._logits.gather(1, out[:, None])[:, 0].float()
        return relative_error(picked, self._logits.float().amax(dim=-1))


class StreamRead(Kernel):
    """Reads `size` bytes once, by our own kernel: the bandwidth that a set of SMs can draw."""

    kind = "stream_read"

    def __init__(self, model: ModelShape, size: int, ctas: int = 0) -> None:
        self.model, self.size, self.ctas = model, size, ctas
        self.bytes = float(size)

    def columns(self) -> dict[str, Any]:
        return {"layers": 1}

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        from calib import cuda

        self._arena, self._read = arena, cuda.read_words
        half = arena.kv.numel()  # bytes of a slot's half of the cache, whose elements have two bytes
        self.size = min(self.size, half // 4096 * 4096)
        self._base = arena.kv.data_ptr() + slot * half
        self.copies = max(1, min(16, half // self.size))
        self._sink = arena.scratch(slot, "sink", (4,), arena.torch.int32)
        self._ctas = self.ctas or 4 * arena.torch.cuda.get_device_properties(0).multi_processor_count

    def _launch(self, pointer: int, words: int, ctas: int, watched: int) -> None:
        stream = self._arena.torch.cuda.current_stream().cuda_stream
        self._read(stream, pointer, words, self._sink.data_ptr(), ctas, watched)

    def run(self, i: int = 0) -> Any:
        self._launch(self._base + (i % self.copies) * self.size, self.size // 16, self._ctas, 0)

    def reference_error(self) -> float:
        # one CTA reads one word a thread: the sink must show exactly the watched word's XOR
        torch = self._arena.torch
        words = self._arena.kv.view(-1)[: 8 * 512].view(torch.int32).view(512, 4).cpu()
        word = words[7]
        expected = int(word[0]) ^ int(word[1]) ^ int(word[2]) ^ int(word[3])
        self._sink.zero_()
        torch.cuda.synchronize()
        self._launch(self._arena.kv.data_ptr(), 512, 1, expected & 0xFFFFFFFF)
        torch.cuda.synchronize()
        return 0.0 if int(self._sink[0]) == expected else float("nan")


def qkv_buffer(arena: Arena, slot: int, m: int) -> Any:
    """Output buffer [m, n] of the fused QKV projection."""
    return arena.scratch(slot, "qkv", (m, arena.model.linear("qkv")[0]))


def split_qkv(model: ModelShape, qkv: Any) -> tuple[Any, Any, Any]:
    """Views q [m, heads, d], k and v [m, kv_heads, d] of the fused projection's output, without a copy."""
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    q, k, v = qkv.split([q_width, kv_width, kv_width], dim=-1)
    rows = qkv.shape[0]
    return (
        q.view(rows, model.heads, model.head_dim),
        k.view(rows, model.kv_heads, model.head_dim),
        v.view(rows, model.kv_heads, model.head_dim),
    )

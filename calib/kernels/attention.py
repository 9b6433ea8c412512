"""Prefill and decode attention over a paged KV cache: FlashInfer FA2 and FA3, or PyTorch's SDPA without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calib.arena import PAGE, Arena, Pages
from calib.kernels.base import Kernel, joined, relative_error
from calib.models import ModelShape
from sim.errors import CalibrationError

Q_AXIS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
H_AXIS = (0, 256, 1024, 2048, 4096, 8192, 16384, 32768)
BATCH_AXIS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
CONTEXT_AXIS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BACKENDS = ("fa2", "fa3", "sdpa")


def sdpa(torch: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention of q [q, heads, d] on k, v [kv, kv_heads, d], causal aligned to the end of the keys."""
    from torch.nn.attention.bias import causal_lower_right

    heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    bias = causal_lower_right(q.shape[0], k.shape[0]) if causal else None
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads, attn_mask=bias, enable_gqa=True)[0].transpose(0, 1)


def reference(torch: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """The same in float32, written out: scores, mask, softmax, weighted sum."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.arange(k.shape[0], device=q.device) > rows, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


class _Paged(Kernel):
    """Shared by both phases: sequences of `contexts` tokens in pages, `q_lens` query rows each, `q` and `out`."""

    def __init__(
        self,
        model: ModelShape,
        contexts: Sequence[int],
        q_lens: Sequence[int],
        backend: str,
        dtype: str = "bfloat16",
    ) -> None:
        if backend not in BACKENDS:
            raise CalibrationError(f"Attention back end '{backend}' is not one of {', '.join(BACKENDS)}.")
        self.model, self.contexts, self.q_lens, self.backend = model, list(contexts), list(q_lens), backend
        self.tokens = sum(q_lens)
        self.label, self.dtype = backend, dtype
        pairs = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(q_lens, contexts, strict=True))
        self.flops = 4.0 * model.heads * model.head_dim * pairs
        q_bytes = 4.0 * self.tokens * model.heads * model.head_dim  # query in, output out, bf16
        self.bytes = q_bytes + float(sum(contexts)) * model.kv_bytes_per_token

    def bind(self, arena: Arena, slot: int, q: Any, out: Any) -> None:
        """Use `q` and `out` [tokens, heads, d] of the caller (a layer); the plan must have been made."""
        self._arena, self._slot, self._q, self._out = arena, slot, q, out

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        arena = arena.viewed(self.model, self.dtype)
        shape = (self.tokens, self.model.heads, self.model.head_dim)
        q = arena.refresh(arena.scratch(slot, f"{self.kind}-q", shape))
        self.bind(arena, slot, q, arena.scratch(slot, f"{self.kind}-out", shape))
        self.plan(arena, slot, padded)

    def plan(self, arena: Arena, slot: int, padded: bool, pages: Pages | None = None) -> None:
        """Lay out pages and, with FlashInfer, plan the kernel: host work that a server does once a step."""
        self.pages = pages or arena.pages(self.contexts)
        self.copies = self.pages.copies
        self._caches = [arena.cache(slot, i, self.pages) for i in range(self.copies)]
        if self.backend == "sdpa":
            self._plan_sdpa(arena)
            return
        if arena.flashinfer is None:
            raise CalibrationError(
                f"Attention back end '{self.backend}' needs FlashInfer, which is not installed."
            )
        self._plan_flashinfer(arena, slot, padded)

    def _plan_flashinfer(self, arena: Arena, slot: int, padded: bool) -> None:
        raise NotImplementedError

    def _plan_sdpa(self, arena: Arena) -> None:
        # SDPA knows no pages: contiguous keys and values, one pair per sequence, out of the same cache
        model, self._dense = self.model, []
        for cache in self._caches:
            flat, start, dense = cache.view(-1), 0, []
            for tokens in self.contexts:
                size = tokens * model.kv_heads * model.head_dim
                shape = (tokens, model.kv_heads, model.head_dim)
                dense.append(
                    (flat[start : start + size].view(shape), flat[start + size :][:size].view(shape))
                )
                start += 2 * size
            self._dense.append(dense)

    def run(self, i: int = 0) -> Any:
        if self.backend != "sdpa":
            return self._wrapper.run(self._q, self._caches[i % self.copies], out=self._out, enable_pdl=False)
        start = 0
        for q_len, (k, v) in zip(self.q_lens, self._dense[i % self.copies], strict=True):
            rows = slice(start, start + q_len)
            self._out[rows] = sdpa(self._arena.torch, self._q[rows], k, v, causal=q_len > 1)
            start += q_len
        return self._out

    def gathered(self, sequence: int, layer: int = 0) -> tuple[Any, Any]:
        """Keys and values [tokens, kv_heads, d] of one sequence, read through the page table."""
        if self.backend == "sdpa":
            return self._dense[layer % self.copies][sequence]
        first, last = (int(x) for x in self.pages.indptr[sequence : sequence + 2])
        held = self._caches[layer % self.copies][self.pages.indices[first:last].long()]
        tokens = self.contexts[sequence]
        k, v = (held[:, j].reshape(-1, *held.shape[3:])[:tokens] for j in (0, 1))
        return k, v

    def reference_error(self) -> float:
        self._out.fill_(float("nan"))
        return relative_error(self.run(0), self.expected(self._q))

    def expected(self, q: Any, layer: int = 0) -> Any:
        """The attention of `q` in float32, on what the cache of `layer` holds now."""
        start, parts = 0, []
        for i, q_len in enumerate(self.q_lens):
            k, v = self.gathered(i, layer)
            parts.append(reference(self._arena.torch, q[start : start + q_len], k, v, q_len > 1))
            start += q_len
        return self._arena.torch.cat(parts)


class PrefillAttention(_Paged):
    """Causal attention of chunks of `q_lens` new tokens on `histories` tokens that are in the cache already."""

    kind = "prefill_attention"

    def __init__(
        self,
        model: ModelShape,
        q_lens: Sequence[int],
        histories: Sequence[int],
        backend: str = "fa3",
        dtype: str = "bfloat16",
    ) -> None:
        contexts = [q + h for q, h in zip(q_lens, histories, strict=True)]
        super().__init__(model, contexts, q_lens, backend, dtype)
        self.histories = list(histories)

    def columns(self) -> dict[str, Any]:
        return {
            "m": self.tokens,
            "q_tokens": joined(self.q_lens),
            "history_tokens": joined(self.histories),
            "attention": self.backend,
            "layers": 1,
        }

    def _plan_flashinfer(self, arena: Arena, slot: int, padded: bool) -> None:
        torch, model = arena.torch, self.model
        self._wrapper = arena.prefill_wrapper(slot, self.backend)
        indptr = torch.zeros(len(self.q_lens) + 1, dtype=torch.int32)
        indptr[1:] = torch.cumsum(torch.tensor(self.q_lens), 0)
        self._wrapper.plan(
            indptr,
            self.pages.indptr,
            self.pages.indices,
            self.pages.last_page_len,
            model.heads,
            model.kv_heads,
            model.head_dim,
            PAGE,
            causal=True,
            q_data_type=getattr(torch, self.dtype),
            kv_data_type=getattr(torch, self.dtype),
        )


class DecodeAttention(_Paged):
    """One query token for each sequence of `contexts` tokens (the new token included)."""

    kind = "decode_attention"

    def __init__(
        self, model: ModelShape, contexts: Sequence[int], backend: str = "fa2", dtype: str = "bfloat16"
    ) -> None:
        super().__init__(model, contexts, [1] * len(contexts), backend, dtype)

    def columns(self) -> dict[str, Any]:
        return {**context_columns(self.contexts), "m": self.tokens, "attention": self.backend, "layers": 1}

    def _plan_flashinfer(self, arena: Arena, slot: int, padded: bool) -> None:
        torch, model = arena.torch, self.model
        if self.backend != "fa2":
            raise CalibrationError(
                "Decode attention is measured with FlashInfer's tensor-core FA2 kernel only."
            )
        self._wrapper = arena.decode_wrapper(slot, self.tokens, padded)
        self._wrapper.plan(
            self.pages.indptr,
            self.pages.indices,
            self.pages.last_page_len,
            model.heads,
            model.kv_heads,
            model.head_dim,
            PAGE,
            q_data_type=getattr(torch, self.dtype),
            kv_data_type=getattr(torch, self.dtype),
        )


def context_columns(contexts: Sequence[int]) -> dict[str, Any]:
    """Batch size, sum, mean and maximum of the contexts, and the list where they differ."""
    total = sum(contexts)
    return {
        "decode_batch": len(contexts),
        "context_sum": total,
        "context_mean": total / len(contexts) if len(contexts) else 0.0,
        "context_max": max(contexts, default=0),
        "decode_contexts": joined(contexts) if len(set(contexts)) > 1 else "",
    }

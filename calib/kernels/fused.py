"""Attention of a mixed batch: chunks beside a decode batch, fused by FlashInfer's POD, or as engines do it without.

`serial_fa2`, `serial_fa3`: prefill, then decode; `batched`: one FA2 prefill call over chunks and decode rows;
`streams`, `streams_fa3`: both at once on two streams; `pod`: one contiguous chunk beside paged decodes, launched
from a filled queue (it clears its tickets by a call on the default stream); `batch_pod`: paged chunks beside paged
decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calib.arena import PAGE, Arena, Pages
from calib.kernels.attention import DecodeAttention, PrefillAttention, context_columns
from calib.kernels.base import Kernel, joined, relative_error
from calib.models import ModelShape
from sim.errors import CalibrationError

VARIANTS = ("serial_fa2", "serial_fa3", "batched", "streams", "streams_fa3", "pod", "batch_pod")
FUSED = ("pod", "batch_pod")


class MixedAttention(Kernel):
    """Chunks of `q_lens` new tokens on `histories` beside one query row for each of `contexts`, by `variant`."""

    kind = "fused_attention"
    launches = 2

    def __init__(
        self,
        model: ModelShape,
        q_lens: Sequence[int],
        histories: Sequence[int],
        contexts: Sequence[int],
        variant: str,
        dtype: str = "bfloat16",
    ) -> None:
        if variant not in VARIANTS:
            raise CalibrationError(f"Mixed attention '{variant}' is not one of {', '.join(VARIANTS)}.")
        if not q_lens or not contexts:
            raise CalibrationError("Mixed attention needs a chunk and a decode batch.")
        if variant == "pod" and len(q_lens) > 1:
            raise CalibrationError("POD's wrapper takes one chunk; several need batch_pod.")
        self.model, self.variant, self.label, self.dtype = model, variant, variant, dtype
        self.q_lens, self.histories, self.contexts = list(q_lens), list(histories), list(contexts)
        backend = "fa3" if variant.endswith("fa3") else "sdpa" if variant == "pod" else "fa2"
        self._prefill = PrefillAttention(model, q_lens, histories, backend, dtype)
        self._decode = DecodeAttention(model, contexts, "fa2", dtype)
        self.m = self._prefill.tokens + self._decode.tokens
        self.flops = self._prefill.flops + self._decode.flops
        self.bytes = self._prefill.bytes + self._decode.bytes

    @property
    def launch(self) -> str:
        """How `calib.lab` can launch it: as a graph, or POD's single-chunk wrapper from a filled queue."""
        return "queued" if self.variant == "pod" else "graph"

    def columns(self) -> dict[str, Any]:
        return {
            "m": self.m,
            "q_tokens": joined(self.q_lens),
            "history_tokens": joined(self.histories),
            **context_columns(self.contexts),
            "attention": self.variant,
            "dtype": "" if self.dtype == "bfloat16" else self.dtype,
            "layers": 1,
        }

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        arena = arena.viewed(self.model, self.dtype)
        self._torch = arena.torch
        shape = (self.m, self.model.heads, self.model.head_dim)
        self._q = arena.refresh(arena.scratch(slot, "mixed-q", shape))
        self._out = arena.scratch(slot, "mixed-out", shape)
        whole = arena.pages([q + h for q, h in zip(self.q_lens, self.histories, strict=True)] + self.contexts)
        self.copies = whole.copies
        chunks = len(self.q_lens)
        parts = (whole.part(0, chunks), whole.part(chunks, chunks + len(self.contexts)))
        self._parts = parts
        self._caches = [arena.cache(slot, i, whole) for i in range(self.copies)]
        if self.variant == "batched":
            self._plan_batched(arena, slot, whole)
        elif self.variant == "batch_pod":
            self._bind(arena, slot)
            self._plan_batch_pod(arena, slot, parts)
        else:
            self._bind(arena, slot)
            # POD reads contiguous keys: out of the other slot's half, so that no page is read twice
            self._prefill.plan(arena, 1 - slot if self.variant == "pod" else slot, False, parts[0])
            # engines do not capture mixed steps, so decode is planned as for eager launches
            self._decode.plan(arena, slot, False, parts[1])
        if self.variant == "pod":
            self._plan_pod(arena, slot, parts[1])
        if self.variant.startswith("streams"):
            self._side = arena.side_stream()

    def _bind(self, arena: Arena, slot: int) -> None:
        rows = self._prefill.tokens
        self._prefill.bind(arena, slot, self._q[:rows], self._out[:rows])
        self._decode.bind(arena, slot, self._q[rows:], self._out[rows:])

    def _plan_batched(self, arena: Arena, slot: int, pages: Pages) -> None:
        ones = [1] * len(self.contexts)
        past = [context - 1 for context in self.contexts]
        self._all = PrefillAttention(self.model, self.q_lens + ones, self.histories + past, "fa2", self.dtype)
        self._all.bind(arena, slot, self._q, self._out)
        self._all.plan(arena, slot, False, pages)

    def _plan_pod(self, arena: Arena, slot: int, pages: Pages) -> None:
        self._wrapper = arena.pod_wrapper(slot, False)
        self._wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            self.model.heads,
            self.model.kv_heads,
            self.model.head_dim,
            PAGE,
            q_data_type=self._q.dtype,
            kv_data_type=self._q.dtype,
        )

    def _plan_batch_pod(self, arena: Arena, slot: int, parts: tuple[Pages, Pages]) -> None:
        torch = arena.torch
        starts = torch.zeros(len(self.q_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum(torch.tensor(self.q_lens), 0)
        ones = torch.arange(len(self.contexts) + 1, dtype=torch.int32)
        self._wrapper = arena.pod_wrapper(slot, True)
        self._wrapper.plan(
            *(starts, parts[0].indptr, parts[0].indices, parts[0].last_page_len),
            *(ones, parts[1].indptr, parts[1].indices, parts[1].last_page_len),
            self.model.heads,
            self.model.kv_heads,
            self.model.head_dim,
            PAGE,
            q_data_type=self._q.dtype,
            kv_data_type=self._q.dtype,
        )

    def run(self, i: int = 0) -> Any:
        rows, cache = self._prefill.tokens, self._caches[i % self.copies]
        if self.variant == "batched":
            return self._all.run(i)
        if self.variant == "pod":
            k, v = self._prefill.gathered(0, i)
            return self._wrapper.run(
                self._q[:rows], k, v, self._q[rows:], cache, causal_p=True, enable_pdl=False
            )
        if self.variant == "batch_pod":
            return self._wrapper.run(
                self._q[:rows], cache, self._q[rows:], cache, causal_p=True, enable_pdl=False
            )
        if self.variant.startswith("streams"):
            return self._both(i)
        self._prefill.run(i)
        self._decode.run(i)
        return self._out

    def _both(self, i: int) -> Any:
        # captured as two branches of a graph
        torch = self._torch
        stream = torch.cuda.current_stream()
        self._side.wait_stream(stream)
        self._prefill.run(i)
        with torch.cuda.stream(self._side):
            self._decode.run(i)
        stream.wait_stream(self._side)
        return self._out

    def reference_error(self, out: Any = None) -> float:
        if out is None:
            self._out.fill_(float("nan"))
            out = self.run(0)
        out = self._torch.cat(out) if isinstance(out, tuple) else out
        if self.variant == "batched":
            return relative_error(out, self._all.expected(self._q))
        if self.variant == "batch_pod":
            self._gather()
        rows = self._prefill.tokens
        expected = [self._prefill.expected(self._q[:rows]), self._decode.expected(self._q[rows:])]
        return relative_error(out, self._torch.cat(expected))

    def _gather(self) -> None:
        """Give both parts the pages that the fused kernel was planned with, for their references."""
        for part, pages in zip((self._prefill, self._decode), self._parts, strict=True):
            part.pages, part._caches, part.copies = pages, self._caches, self.copies

"""Attention of a mixed batch over the executor's paged KV cache: FlashInfer, or PyTorch where it is absent."""

from __future__ import annotations

from typing import Any

from calib.arena import PAGE
from calib.executor.batch import Batch
from calib.executor.forward import Forward
from calib.kernels.attention import sdpa


class SerialAttention:
    """Prompt chunks by the paged prefill kernel, then decodes by the paged tensor-core kernel."""

    def __init__(self, forward: Forward, backend: str) -> None:
        self._forward, self._backend = forward, backend
        self._batch: Batch
        self._decodes: Any = None
        self._prefill: Any = None

    def plan(self, batch: Batch, padded_decodes: int = 0) -> None:
        """Plan both kernels for the batch, whose tables have been sent already."""
        arena, slot = self._forward.arena, self._forward.slot
        torch, model, chunks = arena.torch, arena.model, batch.chunks
        self._batch = batch
        self._prompt_rows = sum(batch.q_lens[:chunks])
        self._decode_rows = padded_decodes or len(batch.q_lens) - chunks
        indptr, last = torch.from_numpy(batch.indptr), torch.from_numpy(batch.last_page_len)
        shape = (model.heads, model.kv_heads, model.head_dim, PAGE)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        if chunks:
            rows = torch.zeros(chunks + 1, dtype=torch.int32)
            rows[1:] = torch.cumsum(torch.tensor(batch.q_lens[:chunks]), 0)
            pages = self._forward.tables.view("indices", int(indptr[chunks]))
            self._prefill = arena.prefill_wrapper(slot, self._backend)
            self._prefill.plan(rows, indptr[: chunks + 1], pages, last[:chunks], *shape, causal=True, **types)
        if self._decode_rows:
            first = int(indptr[chunks])
            own = indptr[chunks : len(batch.q_lens) + 1] - first
            own_last = last[chunks : len(batch.q_lens)]
            pages = self._forward.tables.view("indices", len(batch.indices))[first:]
            extra = padded_decodes - (len(batch.q_lens) - chunks) if padded_decodes else 0
            if extra:
                # padded sequences read the one page that the batch's own padding holds
                spare = torch.zeros(extra, dtype=torch.int32, device=arena.device)
                pages = torch.cat([pages[: int(own[-1])], spare])
                own = torch.cat([own, own[-1] + torch.arange(1, extra + 1, dtype=torch.int32)])
                own_last = torch.cat([own_last, torch.ones(extra, dtype=torch.int32)])
            else:
                pages = pages[: int(own[-1])]
            self._decodes = arena.decode_wrapper(slot, self._decode_rows, padded_decodes > 0)
            self._decodes.plan(own, pages, own_last, *shape, **types)

    def run(self, layer: int, q: Any, out: Any) -> None:
        """Attention of the rows of q into out, on the current stream."""
        cache, rows = self._forward.caches[layer], self._prompt_rows
        if rows:
            self._prefill.run(q[:rows], cache, out=out[:rows], enable_pdl=False)
        if self._decode_rows:
            mine = slice(rows, rows + self._decode_rows)
            self._decodes.run(q[mine], cache, out=out[mine], enable_pdl=False)


class GatheredAttention:
    """The same through PyTorch's SDPA on keys and values gathered page by page: slow, for tests and references."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def plan(self, batch: Batch, padded_decodes: int = 0) -> None:
        """Nothing to plan."""
        self._batch = batch

    def run(self, layer: int, q: Any, out: Any) -> None:
        """Attention sequence by sequence."""
        batch, torch, start = self._batch, self._forward.torch, 0
        for n, (rows, context) in enumerate(zip(batch.q_lens, batch.contexts, strict=True)):
            pages = torch.from_numpy(batch.indices[batch.indptr[n] : batch.indptr[n + 1]]).long()
            held = self._forward.caches[layer][pages.to(q.device)]
            k, v = (held[:, j].reshape(-1, *held.shape[3:])[:context] for j in (0, 1))
            out[start : start + rows] = sdpa(torch, q[start : start + rows], k, v, causal=True)
            start += rows

"""Attention of a mixed batch over the executor's paged KV cache: FlashInfer, or PyTorch where it is absent."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from calib.arena import PAGE
from calib.executor.batch import Batch
from calib.executor.direct import Cache, Call, noted
from calib.executor.forward import Forward
from calib.executor.modes import BATCH_POD
from calib.kernels.attention import sdpa

Run = Callable[[Cache], Any]


class PagedAttention:
    """Prompt chunks by the paged prefill kernel and then decodes by the paged tensor-core kernel, or both in one.

    `backend`: prefill's, fa2 or fa3; `fused`: the kernel of fused steps (`calib.executor.modes`).
    """

    def __init__(self, forward: Forward, backend: str, fused: str = "") -> None:
        self._forward, self._backend, self.fused = forward, backend, fused
        model = forward.arena.model
        self._shape = (model.heads, model.kv_heads, model.head_dim, PAGE)
        bf16 = forward.torch.bfloat16
        self._types = {"q_data_type": bf16, "kv_data_type": bf16}
        self._parts: list[Callable[[Any, Any, Cache], Run]] = []
        self._runs: list[Run] | None = None
        _cheap_maxima(forward.arena)

    def plan(self, batch: Batch, padded_decodes: int = 0, fused: bool = False) -> None:
        """Plan the kernels for the batch, whose tables have been sent already.

        `padded_decodes`: a batch of decodes alone that a graph of this size runs, padded to it.
        """
        self._parts, self._runs = [], None
        chunks = batch.chunks
        if fused and self.fused == BATCH_POD:
            self._parts.append(self._plan_pod(batch))
        elif fused:
            self._parts.append(self._plan_prefill(batch, len(batch.q_lens), "fa2"))
        else:
            if chunks:
                self._parts.append(self._plan_prefill(batch, chunks, self._backend))
            if padded_decodes or len(batch.q_lens) > chunks:
                self._parts.append(self._plan_decodes(batch, padded_decodes))

    def run(self, layer: int, q: Any, out: Any) -> None:
        """Attention of the rows of q into out, on the current stream; both are the same for all layers of a pass."""
        cache = self._forward.pairs[layer]
        if self._runs is None:
            self._runs = [part(q, out, cache) for part in self._parts]
        for run in self._runs:
            run(cache)

    def _table(self, batch: Batch, first: int, last: int) -> tuple[Any, Any, Any]:
        """indptr (host), indices (device) and last_page_len (host) of sequences first..last-1."""
        torch = self._forward.torch
        indptr = torch.from_numpy(batch.indptr[first : last + 1] - batch.indptr[first])
        pages = self._forward.tables.view("indices", int(batch.indptr[last]))[int(batch.indptr[first]) :]
        return indptr, pages, torch.from_numpy(batch.last_page_len[first:last])

    def _starts(self, batch: Batch, sequences: int) -> Any:
        torch = self._forward.torch
        rows = torch.zeros(sequences + 1, dtype=torch.int32)
        rows[1:] = torch.cumsum(torch.tensor(batch.q_lens[:sequences]), 0)
        return rows

    def _plan_prefill(self, batch: Batch, sequences: int, backend: str) -> Callable[[Any, Any, Cache], Run]:
        arena, slot = self._forward.arena, self._forward.slot
        wrapper, rows = arena.prefill_wrapper(slot, backend), sum(batch.q_lens[:sequences])
        table = self._table(batch, 0, sequences)
        wrapper.plan(self._starts(batch, sequences), *table, *self._shape, causal=True, **self._types)
        return lambda q, out, cache: _bound(wrapper, q[:rows], out[:rows], cache)

    def _plan_decodes(self, batch: Batch, padded: int) -> Callable[[Any, Any, Cache], Run]:
        arena, slot, first = self._forward.arena, self._forward.slot, batch.chunks
        last = padded or len(batch.q_lens)
        wrapper = arena.decode_wrapper(slot, last - first, padded > 0)
        wrapper.plan(*self._table(batch, first, last), *self._shape, **self._types)
        start = sum(batch.q_lens[:first])
        mine = slice(start, start + last - first)
        return lambda q, out, cache: _bound(wrapper, q[mine], out[mine], cache)

    def _plan_pod(self, batch: Batch) -> Callable[[Any, Any, Cache], Run]:
        arena, slot, torch = self._forward.arena, self._forward.slot, self._forward.torch
        wrapper, chunks, last = arena.pod_wrapper(slot, True), batch.chunks, len(batch.q_lens)
        ones = torch.arange(last - chunks + 1, dtype=torch.int32)
        wrapper.plan(
            *(self._starts(batch, chunks), *self._table(batch, 0, chunks)),
            *(ones, *self._table(batch, chunks, last)),
            *self._shape,
            **self._types,
        )
        rows, ends = sum(batch.q_lens[:chunks]), sum(batch.q_lens)

        def part(q: Any, out: Any, cache: Cache) -> Run:
            return _bound_pod(wrapper, q[:rows], q[rows:ends], out[:rows], out[rows:ends], cache)

        return part


def _bound(wrapper: Any, q: Any, out: Any, cache: Cache) -> Run:
    """The kernel of a prefill or decode wrapper, for any layer's cache."""
    module = wrapper._cached_module
    try:
        args, _ = noted(
            wrapper, "_cached_module", "paged_run", lambda: wrapper.run(q, cache, out=out, enable_pdl=False)
        )
        return Call(module.paged_run, args, cache)
    except (LookupError, AttributeError):
        return lambda cache: wrapper.run(q, cache, out=out, enable_pdl=False)


def _bound_pod(wrapper: Any, q_p: Any, q_d: Any, out_p: Any, out_d: Any, cache: Cache) -> Run:
    """BatchPOD's kernel, which writes where its wrapper would have allocated."""
    library = sys.modules[type(wrapper).__module__]
    found: list[Any] = []
    real = library.get_batch_pod_module

    def getter(*key: Any) -> Any:
        found.append(real(*key))
        return SimpleNamespace(run_tensor=lambda *args: found.append(args))

    library.get_batch_pod_module = getter
    try:
        made = wrapper.run(q_p, cache, q_d, cache, causal_p=True, enable_pdl=False)
    finally:
        library.get_batch_pod_module = real
    module, args = found
    call = Call(module.run_tensor, args, cache)
    for old, new in zip(made, (out_p, out_d), strict=True):
        call.put(old, new)
    return call


def _cheap_maxima(arena: Any) -> None:
    """Let FlashInfer's planning take the maximum of a tensor at once: Python's own looks at one element after another,
    several microseconds each."""
    if arena.flashinfer is None:
        return

    def largest(first: Any, *more: Any, **options: Any) -> Any:
        whole = isinstance(first, arena.torch.Tensor) and not more
        return first.max() if whole else builtins.max(first, *more, **options)

    for name in ("decode", "prefill"):
        module = sys.modules.get(f"{arena.flashinfer.__name__}.{name}")
        if module is not None:
            module.max = largest  # type: ignore[attr-defined]


class GatheredAttention:
    """The same through PyTorch's SDPA on keys and values gathered page by page: slow, for tests and references."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def plan(self, batch: Batch, padded_decodes: int = 0, fused: bool = False) -> None:
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

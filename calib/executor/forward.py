"""A decoder's forward pass over a batch, in pieces between which attention is launched.

Piece 0 embeds and projects layer 0's queries, keys and values; piece l ends layer l - 1 behind its attention and
projects layer l's; the last piece ends with the final norm. A piece reads and writes fixed buffers only, so it can be
a CUDA graph; attention reads the page tables of the step.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from calib.arena import Arena
from calib.executor.batch import Batch
from calib.kernels.elementwise import qkv_buffer, split_qkv
from calib.kernels.ops import ops_of


class Tables:
    """A batch's int32 tables on the device, at fixed addresses and sent in one copy."""

    def __init__(self, arena: Arena, slot: int, rows: int, sequences: int, pages: int) -> None:
        torch = arena.torch
        sizes = {
            "ids": rows,
            "positions": rows,
            "sequence": rows,
            "indptr": sequences + 2,
            "last_page_len": sequences + 1,  # one for padding
            "ends": sequences,
            "indices": pages,
        }
        total = sum(sizes.values())
        self._device = arena.scratch(slot, "tables", (total,), torch.int32)
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=arena.device == "cuda")
        self._at, start = {}, 0
        for name, size in sizes.items():
            self._at[name] = (start, size)
            start += size

    def send(self, batch: Batch) -> None:
        """Copy the batch's tables to the device on the current stream."""
        last = 0
        host = self._host.numpy()
        for name, (start, size) in self._at.items():
            values = getattr(batch, name)
            if len(values) > size:
                raise ValueError(f"table '{name}' holds {size} entries and the batch has {len(values)}")
            host[start : start + len(values)] = values
            last = start + len(values)
        self._device[:last].copy_(self._host[:last], non_blocking=True)

    def view(self, name: str, count: int) -> Any:
        """The first `count` entries of a table on the device."""
        start, _ = self._at[name]
        return self._device[start : start + count]


class Where:
    """Where `append` writes: views of the tables, as `calib.kernels.ops.Append` has them."""

    def __init__(self, tables: Tables, rows: int, sequences: int, pages: int) -> None:
        self.positions = tables.view("positions", rows)
        self.sequence = tables.view("sequence", rows)
        self.indptr = tables.view("indptr", sequences + 1)
        self.last_page_len = tables.view("last_page_len", sequences)
        self.indices = tables.view("indices", pages)


class Forward:
    """Buffers of one lane for up to `rows` rows, `sequences` sequences and `pages` pages of KV a step."""

    def __init__(self, arena: Arena, slot: int, rows: int, sequences: int, pages: int) -> None:
        model, torch = arena.model, arena.torch
        self.arena, self.slot, self.torch, self.ops = arena, slot, torch, ops_of(arena)
        self.tables = Tables(arena, slot, rows, sequences, pages)
        self.layers = arena.layers
        self._limits = (rows, sequences, pages)
        self._refused: set[tuple[int, int, int]] = set()  # products in halves: stream, rows, columns
        self.hidden = arena.scratch(slot, "hidden", (rows, model.hidden))
        self.residual = arena.scratch(slot, "residual", (rows, model.hidden))
        self._qkv = qkv_buffer(arena, slot, rows)
        self.attention = arena.scratch(slot, "attention", (rows, model.heads, model.head_dim))
        self._gate_up = arena.scratch(slot, "gate-up", (rows, 2 * model.intermediate))
        self._act = arena.scratch(slot, "act", (rows, model.intermediate))
        self._last = arena.scratch(slot, "last", (sequences, model.hidden))
        self.logits = arena.scratch(slot, "logits", (sequences, model.vocab))
        self.tokens = arena.scratch(slot, "tokens", (sequences,), torch.int64)
        region = arena.kv.shape[0] // self.layers
        self.caches = [arena.kv[layer * region : (layer + 1) * region] for layer in range(self.layers)]
        self.pairs = [(cache[:, 0], cache[:, 1]) for cache in self.caches]  # keys and values

    def q(self, rows: int) -> Any:
        """Queries [rows, heads, d] of the layer whose attention is next."""
        return split_qkv(self.arena.model, self._qkv[:rows])[0]

    def mm(self, rows: Any, weight: Any, out: Any) -> None:
        """out = rows @ weight.T; in halves where cuBLAS picks a kernel that the SM set cannot hold.

        Clusters of CTAs larger than a set of few SMs leaves room for cannot start: CUBLAS_STATUS_EXECUTION_FAILED.
        """
        refused = self._refused and self._key(rows, weight) in self._refused
        if not refused:
            try:
                self.torch.mm(rows, weight.t(), out=out)
                return
            except RuntimeError as error:
                if "CUBLAS" not in str(error) or len(rows) == 1:
                    raise
            self._refused.add(self._key(rows, weight))
            with suppress(RuntimeError):  # take the error off before another launch finds it
                self.tokens[:1].add_(0)
        half = len(rows) // 2
        self.mm(rows[:half], weight, out[:half])
        self.mm(rows[half:], weight, out[half:])

    def _key(self, rows: Any, weight: Any) -> tuple[int, int, int]:
        return self.torch.cuda.current_stream().cuda_stream, len(rows), int(weight.shape[0])

    def piece(self, number: int, rows: int) -> None:
        """Launch piece 0..layers for the first `rows` rows on the current stream."""
        torch, ops, weights = self.torch, self.ops, self.arena.weights
        hidden, residual = self.hidden[:rows], self.residual[:rows]
        if number == 0:
            torch.index_select(self.arena.embedding, 0, self.tables.view("ids", rows), out=residual)
            ops.norm(residual, weights[0].norm1, hidden)
        else:
            layer = weights[number - 1]
            self.mm(self.attention[:rows].view(rows, -1), layer.o, hidden)
            ops.add_norm(hidden, residual, layer.norm2)
            self.mm(hidden, layer.gate_up, self._gate_up[:rows])
            ops.silu_mul(self._gate_up[:rows], self._act[:rows])
            self.mm(self._act[:rows], layer.down, hidden)
            last = number == self.layers
            ops.add_norm(hidden, residual, self.arena.final_norm if last else weights[number].norm1)
        if number < self.layers:
            self.mm(hidden, weights[number].qkv, self._qkv[:rows])
            q, k, v = split_qkv(self.arena.model, self._qkv[:rows])
            where = Where(self.tables, rows, self._limits[1] + 1, self._limits[2])
            ops.rope(where.positions, q, k, self.arena.rope_cache)
            ops.append(k, v, where, self.caches[number])

    def carry(self, batch: int) -> None:
        """The tokens sampled last are the next step's inputs, without the host."""
        self.tables.view("ids", batch).copy_(self.tokens[:batch])

    def head(self, outputs: int) -> None:
        """Final projection and greedy sampling of the rows that yield a token."""
        torch = self.torch
        last, logits = self._last[:outputs], self.logits[:outputs]
        torch.index_select(self.hidden, 0, self.tables.view("ends", outputs), out=last)
        self.mm(last, self.arena.lm_head, logits)
        torch.argmax(logits, dim=-1, out=self.tokens[:outputs])

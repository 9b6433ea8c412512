"""Buffers of one batch at a time, and the CUDA graphs that use them."""

from __future__ import annotations

from typing import Any

from calib.executor.attention import PagedAttention
from calib.executor.batch import Batch, lay_out
from calib.executor.buckets import fitting, holds, row_bucket
from calib.executor.forward import Forward
from calib.executor.pages import PagePool
from calib.executor.work import Work
from calib.graphs import captured
from calib.lab import GpuLab

NOBODY = 1 << 40  # request numbers from here on stand for no request: capturing


class Place:
    """Buffers for passes within `limits` (rows, sequences, pages of KV), and graphs by SM set and size.

    Graphs share the memory of `graph_pool`. `backend`, `fused`: kernels of attention (`calib.executor.attention`).
    """

    def __init__(
        self,
        lab: GpuLab,
        slot: int,
        limits: tuple[int, int, int],
        pool: PagePool,
        graph_pool: Any,
        backend: str,
        fused: str,
    ) -> None:
        self._lab, self._slot, self._pool, self._graph_pool = lab, slot, pool, graph_pool
        self.forward = Forward(lab.arena, slot, *limits)
        self.attention = PagedAttention(self.forward, backend, fused)
        self.decode_graphs: dict[int, dict[int, Any]] = {}
        self.pieces: dict[int, dict[int, list[Any]]] = {}
        self.sizes: set[int] = set()  # rows of pieces on any SM set
        self.batch: Batch  # of the pass with prompts that is open

    def decode_pass(self, batch: int) -> None:
        """All layers of a decode step and the head, on the current stream."""
        forward = self.forward
        q, out = forward.q(batch), forward.attention[:batch]
        for layer in range(forward.layers):
            forward.piece(layer, batch)
            self.attention.run(layer, q, out)
        forward.piece(forward.layers, batch)
        forward.head(batch)

    def has_decodes(self, sms: int, batch: int) -> bool:
        """Is there a graph of a decode step of just this size?"""
        return batch in self.decode_graphs.get(sms, ())

    def has_pieces(self, sms: int, rows: int) -> bool:
        """Are there graphs of a pass of just so many rows?"""
        return rows in self.pieces.get(sms, ())

    def holds(self, rows: int) -> int:
        """Rows of the graphs that a pass of `rows` rows may run in; 0 if there are none on any SM set."""
        size = fitting(list(self.sizes), row_bucket(rows))
        return size if size is not None and holds(size, rows) else 0

    def capture_decodes(self, stream: Any, sms: int, batch: int) -> None:
        """Make the graph of a decode step of `batch` sequences."""
        members = tuple((NOBODY + i, 1) for i in range(batch))
        work = Work(self._slot, sms, (0, self.forward.layers), (), members, 0.0, 0.0, True)
        try:
            with self._lab.torch.cuda.stream(stream):
                tables = lay_out(work, self._pool, {}, self._lab.model.vocab)
                self.forward.tables.send(tables)
                self.attention.plan(tables, batch)
                self.decode_pass(batch)
                stream.synchronize()
                graph = self.capture(lambda: self.decode_pass(batch))
                self.decode_graphs.setdefault(sms, {})[batch] = graph
        finally:
            for i, _ in members:
                self._pool.release(i)

    def capture_pieces(self, stream: Any, sms: int, rows: int) -> None:
        """Make the graphs between which a pass of `rows` rows launches its attention."""
        work = Work(self._slot, sms, (0, 1), ((NOBODY, rows, 0),), (), 0.0, 0.0, False)
        try:
            with self._lab.torch.cuda.stream(stream):
                self.forward.tables.send(lay_out(work, self._pool, {}, self._lab.model.vocab))
                graphs = []
                for number in range(self.forward.layers + 1):
                    if number < 2:
                        self.forward.piece(number, rows)
                        stream.synchronize()
                    graphs.append(self.capture(lambda number=number: self.forward.piece(number, rows)))
                self.pieces.setdefault(sms, {})[rows] = graphs
                self.sizes.add(rows)
        finally:
            self._pool.release(NOBODY)

    def touch(self, stream: Any, sms: int, rows: int) -> None:
        """Run the linear layers of a pass of `rows` rows once: a kernel that is loaded at its first launch would wait
        there for whatever runs beside it."""
        work = Work(self._slot, sms, (0, 1), ((NOBODY, rows, 0),), (), 0.0, 0.0, False)
        try:
            with self._lab.torch.cuda.stream(stream):
                self.forward.tables.send(lay_out(work, self._pool, {}, self._lab.model.vocab))
                for number in range(2):
                    self.forward.piece(number, rows)
                stream.synchronize()
        finally:
            self._pool.release(NOBODY)

    def capture(self, launch: Any) -> Any:
        """A graph of what `launch` launches on the current stream."""
        return captured(self._lab.torch, launch, self._graph_pool)

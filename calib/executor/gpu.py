"""Launches on a real GPU: each lane has buffers, streams on its SM sets, decode graphs and piecewise prompt graphs.

There is one host thread. A pass with prompts is launched layer by layer from `wait`, between looks at the other lane,
so that a decode step that ends meanwhile is answered at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from calib.executor.attention import SerialAttention
from calib.executor.batch import Batch, lay_out
from calib.executor.buckets import fitting, row_bucket, wanted
from calib.executor.forward import Forward
from calib.executor.pages import PagePool
from calib.executor.work import Work
from calib.lab import GpuLab
from sim.engine.layout import DECODE_LANE
from sim.errors import CalibrationError

NOBODY = 1 << 40  # request numbers from here on stand for no request: capturing
MOST_PADDING = 1.125  # a pass is launched eagerly rather than in graphs for so many more rows
SPIN_S = 20e-6


class _Lane:
    """Buffers, graphs and what is in flight."""

    def __init__(self, lab: GpuLab, slot: int, rows: int, sequences: int, pages: int, backend: str) -> None:
        self.forward = Forward(lab.arena, slot, rows, sequences, pages)
        self.attention = SerialAttention(self.forward, backend)
        self.read = lab.torch.zeros(sequences, dtype=lab.torch.int64, pin_memory=True)
        event = lab.torch.cuda.Event
        self.start, self.end = event(enable_timing=True), event(enable_timing=True)
        self.decode_graphs: dict[int, dict[int, Any]] = {}
        self.pieces: dict[int, dict[int, list[Any]]] = {}
        self.pending: Iterator[None] | None = None
        self.batch: Batch
        self.work: Work
        self.seen: dict[str, Any] = {}


class GpuDevice:
    """The lanes of one GPU under `lab`; `num_blocks` KV blocks of 16 tokens, steps of up to `rows` and `sequences`.

    Raises CalibrationError where the arena's KV cache holds fewer blocks. `backend`: prefill attention, fa2 or fa3.
    """

    def __init__(
        self, lab: GpuLab, lanes: int, num_blocks: int, rows: int, sequences: int, backend: str = "fa3"
    ) -> None:
        held = lab.arena.kv.shape[0] // lab.arena.layers - 1
        if num_blocks > held:
            raise CalibrationError(f"{num_blocks} KV blocks are asked for and {held} fit this GPU's cache")
        self.lab, self.torch, self._sequences = lab, lab.torch, sequences
        self.pool = PagePool(num_blocks)
        pages = num_blocks + sequences + 1
        self.lanes = [_Lane(lab, slot, row_bucket(rows), sequences, pages, backend) for slot in range(lanes)]
        self._single = lanes == 1
        self._last_token: dict[int, int] = {}
        self._flying: list[int] = []
        self._zero = 0.0
        self._graph_pool = self.torch.cuda.graph_pool_handle()

    def start(self) -> None:
        """Count time from here, with nothing left to do on the GPU."""
        self.torch.cuda.synchronize()
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._zero

    def forget(self) -> None:
        """Take back every page: the requests of another run are gone."""
        self.pool.clear()
        self._last_token.clear()

    def _stream(self, lane: int, sms: int) -> Any:
        far = lane == DECODE_LANE and not self._single
        return self.lab.partition(sms, remainder=far).stream("high" if far else "normal")

    def prepare(self, works: Sequence[Work]) -> dict[str, Any]:
        """Capture the graphs that a run like `works` (of a dry run) needs; returns their counts and the time."""
        began = time.perf_counter()
        decodes, pieces = wanted(works, self._sequences)
        for key in decodes:
            self._capture_decode(*key)
        for key in pieces:
            self._capture_pieces(*key)
        self.torch.cuda.synchronize()
        took = round(time.perf_counter() - began, 2)
        return {"decode_graphs": len(decodes), "piecewise_graphs": len(pieces), "capture_s": took}

    def _capture(self, launch: Any) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        launch()
        graph.capture_end()
        return graph

    def _capture_decode(self, lane: int, sms: int, batch: int) -> None:
        mine, stream = self.lanes[lane], self._stream(lane, sms)
        members = tuple((NOBODY + i, 1) for i in range(batch))
        work = Work(lane, sms, (0, mine.forward.layers), (), members, 0.0, 0.0, True)
        with self.torch.cuda.stream(stream):
            tables = lay_out(work, self.pool, {}, self.lab.model.vocab)
            mine.forward.tables.send(tables)
            mine.attention.plan(tables, batch)
            self._decode_pass(mine, batch)
            stream.synchronize()
            graph = self._capture(lambda: self._decode_pass(mine, batch))
            mine.decode_graphs.setdefault(sms, {})[batch] = graph
        for i, _ in members:
            self.pool.release(i)

    def _decode_pass(self, mine: _Lane, batch: int) -> None:
        forward = mine.forward
        for layer in range(forward.layers):
            forward.piece(layer, batch)
            mine.attention.run(layer, forward.q(batch), forward.attention[:batch])
        forward.piece(forward.layers, batch)
        forward.head(batch)

    def _capture_pieces(self, lane: int, sms: int, rows: int) -> None:
        mine, stream = self.lanes[lane], self._stream(lane, sms)
        work = Work(lane, sms, (0, 1), ((NOBODY, rows, 0),), (), 0.0, 0.0, False)
        with self.torch.cuda.stream(stream):
            mine.forward.tables.send(lay_out(work, self.pool, {}, self.lab.model.vocab))
            graphs = []
            for number in range(mine.forward.layers + 1):
                if number < 2:
                    mine.forward.piece(number, rows)
                    stream.synchronize()
                graphs.append(self._capture(lambda number=number: mine.forward.piece(number, rows)))
            mine.pieces.setdefault(sms, {})[rows] = graphs
        self.pool.release(NOBODY)

    def launch(self, work: Work, released: list[int]) -> None:
        """Plan, and launch a decode step whole or a pass with prompts up to its first layer."""
        began = self.now()
        for i in released:
            self.pool.release(i)
        mine = self.lanes[work.lane]
        mine.work = work
        with self.torch.cuda.stream(self._stream(work.lane, work.sms)):
            kind = self._plan_prompts(mine, work) if work.chunks else self._plan_decodes(mine, work)
        mine.seen = {"plan_s": self.now() - began, "launch_s": 0.0, "launch": kind}
        mine.pending = self._prompt_pass(mine, kind) if work.chunks else self._decode_step(mine, kind)
        self._flying.append(work.lane)
        self._pump(work.lane)

    def _pump(self, lane: int) -> None:
        """Launch the next part of what the lane has pending."""
        mine = self.lanes[lane]
        if mine.pending is None:
            return
        began = self.now()
        with self.torch.cuda.stream(self._stream(lane, mine.work.sms)):
            try:
                next(mine.pending)
            except StopIteration:
                mine.pending = None
        mine.seen["launch_s"] += self.now() - began

    def _plan_decodes(self, mine: _Lane, work: Work) -> str:
        batch = len(work.decodes)
        size = fitting(list(mine.decode_graphs.get(work.sms, ())), batch)
        mine.batch = lay_out(work, self.pool, self._last_token, self.lab.model.vocab, size or batch)
        mine.forward.tables.send(mine.batch)
        mine.attention.plan(mine.batch, size or 0)
        return "eager" if size is None else "graph"

    def _decode_step(self, mine: _Lane, kind: str) -> Iterator[None]:
        stream = self.torch.cuda.current_stream()
        mine.start.record(stream)
        if kind == "graph":
            mine.decode_graphs[mine.work.sms][mine.batch.rows].replay()
        else:
            self._decode_pass(mine, mine.batch.rows)
        self._finish_launch(mine, stream)
        yield

    def _plan_prompts(self, mine: _Lane, work: Work) -> str:
        held = mine.pieces.get(work.sms, {})
        if work.layers[0] == 0:
            size = fitting(list(held), row_bucket(work.rows))
            if size is None or size > MOST_PADDING * row_bucket(work.rows) + 16:
                size = work.rows
            mine.batch = lay_out(work, self.pool, self._last_token, self.lab.model.vocab, size)
            mine.forward.tables.send(mine.batch)
            mine.attention.plan(mine.batch)
        return "piecewise" if mine.batch.rows in held else "eager"

    def _prompt_pass(self, mine: _Lane, kind: str) -> Iterator[None]:
        """One layer at a time; the lane's stream is current whenever this goes on."""
        forward, rows = mine.forward, mine.batch.rows
        graphs = mine.pieces[mine.work.sms][rows] if kind == "piecewise" else None
        first, last = mine.work.layers
        stream = self.torch.cuda.current_stream()

        def piece(number: int) -> None:
            if graphs is not None:
                graphs[number].replay()
            else:
                forward.piece(number, rows)

        mine.start.record(stream)
        if first == 0:
            piece(0)
        for layer in range(first, last):
            mine.attention.run(layer, forward.q(rows), forward.attention[:rows])
            piece(layer + 1)
            yield
        if mine.work.whole:
            forward.head(len(mine.batch.yields))
        self._finish_launch(mine, stream)

    def _finish_launch(self, mine: _Lane, stream: Any) -> None:
        if mine.work.whole:
            count = len(mine.batch.yields)
            mine.read[:count].copy_(mine.forward.tokens[:count], non_blocking=True)
        mine.end.record(stream)

    def wait(self, until_s: float) -> list[tuple[int, float]]:
        """Launch what is pending and poll the lanes' ends until one is reached, or until `until_s`."""
        while True:
            launched = [lane for lane in self._flying if self.lanes[lane].pending is None]
            ended = [lane for lane in launched if self.lanes[lane].end.query()]
            if ended:
                return [(lane, self._finish(lane)) for lane in ended]
            now = self.now()
            if now >= until_s:
                return []
            pending = [lane for lane in self._flying if self.lanes[lane].pending is not None]
            if pending:
                self._pump(pending[0])
            elif self._flying:
                time.sleep(SPIN_S)
            elif until_s - now > 1e-3:
                time.sleep(min(until_s - now - 5e-4, 0.01))

    def _finish(self, lane: int) -> float:
        """Read the tokens of a finished launch; its end is when the host has them."""
        mine = self.lanes[lane]
        self._flying.remove(lane)
        seen = self.now()
        if mine.work.whole:
            for i, token in zip(mine.batch.yields, mine.read.tolist(), strict=False):
                self._last_token[i] = token
        end = self.now()
        gpu_s = mine.start.elapsed_time(mine.end) / 1e3
        mine.seen |= {"gpu_s": gpu_s, "read_s": end - seen, "rows": mine.batch.rows}
        return end

    def measured(self, lane: int) -> dict[str, Any]:
        """Seconds of planning, launching, reading and of the GPU, and the rows run, of the last launch on the lane."""
        return self.lanes[lane].seen

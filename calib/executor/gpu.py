"""Launches on a real GPU: each lane has buffers, streams on its SM sets, decode graphs and piecewise prompt graphs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from calib.executor.attention import SerialAttention
from calib.executor.batch import Batch, lay_out
from calib.executor.forward import Forward
from calib.executor.pages import PagePool
from calib.executor.work import Work
from calib.lab import GpuLab
from sim.cost.launching import captured_tokens, grid_tokens
from sim.engine.layout import DECODE_LANE
from sim.errors import CalibrationError

MOST_PARTITIONS = 6  # decode graphs are kept for the partitions used most
MOST_GRAPHS = 60
MOST_PIECEWISE = 48
SPIN_S = 20e-6


def row_bucket(rows: int) -> int:
    """Rows of the graphs that a pass with prompts replays: the grid at which the simulator prices it."""
    return int(grid_tokens(rows))


def decode_bucket(batch: int) -> int:
    """Batch size of the decode graph for `batch` sequences, padded as servers and the simulator do."""
    return int(captured_tokens(batch))


class _Lane:
    def __init__(self, lab: GpuLab, slot: int, rows: int, sequences: int, pages: int, backend: str) -> None:
        self.forward = Forward(lab.arena, slot, rows, sequences, pages)
        self.attention = SerialAttention(self.forward, backend)
        self.read = lab.torch.zeros(sequences, dtype=lab.torch.int64, pin_memory=True)
        self.start, self.end = (
            lab.torch.cuda.Event(enable_timing=True),
            lab.torch.cuda.Event(enable_timing=True),
        )
        self.decode_graphs: dict[tuple[int, int], Any] = {}
        self.pieces: dict[tuple[int, int], list[Any]] = {}
        self.batch: Batch
        self.work: Work
        self.seen: dict[str, float] = {}


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
        self.lab, self.torch = lab, lab.torch
        self.pool = PagePool(num_blocks)
        rows = row_bucket(rows)
        pages = num_blocks + sequences + 1
        self.lanes = [_Lane(lab, slot, rows, sequences, pages, backend) for slot in range(lanes)]
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

    def prepare(self, works: Sequence[Work]) -> dict[str, int]:
        """Capture the graphs that `works` (of a dry run) will use, the most frequent first; returns their counts."""
        decodes: Counter[tuple[int, int, int]] = Counter()
        prompts: Counter[tuple[int, int, int]] = Counter()
        for work in works:
            if work.chunks:
                prompts[(work.lane, work.sms, row_bucket(work.rows))] += 1
            else:
                decodes[(work.lane, work.sms, decode_bucket(len(work.decodes)))] += 1
        kept = [
            sms for sms, _ in Counter(sms for _, sms, _ in decodes.elements()).most_common(MOST_PARTITIONS)
        ]
        wanted = [key for key, _ in decodes.most_common() if key[1] in kept][:MOST_GRAPHS]
        for lane, sms, batch in sorted(wanted, key=lambda key: -key[2]):
            self._capture_decode(lane, sms, batch)
        pieces = [key for key, _ in prompts.most_common(MOST_PIECEWISE)]
        for lane, sms, rows in sorted(pieces, key=lambda key: -key[2]):
            self._capture_pieces(lane, sms, rows)
        self.torch.cuda.synchronize()
        return {"decode_graphs": len(wanted), "piecewise": len(pieces)}

    def _capture(self, launch: Any) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        launch()
        graph.capture_end()
        return graph

    def _capture_decode(self, lane: int, sms: int, batch: int) -> None:
        mine = self.lanes[lane]
        stream = self._stream(lane, sms)
        work = Work(
            lane, sms, (0, mine.forward.layers), (), tuple((-1 - i, 1) for i in range(batch)), 0.0, 0.0, True
        )
        with self.torch.cuda.stream(stream):
            tables = lay_out(work, self.pool, {}, self.lab.model.vocab)
            mine.forward.tables.send(tables)
            mine.attention.plan(tables, batch)

            def launch() -> None:
                self._decode_pass(mine, batch)

            launch()
            stream.synchronize()
            mine.decode_graphs[(sms, batch)] = self._capture(launch)
        for i in range(batch):
            self.pool.release(-1 - i)

    def _decode_pass(self, mine: _Lane, batch: int) -> None:
        forward = mine.forward
        for layer in range(forward.layers):
            forward.piece(layer, batch)
            mine.attention.run(layer, forward.q(batch), forward.attention[:batch])
        forward.piece(forward.layers, batch)
        forward.head(batch)

    def _capture_pieces(self, lane: int, sms: int, rows: int) -> None:
        mine = self.lanes[lane]
        stream = self._stream(lane, sms)
        work = Work(lane, sms, (0, 1), ((-1, rows, 0),), (), 0.0, 0.0, False)
        with self.torch.cuda.stream(stream):
            mine.forward.tables.send(lay_out(work, self.pool, {}, self.lab.model.vocab))
            graphs = []
            for number in range(mine.forward.layers + 1):
                if number < 2:
                    mine.forward.piece(number, rows)
                    stream.synchronize()
                graphs.append(self._capture(lambda number=number: mine.forward.piece(number, rows)))
            mine.pieces[(sms, rows)] = graphs
        self.pool.release(-1)

    def launch(self, work: Work, released: list[int]) -> None:
        """Plan and launch on the lane's stream; returns while the GPU works."""
        began = self.now()
        for i in released:
            self.pool.release(i)
        mine = self.lanes[work.lane]
        mine.work = work
        stream = self._stream(work.lane, work.sms)
        with self.torch.cuda.stream(stream):
            if work.chunks:
                planned, kind = self._launch_prompts(mine, work, stream)
            else:
                planned, kind = self._launch_decodes(mine, work, stream)
            if work.whole:
                count = len(mine.batch.yields)
                mine.read[:count].copy_(mine.forward.tokens[:count], non_blocking=True)
            mine.end.record(stream)
        mine.seen = {"plan_s": planned - began, "launch_s": self.now() - planned, "launch": kind}
        self._flying.append(work.lane)

    def _launch_decodes(self, mine: _Lane, work: Work, stream: Any) -> tuple[float, str]:
        batch = len(work.decodes)
        size = decode_bucket(batch)
        graph = mine.decode_graphs.get((work.sms, size))
        size = size if graph is not None else batch
        mine.batch = lay_out(work, self.pool, self._last_token, self.lab.model.vocab, size)
        mine.forward.tables.send(mine.batch)
        mine.attention.plan(mine.batch, size if graph is not None else 0)
        planned = self.now()
        mine.start.record(stream)
        if graph is not None:
            graph.replay()
            return planned, "graph"
        self._decode_pass(mine, batch)
        return planned, "eager"

    def _launch_prompts(self, mine: _Lane, work: Work, stream: Any) -> tuple[float, str]:
        forward, rows = mine.forward, row_bucket(work.rows)
        graphs = mine.pieces.get((work.sms, rows))
        rows = rows if graphs is not None else work.rows
        first, last = work.layers
        if first == 0:
            mine.batch = lay_out(work, self.pool, self._last_token, self.lab.model.vocab, rows)
            forward.tables.send(mine.batch)
            mine.attention.plan(mine.batch)
        rows = mine.batch.rows
        planned = self.now()
        mine.start.record(stream)

        def piece(number: int) -> None:
            if graphs is not None:
                graphs[number].replay()
            else:
                forward.piece(number, rows)

        if first == 0:
            piece(0)
        for layer in range(first, last):
            mine.attention.run(layer, forward.q(rows), forward.attention[:rows])
            piece(layer + 1)
        if work.whole:
            forward.head(len(mine.batch.yields))
        return planned, "piecewise" if graphs is not None else "eager"

    def wait(self, until_s: float) -> list[tuple[int, float]]:
        """Poll the lanes' end events until one is reached, or until `until_s`."""
        while True:
            ended = [lane for lane in self._flying if self.lanes[lane].end.query()]
            if ended:
                return [(lane, self._finish(lane)) for lane in ended]
            now = self.now()
            if now >= until_s:
                return []
            if until_s - now > 1e-3 and not self._flying:
                time.sleep(min(until_s - now - 5e-4, 0.01))
            else:
                time.sleep(SPIN_S if self._flying else 0.0)

    def _finish(self, lane: int) -> float:
        """Read the tokens of a finished launch; its end is when the host has them."""
        mine = self.lanes[lane]
        self._flying.remove(lane)
        seen = self.now()
        if mine.work.whole:
            for i, token in zip(mine.batch.yields, mine.read.tolist(), strict=False):
                self._last_token[i] = token
        end = self.now()
        mine.seen |= {
            "gpu_s": mine.start.elapsed_time(mine.end) / 1e3,
            "read_s": end - seen,
            "rows": mine.batch.rows,
        }
        return end

    def measured(self, lane: int) -> dict[str, Any]:
        """Seconds of planning, launching, reading and of the GPU, and the rows run, of the last launch on the lane."""
        return self.lanes[lane].seen

"""Launches on a real GPU: each lane has buffers, streams on its SM sets, decode graphs and piecewise prompt graphs.

There is one host thread. A pass with prompts beside another lane is launched layer by layer from `wait`, between looks
at the other lane, so that a decode step that ends meanwhile is answered at once. Of decode steps that start at once,
one is queued on the GPU behind the one that runs: its input is the token sampled last, which the host has not seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from calib.executor.attention import PagedAttention
from calib.executor.batch import Batch, lay_out
from calib.executor.buckets import ASIDE, decode_bucket, fitting, holds, row_bucket, wanted
from calib.executor.forward import Forward
from calib.executor.pages import PagePool
from calib.executor.work import Work
from calib.lab import GpuLab
from sim.engine.layout import DECODE_LANE
from sim.errors import CalibrationError

NOBODY = 1 << 40  # request numbers from here on stand for no request: capturing
NAP_S = 2e-3  # the host sleeps where nothing is due for longer
CAPTURE_S = 20.0  # most seconds that capturing for one policy takes
SPARE_BYTES = 4 << 30


class _Place:
    """Buffers of one batch at a time, and the graphs that use them, by SM set and size."""

    def __init__(
        self, lab: GpuLab, slot: int, rows: int, sequences: int, pages: int, backend: str, fused: str
    ) -> None:
        self.forward = Forward(lab.arena, slot, rows, sequences, pages)
        self.attention = PagedAttention(self.forward, backend, fused)
        self.decode_graphs: dict[int, dict[int, Any]] = {}
        self.pieces: dict[int, dict[int, list[Any]]] = {}
        self.sizes: set[int] = set()  # rows of pieces on any SM set
        self.batch: Batch


class _Flight:
    """A launch on the GPU: events around it, its batch, and where its tokens arrive."""

    def __init__(self, torch: Any, sequences: int) -> None:
        event = torch.cuda.Event
        self.start, self.end = event(enable_timing=True), event(enable_timing=True)
        self.sent = event()  # its tables have left the host
        self.read = torch.zeros(sequences, dtype=torch.int64, pin_memory=True)
        self.batch: Batch


class _Lane:
    """What is in flight on a lane, the running one first, and what of it is still to be launched."""

    def __init__(self, torch: Any, sequences: int) -> None:
        self.spare = [_Flight(torch, sequences), _Flight(torch, sequences)]
        self.flights: deque[_Flight] = deque()
        self.pending: Iterator[None] | None = None
        self.place: _Place
        self.work: Work
        self.chain: Work  # the first of the steps that started at once
        self.launched = 0  # of these
        self.seen: dict[str, Any] = {}

    def may_go_ahead(self) -> bool:
        """Can the next step be queued? The tables of the last one have left the host's buffers."""
        waiting = self.launched < self.chain.steps and len(self.flights) < 2
        return waiting and self.flights[-1].sent.query()

    def clear(self) -> None:
        """Nothing is in flight."""
        self.spare += self.flights
        self.flights.clear()
        self.pending, self.launched = None, 0


class GpuDevice:
    """The lanes of one GPU under `lab`; `num_blocks` KV blocks of 16 tokens, steps of up to `rows` and `sequences`.

    Raises CalibrationError where the arena's KV cache holds fewer blocks. `backend`: prefill attention, fa2 or fa3;
    `fused`: the kernel of fused steps (`calib.executor.modes`). Graphs are kept for whatever policy runs next.
    """

    def __init__(
        self,
        lab: GpuLab,
        lanes: int,
        num_blocks: int,
        rows: int,
        sequences: int,
        backend: str = "fa3",
        fused: str = "",
    ) -> None:
        held = lab.arena.kv.shape[0] // lab.arena.layers - 1
        if num_blocks > held:
            raise CalibrationError(f"{num_blocks} KV blocks are asked for and {held} fit this GPU's cache")
        self.lab, self.torch = lab, lab.torch
        self.rows, self.sequences = row_bucket(rows), decode_bucket(sequences)
        self.pool = PagePool(num_blocks)
        self._buffers = (self.rows, self.sequences, num_blocks + self.sequences + 1, backend)
        self._places: dict[int, _Place] = {}
        self.lanes = [_Lane(lab.torch, self.sequences) for _ in range(lanes)]
        self.use(lanes, fused)
        self._last_token: dict[int, int] = {}
        self._flying: list[int] = []
        self._zero = 0.0
        self._graph_pool = self.torch.cuda.graph_pool_handle()

    def use(self, lanes: int, fused: str) -> None:
        """Serve a policy of so many lanes, with this kernel for fused steps."""
        self._single, self._fused = lanes == 1, fused
        self.lanes += [_Lane(self.torch, self.sequences) for _ in range(lanes - len(self.lanes))]
        for slot in range(lanes):
            self._place(slot)
        for place in self._places.values():
            place.attention.fused = fused

    def _place(self, slot: int) -> _Place:
        if slot not in self._places:
            self._places[slot] = _Place(self.lab, slot, *self._buffers, self._fused)
        return self._places[slot]

    def start(self) -> None:
        """Count time from here, with nothing left to do on the GPU."""
        self.torch.cuda.synchronize()
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._zero

    def forget(self) -> None:
        """Take back every page: the requests of another run are gone, and so is what was in flight."""
        self.torch.cuda.synchronize()
        for lane in self.lanes:
            lane.clear()
        self._flying.clear()
        self.pool.clear()
        self._last_token.clear()

    def _stream(self, lane: int, sms: int) -> Any:
        far = lane == DECODE_LANE and not self._single
        return self.lab.partition(sms, remainder=far).stream("high" if far else "normal")

    def prepare(self, works: Sequence[Work], pairs: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
        """Capture the graphs that a run like `works` (of a dry run) needs and are not held yet, as far as time and
        memory go; returns their counts and the time. `pairs`: SM sets that the policy may use side by side."""
        began = time.perf_counter()
        decodes, pieces = wanted(works, self.sequences, pairs)
        captured, missing = 0, 0
        for capture, keys in ((self._capture_decode, decodes), (self._capture_pieces, pieces)):
            for key in keys:
                if self._holds(capture == self._capture_decode, *key):
                    continue
                full = self.torch.cuda.mem_get_info()[0] < SPARE_BYTES
                if full or time.perf_counter() - began > CAPTURE_S:
                    missing += 1
                    continue
                capture(*key)
                captured += 1
        self.torch.cuda.synchronize()
        return {
            "decode_graphs": len(decodes),
            "piecewise_graphs": len(pieces),
            "graphs_captured": captured,
            "graphs_missing": missing,
            "capture_s": round(time.perf_counter() - began, 2),
            "memory_left_gib": round(self.torch.cuda.mem_get_info()[0] / 2**30, 1),
        }

    def _holds(self, decode: bool, slot: int, sms: int, size: int) -> bool:
        place = self._place(slot)
        graphs: Any = place.decode_graphs if decode else place.pieces
        return size in graphs.get(sms, ())

    def _capture(self, launch: Any) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        launch()
        graph.capture_end()
        return graph

    def _capture_decode(self, slot: int, sms: int, batch: int) -> None:
        place, stream = self._place(slot), self._stream(slot, sms)
        members = tuple((NOBODY + i, 1) for i in range(batch))
        work = Work(slot, sms, (0, place.forward.layers), (), members, 0.0, 0.0, True)
        with self.torch.cuda.stream(stream):
            tables = lay_out(work, self.pool, {}, self.lab.model.vocab)
            place.forward.tables.send(tables)
            place.attention.plan(tables, batch)
            self._decode_pass(place, batch)
            stream.synchronize()
            graph = self._capture(lambda: self._decode_pass(place, batch))
            place.decode_graphs.setdefault(sms, {})[batch] = graph
        for i, _ in members:
            self.pool.release(i)

    def _decode_pass(self, place: _Place, batch: int) -> None:
        forward = place.forward
        q, out = forward.q(batch), forward.attention[:batch]
        for layer in range(forward.layers):
            forward.piece(layer, batch)
            place.attention.run(layer, q, out)
        forward.piece(forward.layers, batch)
        forward.head(batch)

    def _capture_pieces(self, slot: int, sms: int, rows: int) -> None:
        place, stream = self._place(slot), self._stream(0 if slot == ASIDE else slot, sms)
        work = Work(slot, sms, (0, 1), ((NOBODY, rows, 0),), (), 0.0, 0.0, False)
        with self.torch.cuda.stream(stream):
            place.forward.tables.send(lay_out(work, self.pool, {}, self.lab.model.vocab))
            graphs = []
            for number in range(place.forward.layers + 1):
                if number < 2:
                    place.forward.piece(number, rows)
                    stream.synchronize()
                graphs.append(self._capture(lambda number=number: place.forward.piece(number, rows)))
            place.pieces.setdefault(sms, {})[rows] = graphs
            place.sizes.add(rows)
        self.pool.release(NOBODY)

    def launch(self, work: Work, released: list[int]) -> None:
        """Plan, and launch a decode step whole or a pass with prompts up to its first layer. A step that was launched
        ahead is on the GPU already."""
        began = self.now()
        for i in released:
            self.pool.release(i)
        lane = self.lanes[work.lane]
        lane.work = work
        self._flying.append(work.lane)
        lane.seen = {"plan_s": 0.0, "launch_s": 0.0, "launch": "ahead"}
        if work.ahead:
            if not lane.flights:  # the host was busy with the other lane
                self._launch_ahead(lane)
            return
        lane.place = self._place(ASIDE if work.aside else work.lane)
        lane.chain, lane.launched = work, 1
        flight = lane.spare.pop()
        stream = self._stream(work.lane, work.sms)
        with self.torch.cuda.stream(stream):
            plan = self._plan_prompts if work.chunks else self._plan_decodes
            lane.seen["launch"] = kind = plan(lane.place, flight, work)
            planned = self.now()
            lane.seen["plan_s"] = planned - began
            lane.flights.append(flight)
            if work.chunks:
                lane.pending = self._prompt_pass(lane, flight, kind, stream)
            else:
                flight.sent.record(stream)
                self._decode_step(lane, flight, kind, stream)
                lane.seen["launch_s"] = self.now() - planned
                return
        self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
        """Launch the next part of what the lane has pending."""
        if lane.pending is None:
            return
        began = self.now()
        with self.torch.cuda.stream(self._stream(lane.work.lane, lane.work.sms)):
            try:
                next(lane.pending)
            except StopIteration:
                lane.pending = None
        lane.seen["launch_s"] += self.now() - began

    def _plan_decodes(self, place: _Place, flight: _Flight, work: Work) -> str:
        batch = len(work.decodes)
        size = fitting(list(place.decode_graphs.get(work.sms, ())), batch)
        flight.batch = lay_out(
            work, self.pool, self._last_token, self.lab.model.vocab, size or batch, each=True
        )
        place.forward.tables.send(flight.batch)
        if work.ahead:
            place.forward.carry(batch)
        place.attention.plan(flight.batch, size or 0)
        return "eager" if size is None else "graph"

    def _decode_step(self, lane: _Lane, flight: _Flight, kind: str, stream: Any) -> None:
        flight.start.record(stream)
        if kind == "graph":
            lane.place.decode_graphs[lane.work.sms][flight.batch.rows].replay()
        else:
            self._decode_pass(lane.place, flight.batch.rows)
        self._finish_launch(lane, flight, stream)

    def _launch_ahead(self, lane: _Lane) -> None:
        """Queue the next of the steps that start at once behind the one that runs."""
        flight, step = lane.spare.pop(), lane.chain.later(lane.launched)
        lane.launched += 1
        stream = self._stream(step.lane, step.sms)
        with self.torch.cuda.stream(stream):
            kind = self._plan_decodes(lane.place, flight, step)
            flight.sent.record(stream)
            self._decode_step(lane, flight, kind, stream)
        lane.flights.append(flight)

    def _plan_prompts(self, place: _Place, flight: _Flight, work: Work) -> str:
        if work.layers[0] == 0:
            size = fitting(list(place.sizes), row_bucket(work.rows))
            if size is None or not holds(size, work.rows):
                size = work.rows
            place.batch = lay_out(work, self.pool, self._last_token, self.lab.model.vocab, size)
            place.forward.tables.send(place.batch)
            place.attention.plan(place.batch, 0, work.fused)
        flight.batch = place.batch
        return "piecewise" if place.batch.rows in place.pieces.get(work.sms, ()) else "eager"

    def _prompt_pass(self, lane: _Lane, flight: _Flight, kind: str, stream: Any) -> Iterator[None]:
        """One layer at a time; the lane's stream is current whenever this goes on."""
        place, work, rows = lane.place, lane.work, flight.batch.rows
        forward = place.forward
        graphs = place.pieces[work.sms][rows] if kind == "piecewise" else None
        first, last = work.layers
        q, out = forward.q(rows), forward.attention[:rows]

        def piece(number: int) -> None:
            if graphs is not None:
                graphs[number].replay()
            else:
                forward.piece(number, rows)

        flight.start.record(stream)
        if first == 0:
            piece(0)
        for layer in range(first, last):
            place.attention.run(layer, q, out)
            piece(layer + 1)
            if not self._single and layer + 1 < last:
                yield
        if work.whole:
            forward.head(len(flight.batch.yields))
        self._finish_launch(lane, flight, stream)

    def _finish_launch(self, lane: _Lane, flight: _Flight, stream: Any) -> None:
        if lane.work.whole:
            count = len(flight.batch.yields)
            flight.read[:count].copy_(lane.place.forward.tokens[:count], non_blocking=True)
        flight.end.record(stream)

    def wait(self, until_s: float) -> list[tuple[int, float]]:
        """Launch what is pending and look at the lanes' ends until one is reached, or until `until_s`.

        The host does not sleep while anything runs: it would wake late, on a core that has slowed down.
        """
        lanes = self.lanes
        while True:
            ended = [n for n in self._flying if lanes[n].pending is None and lanes[n].flights[0].end.query()]
            if ended:
                return [(n, self._finish(n)) for n in ended]
            now = self.now()
            if now >= until_s:
                return []
            for n in self._flying:
                lane = lanes[n]
                if lane.pending is not None:
                    self._pump(lane)
                elif lane.may_go_ahead():
                    self._launch_ahead(lane)
            if not self._flying and until_s - now > NAP_S:
                time.sleep(min(until_s - now - NAP_S / 2, 0.01))

    def _finish(self, n: int) -> float:
        """Read the tokens of a finished launch; its end is when the host has them."""
        lane = self.lanes[n]
        self._flying.remove(n)
        flight = lane.flights.popleft()
        seen = self.now()
        if lane.work.whole:
            for i, token in zip(flight.batch.yields, flight.read.tolist(), strict=False):
                self._last_token[i] = token
        end = self.now()
        gpu_s = flight.start.elapsed_time(flight.end) / 1e3
        lane.seen |= {"gpu_s": gpu_s, "read_s": end - seen, "rows": flight.batch.rows}
        lane.spare.append(flight)
        return end

    def measured(self, lane: int) -> dict[str, Any]:
        """Seconds of planning, launching, reading and of the GPU, and the rows run, of the last launch on the lane."""
        return self.lanes[lane].seen

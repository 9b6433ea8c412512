"""Launches on a real GPU: each lane has buffers, streams on its SM sets, decode graphs and piecewise prompt graphs.

There is one host thread. A pass with prompts beside another lane is launched layer by layer from `wait`, between looks
at the other lane, so that a decode step that ends meanwhile is answered at once. Of decode steps that start at once,
one is queued on the GPU behind the one that runs: its input is the token sampled last, which the host has not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from calib.executor.batch import lay_out
from calib.executor.buckets import ASIDE, decode_bucket, eager_passes, fitting, row_bucket, wanted
from calib.executor.flights import Flight, Lane
from calib.executor.pages import PagePool
from calib.executor.place import Place
from calib.executor.work import Work
from calib.lab import GpuLab
from sim.engine.layout import DECODE_LANE
from sim.errors import CalibrationError

NAP_S = 2e-3  # the host sleeps where nothing is due for longer
CAPTURE_S = 20.0  # most seconds that capturing for one policy takes
SPARE_BYTES = 4 << 30


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
        self._limits, self._backend = (self.rows, self.sequences, num_blocks + self.sequences + 1), backend
        self._graph_pool = self.torch.cuda.graph_pool_handle()
        self._places: dict[int, Place] = {}
        self.lanes: list[Lane] = []
        self.use(lanes, fused)
        self._last_token: dict[int, int] = {}
        self._flying: list[int] = []
        self._zero = 0.0

    def use(self, lanes: int, fused: str) -> None:
        """Serve a policy of so many lanes, with this kernel for fused steps."""
        self._single, self._fused = lanes == 1, fused
        self.lanes += [Lane(self.torch, self.sequences) for _ in range(lanes - len(self.lanes))]
        for slot in range(lanes):
            self._place(slot)
        for place in self._places.values():
            place.attention.fused = fused

    def _place(self, slot: int) -> Place:
        if slot not in self._places:
            self._places[slot] = Place(
                self.lab, slot, self._limits, self.pool, self._graph_pool, self._backend, self._fused
            )
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
        captured, missing, refused = 0, 0, 0
        for keys, has, capture in (
            (decodes, Place.has_decodes, Place.capture_decodes),
            (pieces, Place.has_pieces, Place.capture_pieces),
        ):
            for slot, sms, size in keys:
                place = self._place(slot)
                if has(place, sms, size):
                    continue
                full = self.torch.cuda.mem_get_info()[0] < SPARE_BYTES
                if full or time.perf_counter() - began > CAPTURE_S:
                    missing += 1
                    continue
                try:
                    capture(place, self._stream(0 if slot == ASIDE else slot, sms), sms, size)
                    captured += 1
                except RuntimeError:  # such a pass is launched eagerly
                    refused += 1
        for slot, sms, rows in eager_passes(works, pairs):
            place = self._place(slot)
            in_time = time.perf_counter() - began < CAPTURE_S
            if in_time and rows <= self.rows and not place.holds(rows):
                place.touch(self._stream(0 if slot == ASIDE else slot, sms), sms, rows)
        self.torch.cuda.synchronize()
        return {
            "decode_graphs": len(decodes),
            "piecewise_graphs": len(pieces),
            "graphs_captured": captured,
            "graphs_missing": missing,
            "graphs_refused": refused,
            "capture_s": round(time.perf_counter() - began, 2),
            "memory_left_gib": round(self.torch.cuda.mem_get_info()[0] / 2**30, 1),
        }

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

    def _pump(self, lane: Lane) -> None:
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

    def _plan_decodes(self, place: Place, flight: Flight, work: Work) -> str:
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

    def _decode_step(self, lane: Lane, flight: Flight, kind: str, stream: Any) -> None:
        flight.start.record(stream)
        if kind == "graph":
            lane.place.decode_graphs[lane.work.sms][flight.batch.rows].replay()
        else:
            lane.place.decode_pass(flight.batch.rows)
        self._finish_launch(lane, flight, stream)

    def _launch_ahead(self, lane: Lane) -> None:
        """Queue the next of the steps that start at once behind the one that runs."""
        flight, step = lane.spare.pop(), lane.chain.later(lane.launched)
        lane.launched += 1
        stream = self._stream(step.lane, step.sms)
        with self.torch.cuda.stream(stream):
            kind = self._plan_decodes(lane.place, flight, step)
            flight.sent.record(stream)
            self._decode_step(lane, flight, kind, stream)
        lane.flights.append(flight)

    def _plan_prompts(self, place: Place, flight: Flight, work: Work) -> str:
        if work.layers[0] == 0:
            size = place.holds(work.rows) or work.rows
            place.batch = lay_out(work, self.pool, self._last_token, self.lab.model.vocab, size)
            place.forward.tables.send(place.batch)
            place.attention.plan(place.batch, 0, work.fused)
        flight.batch = place.batch
        return "piecewise" if place.has_pieces(work.sms, place.batch.rows) else "eager"

    def _prompt_pass(self, lane: Lane, flight: Flight, kind: str, stream: Any) -> Iterator[None]:
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

    def _finish_launch(self, lane: Lane, flight: Flight, stream: Any) -> None:
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
            ended = [n for n in self._flying if lanes[n].ended()]
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

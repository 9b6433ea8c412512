"""The bench of a real GPU: times kernels on its SM partitions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from calib import corun, cuda, energy, hostcost
from calib.analytic import expected_s
from calib.arena import Arena
from calib.bench import Pair, Side, Stagger
from calib.cuda import Probe
from calib.device import Meter, gpu_facts, require_idle
from calib.energy import REST_S, Drawn, Phased
from calib.graphs import captured
from calib.kernels.base import Kernel
from calib.kernels.tickets import Mix, Ran, run_mix
from calib.measure import Protocol, Sample
from calib.models import ModelShape
from calib.partition import (
    NORMAL,
    GreenContexts,
    LeakError,
    Mechanism,
    Partition,
    legal_sizes,
    prove,
    prove_split,
    whole_gpu,
)
from sim.errors import CalibrationError

SUSTAINED_WINDOW_S = 0.25
SPARE_BYTES = 6 << 30
HOST_LOOKS = 5  # runs that a host time is the mean of
L2_TURNS = 3  # bytes that a graph touches before it comes back to a buffer, in L2 sizes


class GpuLab:
    """A bench on CUDA device 0. Raises CalibrationError where the GPU, a library or a partition will not do."""

    def __init__(
        self,
        model: ModelShape,
        protocol: Protocol,
        seed: int,
        libsmctrl: str = "",
        meter: Meter | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.facts = gpu_facts(self.meter)
        if meter is None:  # else the caller has looked
            require_idle(self.meter, self.facts.name)
        self.model, self.protocol, self.seed = model, protocol, seed
        self.arena = arena or Arena(model, seed)
        self.torch = self.arena.torch
        self.torch.cuda.init()
        self.arena.fill()
        self.probe = Probe(self.facts.sms)
        self.mechanism: Mechanism = self._mechanism(libsmctrl)
        self.whole = (whole_gpu(self.facts.sms), whole_gpu(self.facts.sms, "all-b"))
        self._events: list[Any] = []
        self._proofs = self._prove()

    def _mechanism(self, libsmctrl: str) -> Mechanism:
        if not libsmctrl:
            return GreenContexts()
        from calib.libsmctrl import LibSmctrl

        version = self.torch._C._cuda_getDriverVersion()
        return LibSmctrl(libsmctrl, self.facts.sms, version)

    def _prove(self) -> list[dict[str, Any]]:
        """Make and prove every split; a split that the driver refuses is left out, a leaking one ends the run."""

        def smids(stream: Any) -> frozenset[int]:
            return self.probe.smids(stream.cuda_stream)

        prove(self.whole[0], smids)
        proofs: list[dict[str, Any]] = [
            {"partition": "all", "sms": self.facts.sms, "nsmid": self.probe.nsmid()}
        ]
        mechanism = self.mechanism
        self._splits: dict[int, tuple[Partition, Partition]] = {}
        for size in legal_sizes(mechanism.total, mechanism.minimum, mechanism.alignment):
            try:
                a, b = mechanism.split(size)
                prove_split(a, b, smids)
            except LeakError:
                raise
            except CalibrationError as error:
                proofs.append({"partition": str(size), "skip": str(error)})
                continue
            self._splits[a.sms] = (a, b)
            proofs.append(
                {"partition": f"{a.sms}/{b.sms}", "sms": a.sms, "seen": sorted(a.smids or ()), "shared": 0}
            )
        return proofs

    def splits(self) -> list[int]:
        """Sizes that side A can have, ascending."""
        return sorted(self._splits)

    def sizes(self) -> list[int]:
        """Every partition size there is: sides A, sides B and the whole GPU, ascending."""
        sides = {side.sms for split in self._splits.values() for side in split if side.sms}
        return sorted(sides | {self.facts.sms})

    def proofs(self) -> list[dict[str, Any]]:
        return self._proofs

    def description(self) -> dict[str, Any]:
        from calib.kernels.ops import ops_of

        return {
            "mechanism": self.mechanism.name,
            "flashinfer": self.arena.flashinfer_state,
            "minimum_sms": self.mechanism.minimum,
            "alignment_sms": self.mechanism.alignment,
            "operators": dict(ops_of(self.arena).source),
            "kv_cache_tokens": int(self.arena.kv.shape[0] * 16),
            "programmatic_dependent_launch": False,
            "library_sm_count": "whole GPU",  # cuBLAS and FlashInfer plan for all SMs, also in a partition
        }

    def clock(self) -> float:
        return time.perf_counter()

    def healthy(self) -> bool:
        try:
            self.torch.cuda.synchronize()
        except Exception:  # a sticky CUDA error: only a new process helps
            return False
        return True

    def partition(self, sms: int, remainder: bool = False) -> Partition:
        """A partition of exactly `sms` SMs; with `remainder`, at the far end of the GPU."""
        if sms == self.facts.sms:
            return self.whole[int(remainder)]
        near, far = self._splits.get(sms), self._splits.get(self.facts.sms - sms)
        if far is not None and (remainder or near is None):
            return far[1]
        if near is None:
            raise CalibrationError(f"No partition has {sms} SMs; the sizes are {self.sizes()}.")
        return near[0]

    def events(self, count: int, first: int = 0) -> list[Any]:
        """`count` timing events out of a pool, from `first` on."""
        while len(self._events) < first + count:
            self._events.append(self.torch.cuda.Event(enable_timing=True))
        return self._events[first : first + count]

    def capture(self, kernel: Kernel, launches: int) -> Any:
        """A CUDA graph of `launches` runs on the current stream, going round the kernel's copies."""

        def launch() -> None:
            for i in range(launches):
                kernel.run(i)

        return captured(self.torch, launch)

    def ready(self, kernel: Kernel, sms: int, slot: int, padded: bool) -> None:
        """Prepare on the current stream and run twice, so that lazy loading stays out of what follows."""
        if self.torch.cuda.mem_get_info()[0] < SPARE_BYTES:
            self.torch.cuda.empty_cache()  # graphs that are gone leave their pools behind
        kernel.prepare(self.arena, slot, padded)
        kernel.run(0)
        kernel.run(1)
        self.torch.cuda.current_stream().synchronize()

    def replays(self, graph: Any, stream: Any, count: int, launches: int) -> Sample:
        """Time `count` replays back to back; seconds of one launch each."""
        events = self.events(count + 1)
        events[0].record(stream)
        for event in events[1:]:
            graph.replay()
            event.record(stream)
        reading = self.meter.read()
        stream.synchronize()
        times = [a.elapsed_time(b) / 1e3 / launches for a, b in pairwise(events)]
        return Sample(times, "graph", readings=[reading])

    def graphed(self, kernel: Kernel, sms: int, slot: int, stream: Any) -> tuple[Any, int, float]:
        """(graph, launches in it, seconds of a replay) of a prepared kernel, on the current stream."""
        cold = math.ceil(L2_TURNS * self.facts.l2_bytes / max(kernel.bytes, 1.0))
        launches = self.protocol.per_replay(expected_s(kernel, self.facts, sms), kernel.copies, cold)
        graph = self.capture(kernel, launches)
        self.replays(graph, stream, 1, launches)  # the first replay uploads the graph
        return graph, launches, self.replays(graph, stream, 1, launches).median_s * launches

    def time(self, kernel: Kernel, sms: int, launch: str = "graph", priority: str = NORMAL) -> Sample:
        """Time `kernel` alone on `sms` SMs, launched as a CUDA graph, eagerly, or from a filled queue."""
        if launch == "queued":
            return self._queued(kernel)
        stream = self.partition(sms).stream(priority)
        with self.torch.cuda.stream(stream):
            self.ready(kernel, sms, 0, padded=launch == "graph")
            if launch == "eager":
                return self._eager(kernel, stream)
            graph, launches, replay_s = self.graphed(kernel, sms, 0, stream)
            for _ in range(self.protocol.warm_replays(replay_s)):
                graph.replay()
            return self.replays(graph, stream, self.protocol.samples(replay_s), launches)

    def _eager(self, kernel: Kernel, stream: Any) -> Sample:
        first = time.perf_counter()
        kernel.run(2)
        stream.synchronize()
        once = time.perf_counter() - first
        count = self.protocol.samples(once)
        for i in range(min(self.protocol.warm_replays(once), count)):
            kernel.run(i)
        events = self.events(count + 1)
        events[0].record(stream)
        start = time.perf_counter()
        for i, event in enumerate(events[1:]):
            kernel.run(i)
            event.record(stream)
        host_s = (time.perf_counter() - start) / count
        reading = self.meter.read()
        stream.synchronize()
        times = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        return Sample(times, "eager", host_s, [reading])

    def _queued(self, kernel: Kernel) -> Sample:
        """Eager launches on the default stream, enqueued while the GPU is held, so that the host is not timed."""
        stream = self.torch.cuda.default_stream()
        with self.torch.cuda.stream(stream):
            self.ready(kernel, self.facts.sms, 0, padded=False)
            start = time.perf_counter()
            for i in range(HOST_LOOKS):
                kernel.run(i)
            host_s = (time.perf_counter() - start) / HOST_LOOKS
            stream.synchronize()
            once = time.perf_counter()
            kernel.run(0)
            stream.synchronize()
            once = time.perf_counter() - once
            count = self.protocol.samples(once)
            cycles = int((count + 2) * 2 * host_s * 1e6 * (self.facts.max_sm_mhz or 2000))
            events = self.events(count + 1)
            cuda.hold(stream.cuda_stream, cycles)
            kernel.run(count)  # warms, and fills the gap behind the hold
            events[0].record(stream)
            for i, event in enumerate(events[1:]):
                kernel.run(i)
                event.record(stream)
            reading = self.meter.read()
            stream.synchronize()
        times = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        return Sample(times, "queued", host_s, [reading])

    def error(self, kernel: Kernel) -> float:
        """Relative error of `kernel` against float32 on the whole GPU."""
        if getattr(kernel, "launch", "") == "queued":
            stream = self.torch.cuda.default_stream()
        else:
            stream = self.whole[0].stream()
        with self.torch.cuda.stream(stream):
            kernel.prepare(self.arena)
            error = kernel.reference_error()
            self.torch.cuda.synchronize()
        return error

    def replayed_error(self, kernel: Kernel) -> float:
        """The same of what a second replay of a captured graph leaves behind."""
        stream = self.whole[0].stream()
        with self.torch.cuda.stream(stream):
            self.ready(kernel, self.facts.sms, 0, padded=False)
            graph = self.torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                held = kernel.run(0)
            finally:
                graph.capture_end()
            for _ in range(2):
                for part in held if isinstance(held, tuple) else (held,):
                    part.fill_(float("nan"))
                graph.replay()
            error = kernel.reference_error(held)
            self.torch.cuda.synchronize()
        return error

    def sustained(self, kernel: Kernel, sms: int, launch: str, seconds: float) -> list[tuple[float, Sample]]:
        """Run for `seconds` without a pause; a sample about every quarter second, with its time since the start."""
        stream = self.partition(sms).stream()
        with self.torch.cuda.stream(stream):
            self.ready(kernel, sms, 0, padded=launch == "graph")
            graph, launches, replay_s = self.graphed(kernel, sms, 0, stream)
            count = max(2, int(SUSTAINED_WINDOW_S / replay_s))
            start, samples = self.clock(), []
            if launch == "queued":
                raise CalibrationError("A kernel that no graph holds is not run for long.")
            while (elapsed := self.clock() - start) < seconds:
                if launch == "graph":
                    samples.append((elapsed, self.replays(graph, stream, count, launches)))
                else:
                    samples.append((elapsed, self._eager(kernel, stream)))
            return samples

    def pair(self, a: Side, b: Side, mode: str) -> Pair:
        """Run both sides at once; `mode`: disjoint, half, whole (overlapping sets) or streams."""
        return corun.pair(self, a, b, mode)

    def stagger(self, a: Side, b: Side, mode: str, delay_s: float, share: float) -> Stagger:
        """Run side a once while side b starts `delay_s` later and lasts about `share` of a's time."""
        return corun.stagger(self, a, b, mode, delay_s, share)

    def draw(self, sides: Sequence[Side], mode: str, seconds: float, rest_s: float = REST_S) -> Drawn:
        """Watts, clocks and times of one side, or of two side by side, in a run of `seconds` after a rest."""
        if len(sides) == 1:
            return energy.alone(self, sides[0], seconds, rest_s)
        return energy.beside(self, sides[0], sides[1], mode, seconds, rest_s)

    def paced(self, side: Side, gap_s: float, seconds: float) -> Drawn:
        """The same of one side that waits for the host, and `gap_s` more, before every launch."""
        return energy.paced(self, side, gap_s, seconds)

    def phases(self, sides: Sequence[Side], order: Sequence[tuple[int, float]]) -> Phased:
        """Times and readings of kernels in turn: (which of `sides`, for how many seconds) each."""
        return energy.phases(self, sides, order)

    def mix(self, mix: Mix, sms: int) -> Ran:
        """Run synthetic CTAs on `sms` SMs."""
        return run_mix(self, mix, sms)

    def host_costs(self, label: str, batch: int) -> tuple[dict[str, Any], Sample]:
        """Measure the host cost called `label`; returns row columns and times."""
        return hostcost.measure(self, label, batch)

    def launched(self, kernels: list[Kernel]) -> list[list[dict[str, Any]]]:
        """The CUDA kernels that one run of each starts: name, grid, block, shared memory."""
        from calib.profiling import launched

        return launched(self, kernels)

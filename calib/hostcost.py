"""What the host pays around a step: launches, graph replays, planning, switching partitions, reading tokens back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from calib.kernels.attention import DecodeAttention, PrefillAttention
from calib.kernels.base import Kernel
from calib.kernels.elementwise import Norm
from calib.kernels.layer import Step
from calib.measure import Sample
from sim.errors import CalibrationError

if TYPE_CHECKING:
    from calib.lab import GpuLab

REPEATS = 30
CONTEXT = 1024
LABELS = (
    "launch",  # one small kernel, eager, launch queue not full
    "graph_replay",  # a whole decode step's graph
    "graph_capture",  # capturing and instantiating it
    "plan_decode",  # FlashInfer plan() for the batch
    "plan_prefill",
    "partition_hop",  # replay on one partition, event, wait on the other, replay: device time of the hop
    "read_tokens",  # copy sampled tokens to the host and wait
    "event_sync",  # record an event on an idle stream and wait for it
)


def measure(lab: GpuLab, label: str, batch: int) -> tuple[dict[str, Any], Sample]:
    """Times of the host cost `label` at `batch` sequences of 1024 tokens; columns of its row."""
    if label not in LABELS:
        raise CalibrationError(f"There is no host cost '{label}'.")
    stream = lab.whole[0].stream()
    with lab.torch.cuda.stream(stream):
        if label == "partition_hop":
            times = _hop(lab)
        else:
            call, after = _call(lab, label, batch)
            call()
            times = _timed(call, after or stream.synchronize)
    columns = {"kind": "host", "label": label, "decode_batch": batch, "context_sum": batch * CONTEXT}
    return columns, Sample(times, "host")


def _timed(call: Callable[[], Any], after: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    times = []
    for _ in range(repeats):
        after()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    after()
    return times


def _call(lab: GpuLab, label: str, batch: int) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """(what is timed, what is done untimed between repeats)."""
    torch, arena = lab.torch, lab.arena
    contexts = [CONTEXT] * batch
    stream = torch.cuda.current_stream()
    if label == "launch":
        kernel: Kernel = Norm(lab.model, batch)
        kernel.prepare(arena)
        return lambda: kernel.run(0), None
    if label == "plan_decode":
        decode = DecodeAttention(lab.model, contexts)
        decode.prepare(arena, 0, padded=True)
        return lambda: decode.plan(arena, 0, True, decode.pages), None
    if label == "plan_prefill":
        prefill = PrefillAttention(lab.model, [512] * min(batch, 16), [512] * min(batch, 16))
        prefill.prepare(arena)
        return lambda: prefill.plan(arena, 0, False, prefill.pages), None
    if label == "read_tokens":
        tokens = arena.scratch(0, "tokens", (batch,), torch.int64)
        return lambda: tokens.tolist(), None
    if label == "event_sync":
        event = torch.cuda.Event()
        return lambda: (event.record(stream), event.synchronize()), None
    step = Step(lab.model, contexts=contexts, layers=arena.layers, head=True)
    lab.ready(step, lab.facts.sms, 0, padded=True)
    if label == "graph_capture":
        return lambda: lab.capture(step, 1), None
    graph = lab.capture(step, 1)
    return graph.replay, None


def _hop(lab: GpuLab) -> list[float]:
    """Device seconds from the end of a kernel on one partition to the end of a dependent one on the other,
    less the second kernel's own time."""
    size = lab.splits()[len(lab.splits()) // 2]
    streams = [side.stream() for side in lab.mechanism.split(size)]
    kernels, graphs = [Norm(lab.model, 1), Norm(lab.model, 1)], []
    for slot, (kernel, stream) in enumerate(zip(kernels, streams, strict=True)):
        with lab.torch.cuda.stream(stream):
            lab.ready(kernel, size, slot, padded=False)
            graphs.append(lab.capture(kernel, 1))
    times = []
    for _ in range(REPEATS):
        first, middle, own, last = lab.events(4)
        with lab.torch.cuda.stream(streams[0]):
            graphs[0].replay()
            first.record(streams[0])
        streams[1].wait_event(first)
        with lab.torch.cuda.stream(streams[1]):
            graphs[1].replay()
            middle.record(streams[1])
            lab.torch.cuda.synchronize()
            own.record(streams[1])
            graphs[1].replay()
            last.record(streams[1])
        lab.torch.cuda.synchronize()
        times.append(max(0.0, first.elapsed_time(middle) - own.elapsed_time(last)) / 1e3)
    return times

"""The parent's side: starts a process a GPU, sends every rank the same points, and puts their answers together.

A point that hangs or breaks a rank costs its own time limit only: the processes are ended and started anew.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calib.collectives import rank as ranks
from calib.collectives.rank import Place
from calib.collectives.timing import Piece
from calib.measure import Protocol, Sample
from calib.models import ModelShape
from calib.sweep import CARD
from sim.errors import CalibrationError

START_S = 90.0
POINT_S = 25.0
LOAD_S = 60.0  # more for the first point of a model: its weights are drawn
GRACE_S = 3.0  # for the other ranks, once one has failed
FAMILY = ("do", "kind", "method", "layout", "sms", "max_ctas")  # keys of points that break alike
PATIENCE = 2
STICKY = ("CUDA", "Accelerator", "NCCL", "nccl", "Dist")  # pieces of reasons after which a rank is of no use


class Crew:
    """`size` processes, one a GPU of `visible` (NVML indices), or on the CPU."""

    def __init__(
        self,
        visible: Sequence[int],
        seed: int,
        protocol: Protocol,
        model: str,
        cpu: bool = False,
        point_s: float = POINT_S,
    ) -> None:
        self.visible, self.seed, self.protocol, self.model = list(visible), seed, protocol, model
        self.size, self.cpu, self.point_s = len(visible), cpu, point_s
        self.spent_s = 0.0
        self._members: list[tuple[Any, Any]] = []
        self._loaded: set[str] = set()
        self._broken: Counter[tuple[Any, ...]] = Counter()
        self.starts = 0
        self.facts = self._start()

    def _start(self) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        rendezvous = f"tcp://127.0.0.1:{_free_port()}"
        self._loaded.clear()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            visible = [self.visible[(rank + i) % self.size] for i in range(self.size)]
            place = Place(
                rank, self.size, rendezvous, visible, self.seed, self.protocol, self.model, self.cpu
            )
            process = context.Process(target=ranks.main, args=(theirs, place), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self.starts += 1
        answers = self._answers(START_S)
        cards = [str(answer["gpu"].uuid)[:CARD] for answer in answers if "gpu" in answer]
        first = dict(answers[0])
        return {**first, "group": {**first["group"], "cards": cards}} if cards else first

    def ask(self, point: Mapping[str, Any]) -> list[list[Piece]]:
        """Every rank's pieces of `point`; raises CalibrationError with the reason, ready for the next point."""
        family = tuple(str(point.get(key)) for key in FAMILY)
        if self._broken[family] >= PATIENCE:
            raise CalibrationError(f"Left out: {PATIENCE} points of the same kind broke their processes.")
        if not self._members:
            self._start()
        limit = self.point_s
        if "model" in point and point["model"] not in self._loaded:
            limit += LOAD_S
        for _, pipe in self._members:
            pipe.send(dict(point))
        try:
            answers = self._answers(limit)
        except CalibrationError:
            self._broken[family] += not self._members
            raise
        if "model" in point:
            self._loaded.add(point["model"])
        return answers

    def _answers(self, limit_s: float) -> list[Any]:
        """One answer a rank. If some fail and others do not answer, or a rank is of no use any more, all end."""
        end = time.monotonic() + limit_s
        found: list[Any] = [None] * self.size
        waiting, reasons = set(range(self.size)), []
        while waiting and time.monotonic() < end:
            for rank in sorted(waiting):
                process, pipe = self._members[rank]
                try:
                    if not pipe.poll(0.001 if len(waiting) > 1 else 0.05):
                        continue
                    state, value = pipe.recv()
                except (EOFError, OSError):
                    state, value = "error", f"rank {rank} ended (exit code {process.exitcode}), CUDA or NCCL"
                waiting.discard(rank)
                if state == "error":
                    reasons.append(value)
                    end = min(end, time.monotonic() + GRACE_S)
                found[rank] = value
        if waiting and not reasons:
            reasons.append(f"No answer of rank {min(waiting)} within {limit_s:.0f} s")
        if reasons:
            if waiting or len(reasons) < self.size or any(word in r for r in reasons for word in STICKY):
                self.close()
            raise CalibrationError(reasons[0])
        return found

    def close(self) -> None:
        """End the processes: by word where they listen, by force where they do not."""
        for process, pipe in self._members:
            with contextlib.suppress(OSError, ValueError):
                pipe.send(None)
            process.join(0.5)
        for process, pipe in self._members:
            if process.is_alive():
                process.kill()
            process.join(5)
            pipe.close()
        self._members = []


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class CrewLab:
    """The bench of several GPUs: what sweeps of collectives need of one."""

    def __init__(self, model: ModelShape, protocol: Protocol, crew: Any) -> None:
        self.model, self.protocol, self.crew = model, protocol, crew
        self.facts = crew.facts["gpu"]

    def clock(self) -> float:
        return time.perf_counter() + float(self.crew.spent_s)

    def sizes(self) -> list[int]:
        return [self.facts.sms]

    def proofs(self) -> list[dict[str, Any]]:
        return []

    def description(self) -> dict[str, Any]:
        return {"mechanism": "green"}

    def group(self) -> dict[str, Any]:
        """GPUs, NCCL's version and settings, and the links between the GPUs."""
        return {"gpus": self.crew.size, **self.crew.facts["group"]}

    def healthy(self) -> bool:
        return True  # a crew that broke is started anew

    def ask(self, point: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Rows of a point, without origin."""
        answers = self.crew.ask(point)
        if len(set(map(len, answers))) > 1:  # what a profiler saw on each rank
            answers = answers[:1]
        return [row_of(list(pieces), self.crew.size) for pieces in zip(*answers, strict=True)]


def row_of(pieces: Sequence[Piece], size: int) -> dict[str, Any]:
    """One row of what the ranks measured of it: sample by sample the longest of the ranks' times."""
    timed = [piece for piece in pieces if piece.times_s]
    first = timed[0] if timed else pieces[0]
    columns = {"gpus": size, **first.columns}
    if not timed:
        return columns  # what was looked at, or why nothing was timed
    if any("skip" in piece.columns for piece in pieces):
        return {"gpus": size, **next(piece.columns for piece in pieces if "skip" in piece.columns)}
    if first.alone or len({len(piece.times_s) for piece in timed}) > 1:
        slowest = max(timed, key=lambda piece: float(np.median(piece.times_s)))
        times, alone = slowest.times_s, slowest.alone
    else:
        times, alone = np.max([piece.times_s for piece in timed], axis=0).tolist(), []
    hosts = [piece.host_s for piece in timed if piece.host_s is not None]
    readings = [reading for piece in timed for reading in piece.readings]
    sample = Sample(times, first.launch, max(hosts, default=None), readings)
    return {**columns, **sample.columns(), "alone_s": float(np.median(alone)) if alone else None}


def visible_gpus() -> list[int]:
    """NVML indices of the GPUs that PyTorch sees; raises CalibrationError where there are fewer than two."""
    import os

    from calib.device import import_torch

    torch = import_torch()
    count = torch.cuda.device_count()
    if count < 2:
        raise CalibrationError(
            f"Collectives need two or more GPUs of one host, and PyTorch sees {count or 'none'}."
        )
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [part.strip() for part in said.split(",") if part.strip()]
    if named and all(part.isdigit() for part in named):
        return [int(part) for part in named][:count]
    return list(range(count))

"""Benches without GPUs: a crew that answers from formulas, and a lab on the CPU for ranks in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calib.arena import Arena
from calib.collectives.sizes import bus_factor
from calib.collectives.timing import Piece
from calib.fake import FACTS
from calib.measure import Protocol
from calib.models import ModelShape
from calib.partition import Partition

FAKE_GPUS = 2
LATENCY_S, BUS_GB_S, NOISE = 8e-6, 350.0, 0.01
TINY = ModelShape("tiny", 4, 256, 4, 2, 64, 512, 1000)


class FakeCrew:
    """The surface of `calib.collectives.crew.Crew`: latency plus bytes over a rate, with seeded noise."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._noise = size, np.random.default_rng(seed)
        self.facts = {"gpu": FACTS, "group": {"nccl": "fake", "link": {"links": 18, "gb_s_one_way": 450.0}}}
        self.spent_s = 0.0

    def ask(self, point: Mapping[str, Any]) -> list[list[Piece]]:
        kind = str(point.get("kind", "allreduce"))
        size = float(point.get("message_bytes", 1 << 20))
        seconds = LATENCY_S + size * bus_factor(kind, self.size) / (BUS_GB_S * 1e9)
        columns = {
            k: point[k] for k in ("message_bytes", "piece_bytes", "sms", "max_ctas", "layers") if k in point
        }
        columns |= {"kind": kind, "label": point.get("label", "fake")}
        made = []
        for rank in range(self.size):
            pieces = []
            for launch in point.get("launches", ("graph", "eager")):
                times = seconds * np.exp(NOISE * self._noise.standard_normal(10)) * (1 + 0.01 * rank)
                pieces.append(Piece(dict(columns), [float(t) for t in times], launch))
                self.spent_s += 1e-2
            made.append(pieces)
        return made

    def close(self) -> None:
        pass


class CpuLab:
    """What ranks on the CPU compute with: an arena of a tiny model, whatever the point's model is called."""

    def __init__(self, model: ModelShape, protocol: Protocol, seed: int) -> None:
        self.model, self.protocol, self.facts = TINY, protocol, FACTS
        self.arena = Arena(TINY, seed, device="cpu", kv_bytes=1 << 24)
        self.arena.fill()
        self.torch = self.arena.torch
        self.whole = (
            Partition("all", FACTS.sms, lambda _: None),
            Partition("all-b", FACTS.sms, lambda _: None),
        )

    def partition(self, sms: int, remainder: bool = False) -> Partition:
        return self.whole[int(remainder)]

    def ready(self, kernel: Any, sms: int, slot: int, padded: bool) -> None:
        kernel.prepare(self.arena, slot, padded)
        kernel.run(0)

    def time(self, kernel: Any, sms: int, launch: str = "graph") -> Any:
        import time

        from calib.measure import Sample

        kernel.prepare(self.arena)
        times = []
        for i in range(3):
            start = time.perf_counter()
            kernel.run(i)
            times.append(time.perf_counter() - start)
        return Sample(times, launch)

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
from calib.rows import as_neighbour

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
        return [self._pieces(point, rank) for rank in range(self.size)]

    def _pieces(self, point: Mapping[str, Any], rank: int) -> list[Piece]:
        if point["do"] == "kernels":
            return [
                Piece(
                    {"kind": kind, "message_bytes": size, "kernel": "nccl_fake", "grid": "16x1x1"},
                    [],
                    "eager",
                )
                for kind in point["kinds"]
                for size in point["sizes"]
            ]
        columns = self._columns(point)
        if point["do"] != "beside":
            return [Piece(dict(columns), self._times(point, rank), how) for how in self._launches(point)]
        compute = point["compute"]
        mine = {"kind": compute["kind"], "label": "fake", "sms": point["sms"]}
        theirs = {**columns, "sms": 132}
        mode = "streams" if point["sms"] == 132 else "disjoint"
        made = []
        for own, other in ((mine, theirs), (theirs, mine)):
            alone, slow = self._times(point, rank), [1.1 * t for t in self._times(point, rank)]
            made.append(Piece({**own, **as_neighbour({**other, "mode": mode})}, slow, "graph", alone=alone))
        return made

    def _columns(self, point: Mapping[str, Any]) -> dict[str, Any]:
        names = ("message_bytes", "piece_bytes", "sms", "max_ctas", "layers", "allreduces")
        columns = {name: point[name] for name in names if name in point}
        if "method" in point:
            label = f"{point['method']}/{point['layout']}"
            return {**columns, "layers": point.get("layers", 1), "kind": "kv_transfer", "label": label}
        return {**columns, "kind": str(point.get("kind")), "label": "fake"}

    def _launches(self, point: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(point.get("launches", ("eager", "graph")))

    def _times(self, point: Mapping[str, Any], rank: int) -> list[float]:
        kind, size = str(point.get("kind", "sendrecv")), float(point.get("message_bytes", 1 << 20))
        seconds = LATENCY_S + size * bus_factor(kind, self.size) / (BUS_GB_S * 1e9)
        seconds *= point.get("layers", 1)
        self.spent_s += 1e-2
        times = seconds * np.exp(NOISE * self._noise.standard_normal(10)) * (1 + 0.01 * rank)
        return [float(t) for t in times]

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

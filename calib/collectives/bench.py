"""The bench of one rank: a GPU lab whose partitions are made and proved when they are first asked for."""

from __future__ import annotations

from typing import Any

from calib.arena import Arena
from calib.device import Meter
from calib.lab import GpuLab
from calib.measure import Protocol
from calib.models import ModelShape
from calib.partition import Partition, prove, prove_split
from sim.errors import CalibrationError


class RankLab(GpuLab):
    """A GPU lab on the process's device 0, for a model that may fill most of the memory."""

    def __init__(
        self, model: ModelShape, protocol: Protocol, seed: int, meter: Meter, layers: int, kv_bytes: int
    ) -> None:
        arena = Arena(model, seed, layers=layers, kv_bytes=kv_bytes)
        super().__init__(model, protocol, seed, meter=meter, arena=arena)

    def _prove(self) -> list[dict[str, Any]]:
        self._splits = {}
        prove(self.whole[0], self._smids)
        return []

    def _smids(self, stream: Any) -> frozenset[int]:
        return self.probe.smids(stream.cuda_stream)

    def partition(self, sms: int, remainder: bool = False) -> Partition:
        if sms < self.facts.sms and sms not in self._splits and self.facts.sms - sms not in self._splits:
            small = min(sms, self.facts.sms - sms)
            a, b = self.mechanism.split(small)
            if a.sms != small:
                raise CalibrationError(f"No partition has {small} SMs: the next one has {a.sms}.")
            prove_split(a, b, self._smids)
            self._splits[a.sms] = (a, b)
        return super().partition(sms, remainder)

"""Where cases run: a real GPU, or a dry run on the price tables."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from calib.executor.dry import DryDevice
from sim.cost.profiled import ProfiledCost

DRY_BLOCKS = 20_000
KV_BYTES = 80 << 30
# the KV of a token may be several times as large (no grouped heads): the pool gets what the weights leave
LARGE_KV_BYTES, LARGE_TOKEN_BYTES = 100 << 30, 1 << 18
TICK_S = 0.25  # the energy counter moves at least so often


class Bench(Protocol):
    """Makes devices of `num_blocks` KV blocks of 16 tokens."""

    num_blocks: int

    def device(self, lanes: int, rows: int, sequences: int, fused: str) -> Any:
        """A device for a policy of so many lanes with steps of so many rows and sequences, and this kernel for mixed
        attention (`calib.executor.modes`)."""

    def energy_j(self) -> float:
        """Reading of the energy counter as it moves; NaN without one."""

    def quiet(self) -> AbstractContextManager[None]:
        """Keep the host from disturbing a run."""

    def healthy(self) -> bool:
        """Can another case run?"""

    def facts(self) -> dict[str, Any]:
        """What was measured on what."""


class GpuBench:
    """CUDA device 0 with random weights of the model. Raises CalibrationError where it will not do."""

    def __init__(self, model: str, seed: int, backend: str = "fa3") -> None:
        from calib.arena import Arena
        from calib.device import Meter, gpu_facts, require_idle
        from calib.executor.host import QuietHost
        from calib.lab import GpuLab
        from calib.measure import SMOKE
        from calib.models import model_shape

        shape = model_shape(model)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        board = board_index(visible)
        meter = Meter(board)
        require_idle(meter, gpu_facts(meter).name)
        large = shape.kv_bytes_per_token * shape.layers > LARGE_TOKEN_BYTES
        arena = Arena(shape, seed, kv_bytes=LARGE_KV_BYTES if large else KV_BYTES)
        self._lab, self._backend = GpuLab(shape, SMOKE, seed, meter=meter, arena=arena), backend
        self._host, self._device = QuietHost(board), None
        self.num_blocks = self._lab.arena.kv.shape[0] // self._lab.arena.layers - 1

    def device(self, lanes: int, rows: int, sequences: int, fused: str) -> Any:
        """The GPU's lanes; buffers and graphs are those of the policy before where they are large enough."""
        from calib.executor.gpu import GpuDevice

        held: Any = self._device
        if held is None or rows > held.rows or sequences > held.sequences:
            self._device = held = None
            self._lab.torch.cuda.empty_cache()
            self._device = held = GpuDevice(
                self._lab, lanes, self.num_blocks, rows, sequences, self._backend, fused
            )
        held.use(lanes, fused)
        return held

    def energy_j(self) -> float:
        """NVML's counter, read as it moves: it does so some ten times a second."""
        first = self._lab.meter.energy_j()
        until = time.perf_counter() + TICK_S
        while (now := self._lab.meter.energy_j()) == first and time.perf_counter() < until:
            pass
        return now

    def quiet(self) -> AbstractContextManager[None]:
        """One core of its own, and no collection of garbage."""
        return self._host

    def healthy(self) -> bool:
        """No CUDA error that sticks."""
        return self._lab.healthy()

    def facts(self) -> dict[str, Any]:
        """GPU, driver, libraries, partitions, back ends, host."""
        lab = self._lab
        return {
            "model": lab.model.name,
            "gpu": lab.facts.as_dict(),
            "bench": lab.description(),
            "host": self._host.facts(),
        }


def board_index(visible: str) -> int:
    """NVML's number of CUDA device 0: it counts the GPUs that CUDA_VISIBLE_DEVICES hides, too (by number only)."""
    first = visible.split(",")[0].strip()
    return int(first) if first.isdigit() else 0


class DryBench:
    """No GPU: launches take what the price tables of `cost` say of them alone."""

    def __init__(self, cost: ProfiledCost) -> None:
        self.num_blocks = min(DRY_BLOCKS, cost.memory().num_blocks * 9 // 10)  # beside the largest steps

    def device(self, lanes: int, rows: int, sequences: int, fused: str) -> Any:
        """A clock that jumps."""
        return DryDevice()

    def energy_j(self) -> float:
        """There is no counter."""
        return float("nan")

    def quiet(self) -> AbstractContextManager[None]:
        """Nothing runs."""
        return nullcontext()

    def healthy(self) -> bool:
        """Always."""
        return True

    def facts(self) -> dict[str, Any]:
        """Says that nothing was measured."""
        return {"gpu": {"name": "none: a dry run on the price tables"}}

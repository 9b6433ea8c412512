"""Where cases run: a real GPU, or a dry run on the price tables."""

from __future__ import annotations

from typing import Any, Protocol

from calib.executor.dry import DryDevice

DRY_BLOCKS = 20_000


class Bench(Protocol):
    """Makes devices of `num_blocks` KV blocks of 16 tokens."""

    num_blocks: int

    def device(self, lanes: int, rows: int, sequences: int) -> Any:
        """A device for a policy of so many lanes with steps of so many rows and sequences."""

    def energy_j(self) -> float:
        """Reading of the energy counter; NaN without one."""

    def facts(self) -> dict[str, Any]:
        """What was measured on what."""


class GpuBench:
    """CUDA device 0 with random weights of the model. Raises CalibrationError where it will not do."""

    def __init__(self, model: str, seed: int, backend: str = "fa3") -> None:
        from calib.lab import GpuLab
        from calib.measure import SMOKE
        from calib.models import model_shape

        self._lab, self._backend = GpuLab(model_shape(model), SMOKE, seed), backend
        self.num_blocks = self._lab.arena.kv.shape[0] // self._lab.arena.layers - 1

    def device(self, lanes: int, rows: int, sequences: int) -> Any:
        """The GPU's lanes, with fresh buffers."""
        from calib.executor.gpu import GpuDevice

        return GpuDevice(self._lab, lanes, self.num_blocks, rows, sequences, self._backend)

    def energy_j(self) -> float:
        """NVML's counter."""
        return self._lab.meter.energy_j()

    def facts(self) -> dict[str, Any]:
        """GPU, driver, libraries, partitions, back ends."""
        lab = self._lab
        return {"model": lab.model.name, "gpu": lab.facts.as_dict(), "bench": lab.description()}


class DryBench:
    """No GPU: launches take what the price tables say of them alone."""

    num_blocks = DRY_BLOCKS

    def device(self, lanes: int, rows: int, sequences: int) -> Any:
        """A clock that jumps."""
        return DryDevice()

    def energy_j(self) -> float:
        """There is no counter."""
        return float("nan")

    def facts(self) -> dict[str, Any]:
        """Says that nothing was measured."""
        return {"gpu": {"name": "none: a dry run on the price tables"}}

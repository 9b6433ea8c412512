"""GPU data sheets: the numbers that the roofline and the memory plan start from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from sim.errors import SimctlError
from sim.suggest import nearest


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. Rates are dense peaks (TFLOP/s = 1e12, GB/s = 1e9); `nvlink_gb_s` adds both directions,
    `pcie_gb_s` and `nic_gb_s` (one network card a GPU) are one direction's.

    `hbm_bytes` is the memory that a program sees; `sm_granule` and `sm_minimum` are the SM counts that a green
    context can be asked for on this architecture; `boost_mhz` is the clock that per-SM bandwidth is scaled by;
    `least_limit_w` is the lowest power limit that the driver lets the board be set to (0: not known).
    """

    name: str
    sms: int
    bf16_tflops: float
    fp8_tflops: float | None
    hbm_bytes: int
    hbm_gb_s: float
    l2_bytes: int
    nvlink_gb_s: float
    pcie_gb_s: float
    nic_gb_s: float
    smem_per_sm_bytes: int
    threads_per_sm: int
    tdp_w: float
    idle_w: float
    boost_mhz: float
    compute_capability: str
    sm_granule: int
    sm_minimum: int
    source: str
    least_limit_w: float = 0.0

    @property
    def peak_flops(self) -> float:
        """Dense 16-bit FLOP/s of the whole GPU."""
        return self.bf16_tflops * 1e12

    @property
    def peer_gb_s(self) -> float:
        """GB/s in one direction to another GPU of the same machine: NVLink's, else PCIe's."""
        return self.nvlink_gb_s / 2 or self.pcie_gb_s

    @property
    def hbm_bytes_per_s(self) -> float:
        """Nominal memory bandwidth in bytes/s."""
        return self.hbm_gb_s * 1e9


@cache
def _builtin() -> dict[str, GpuSpec]:
    text = files("sim").joinpath("data/gpus/gpus.yaml").read_text(encoding="utf-8")
    return {name: GpuSpec(name=name, **row) for name, row in yaml.safe_load(text)["gpus"].items()}


def list_gpus() -> list[GpuSpec]:
    """The built-in GPUs, in the order of the data file."""
    return list(_builtin().values())


def load_gpu(name: str) -> GpuSpec:
    """The built-in GPU of that name; SimctlError with the nearest name otherwise."""
    gpus = _builtin()
    if name not in gpus:
        raise SimctlError(
            f"Unknown GPU '{name}'.{nearest(name, gpus)} `simctl gpus` lists the built-in ones."
        )
    return gpus[name]

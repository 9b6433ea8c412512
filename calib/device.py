"""Facts of the GPU under test, and read-only NVML: clocks and power are recorded beside every point, never set."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sim.errors import CalibrationError

INSTALL = "pip install 'lanesim[gpu-cu13]'"
LIBRARIES = (
    "torch",
    "flashinfer-python",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "triton",
)
# NVML clocks-event bits that mean the SM clock was held down: SW power cap, HW slowdown, SW and HW thermal,
# HW power brake (nvml.h, nvmlClocksEventReason*)
THROTTLE_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
BUSY_PERCENT = 20
# NVML GPM: SMs with a resident warp, their warps, integer, tensor, HBM bandwidth, FP32 and FP16 pipes in use
# (nvml.h, nvmlGpmMetricId_t)
GPM_METRICS = {
    "sm_active": 2,
    "occupancy": 3,
    "int_active": 4,
    "tensor_active": 5,
    "dram_active": 10,
    "fp32_active": 12,
    "fp16_active": 13,
}
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT: without the averaging of nvmlDeviceGetPowerUsage


@dataclass(frozen=True)
class DeviceFacts:
    """What a profile has to say about the GPU it was taken on. Sizes in bytes, clocks in MHz, power in watts."""

    name: str
    sms: int
    capability: tuple[int, int]
    memory_bytes: int
    l2_bytes: int
    smem_per_sm_bytes: int
    max_sm_mhz: int = 0
    power_limit_w: float = 0.0
    power_limits_w: tuple[float, float] = (0.0, 0.0)  # lowest and highest that can be set
    driver: str = ""
    cuda: str = ""
    uuid: str = ""
    libraries: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        facts["capability"] = f"{self.capability[0]}.{self.capability[1]}"
        facts["power_limits_w"] = list(self.power_limits_w)
        return facts


@dataclass(frozen=True)
class Reading:
    """One NVML reading while work was running; None where the driver does not answer."""

    sm_mhz: float | None = None
    power_w: float | None = None
    throttled: bool | None = None
    now_w: float | None = None  # at this moment, where `power_w` is a mean over the last second
    temperature_c: float | None = None


def installed_versions() -> dict[str, str]:
    """Versions of the libraries whose kernels are timed, those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def import_torch() -> Any:
    """torch, or a CalibrationError with the install line."""
    try:
        import torch
    except ImportError as error:
        raise CalibrationError(f"Calibration needs PyTorch, which is not installed: {INSTALL}.") from error
    return torch


class Meter:
    """Reads SM clock, board power and throttle reasons of one GPU through NVML."""

    def __init__(self, index: int = 0, nvml: Any = None) -> None:
        self._handle: Any = None
        self._nvml = nvml
        try:
            if nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception:  # NVML absent or refused: points are taken without clocks
            self._handle = None

    def _ask(self, name: str, *args: Any) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *args)
        except Exception:  # a query that this driver does not support
            return None

    def read(self) -> Reading:
        """Clock, power and whether a throttle reason is active, now."""
        power = self._ask("nvmlDeviceGetPowerUsage")
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        clock = self._ask("nvmlDeviceGetClockInfo", 1)  # 1: NVML_CLOCK_SM
        return Reading(
            None if clock is None else float(clock),
            None if power is None else power / 1000.0,
            None if bits is None else bool(bits & THROTTLE_BITS),
            self._now_w(),
            self._ask("nvmlDeviceGetTemperature", 0),  # 0: NVML_TEMPERATURE_GPU
        )

    def _now_w(self) -> float | None:
        found = self._ask("nvmlDeviceGetFieldValues", [POWER_INSTANT])
        try:
            return float(found[0].value.uiVal) / 1e3 if found and found[0].nvmlReturn == 0 else None
        except (AttributeError, IndexError, TypeError):  # bindings without fields
            return None

    def energy_j(self) -> float:
        """Joules since the driver was loaded; NaN where the counter does not exist."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return float("nan") if millijoules is None else millijoules / 1e3

    def gpm_sample(self) -> Any:
        """A sample of the GPU's performance counters (NVML GPM), None where the driver does not permit them."""
        try:
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return None
            sample = self._nvml.nvmlGpmSampleAlloc()
            self._nvml.nvmlGpmSampleGet(self._handle, sample)
        except Exception:  # no such call, no such GPU, or no permission
            return None
        return sample

    def gpm_between(self, first: Any, last: Any) -> dict[str, float]:
        """Shares of GPM_METRICS between two samples, empty if the driver does not answer."""
        if first is None or last is None:
            return {}
        try:
            asked = self._nvml.c_nvmlGpmMetricsGet_t()
            asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
            asked.sample1, asked.sample2, asked.numMetrics = first, last, len(GPM_METRICS)
            for i, number in enumerate(GPM_METRICS.values()):
                asked.metrics[i].metricId = number
            self._nvml.nvmlGpmMetricsGet(asked)
            known = {name: asked.metrics[i] for i, name in enumerate(GPM_METRICS)}
            return {name: one.value / 100.0 for name, one in known.items() if one.nvmlReturn == 0}
        except Exception:
            return {}

    def power_limit_w(self) -> float:
        return (self._ask("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000.0

    def power_limits_w(self) -> tuple[float, float]:
        """Lowest and highest limit that the board can be set to; zeros where the driver does not say."""
        found = self._ask("nvmlDeviceGetPowerManagementLimitConstraints")
        return (0.0, 0.0) if found is None else (found[0] / 1000.0, found[1] / 1000.0)

    def max_sm_mhz(self) -> int:
        return int(self._ask("nvmlDeviceGetMaxClockInfo", 1) or 0)

    def driver(self) -> str:
        try:
            text = self._nvml.nvmlSystemGetDriverVersion()
        except Exception:
            return ""
        return text.decode() if isinstance(text, bytes) else str(text)

    def utilisation(self) -> int | None:
        """Per cent of the last sample period in which a kernel ran, None if unknown."""
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)


def require_idle(meter: Meter, name: str, looks: int = 6, pause_s: float = 0.5) -> None:
    """Raise CalibrationError if another process keeps the GPU busy. Call before any own work is launched.

    NVML's utilisation lags by up to a second, so only a GPU that is busy at every one of several looks counts.
    """
    busy = None
    for look in range(looks):
        busy = meter.utilisation()
        if busy is None or busy <= BUSY_PERCENT:
            return
        if look < looks - 1:
            time.sleep(pause_s)
    raise CalibrationError(
        f"{name} is {busy} % busy with other work, so its timings would be wrong; stop that work first."
    )


def gpu_facts(meter: Meter, index: int = 0) -> DeviceFacts:
    """Facts of CUDA device `index`; raises CalibrationError if there is none or it is older than Ampere."""
    torch = import_torch()
    if not torch.cuda.is_available():
        raise CalibrationError(
            "No CUDA GPU is visible to PyTorch, and calibration needs one (compute capability 8.0 or newer)."
        )
    properties = torch.cuda.get_device_properties(index)
    capability = (int(properties.major), int(properties.minor))
    if capability < (8, 0):
        raise CalibrationError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, "
            "and calibration needs 8.0 (Ampere) or newer."
        )
    return DeviceFacts(
        name=str(properties.name),
        sms=int(properties.multi_processor_count),
        capability=capability,
        memory_bytes=int(properties.total_memory),
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)),
        smem_per_sm_bytes=int(getattr(properties, "shared_memory_per_multiprocessor", 0)),
        max_sm_mhz=meter.max_sm_mhz(),
        power_limit_w=meter.power_limit_w(),
        power_limits_w=meter.power_limits_w(),
        driver=meter.driver(),
        cuda=str(torch.version.cuda or ""),
        uuid=str(getattr(properties, "uuid", "")),
        libraries=installed_versions(),
    )

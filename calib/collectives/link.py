"""How the GPUs are linked, by NVML: what the rows of a group have to say beside their times."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MOST_LINKS = 18
# MB/s of one link in one direction (nvml.h): of all links that are up, of the first, and of a link that is named
SPEED_MBPS = (90, 84, (164, 0))  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, .._SPEED_MBPS_L0, .._GET_SPEED
# what a reader has to know of how NCCL was told to work
VARIABLES = (
    "NCCL_NVLS_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_CTAS",
    "NCCL_P2P_LEVEL",
)


def link_facts(indices: list[int], nvml: Any = None) -> dict[str, Any]:
    """NVLinks of the first GPU: how many are up, their version and speed, and whether each pair of GPUs has a path
    by NVLink. Empty where NVML does not answer."""
    try:
        if nvml is None:
            import pynvml as nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in indices]
    except Exception:  # no NVML: the times stand without it
        return {}
    found: dict[str, Any] = {"links": _links(nvml, handles[0])}
    if found["links"]:
        found["version"] = _ask(nvml.nvmlDeviceGetNvLinkVersion, handles[0], 0)
        speed = _speed(nvml, handles[0])
        found["gb_s_per_link"] = speed
        if speed:
            found["gb_s_one_way"] = round(speed * found["links"], 1)
    pairs = [(a, b) for i, a in enumerate(handles) for b in handles[i + 1 :]]
    index = getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", 2)
    found["nvlink_pairs"] = sum(_ask(nvml.nvmlDeviceGetP2PStatus, a, b, index) == 0 for a, b in pairs)
    found["pairs"] = len(pairs)
    return found


def _ask(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception:  # not supported by this driver
        return None


def _links(nvml: Any, handle: Any) -> int:
    return sum(_ask(nvml.nvmlDeviceGetNvLinkState, handle, i) == 1 for i in range(MOST_LINKS))


def _speed(nvml: Any, handle: Any) -> float | None:
    """GB/s of one link in one direction; drivers know the same figure under several names."""
    for field in SPEED_MBPS:
        values = _ask(nvml.nvmlDeviceGetFieldValues, handle, [field])
        if values and values[0].nvmlReturn == 0:
            return round(float(values[0].value.uiVal) / 1e3, 3)
    return None


def nccl_facts(torch: Any) -> dict[str, Any]:
    """NCCL's version and the variables that steer it."""
    try:
        number = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without it
        number = ""
    try:
        wheel = version("nvidia-nccl-cu13")
    except PackageNotFoundError:
        wheel = ""
    said = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {"nccl": number, "nvidia-nccl-cu13": wheel, "environment": said}

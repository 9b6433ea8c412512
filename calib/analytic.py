"""A coarse expectation of a kernel's time: sizes the graphs and windows of a measurement, never a result."""

from __future__ import annotations

from calib.device import DeviceFacts
from calib.kernels.base import Kernel

# dense bf16 FLOP/s and HBM bytes/s by a piece of the device name, from the vendor's data sheets
PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "H20": (148e12, 4.0e12),
    "A100": (312e12, 2.039e12),
    "A800": (312e12, 2.039e12),
    "B200": (2250e12, 8.0e12),
    "L40S": (362e12, 0.864e12),
}
LAUNCH_S = 2.5e-6  # a kernel's fixed cost inside a graph
BANDWIDTH_SHARE = 0.5  # share of the SMs that draws the full bandwidth


def peaks(name: str) -> tuple[float, float]:
    """(FLOP/s, bytes/s) of the device called `name`; an A100's for names not listed."""
    found = [value for key, value in PEAKS.items() if key in name]
    return found[0] if found else PEAKS["A100"]


def expected_s(kernel: Kernel, facts: DeviceFacts, sms: int) -> float:
    """Roofline seconds of one run on `sms` SMs: compute linear in them, bandwidth flat from half of them on."""
    compute, bandwidth = peaks(facts.name)
    share = sms / facts.sms
    work = kernel.flops / (0.8 * compute * share)
    moved = kernel.bytes / (0.85 * bandwidth * min(1.0, share / BANDWIDTH_SHARE))
    return kernel.launches * LAUNCH_S + max(work, moved)

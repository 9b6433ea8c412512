"""Which kernel runs the attention of mixed steps on the GPU."""

from __future__ import annotations

from sim.cost.attention import AttentionMode
from sim.errors import SimctlError

BATCH_POD, BATCHED = "batch_pod", "batched"
KERNELS = {("pod", "flashinfer-batch"): BATCH_POD, ("batched", ""): BATCHED}


def fused_kernel(mode: AttentionMode, capability: str) -> str:
    """`batch_pod` (FlashInfer's BatchPOD), `batched` (one FA2 prefill call for all rows), or nothing: separate kernels.

    Raises SimctlError for modes that exist as prices only, or whose kernels this executor does not launch.
    """
    if mode.mode == "serial":
        return ""
    kernel = mode.kernel(capability) if mode.mode == "pod" else ""
    if (mode.mode, kernel) not in KERNELS:
        name = f"{mode.mode} ({kernel})" if kernel else mode.mode
        raise SimctlError(
            f"the executor has no kernel for mixed attention in the mode '{name}'; it runs serial, batched, and pod by "
            "FlashInfer's BatchPOD (variant: flashinfer-batch)"
        )
    if mode.speedup > 0:
        raise SimctlError(
            "a speedup of fused attention is a price, not a kernel that could be run; leave it at 0"
        )
    return KERNELS[mode.mode, kernel]

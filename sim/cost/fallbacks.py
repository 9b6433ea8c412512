"""Which shapes fused attention kernels take, and why a mixed step falls back on separate ones.

Rules as the sources state them: microsoft/vattention pod_attn (fused_api.cpp, fused_api_setup.h; the host of the
artefact loads every model in float16), flashinfer-ai/flashinfer pod.py and its tests (page sizes 1 and 16).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.attention import AttentionMode
from sim.cost.gpu import GpuSpec
from sim.cost.model import ModelSpec

# numbers that the engine counts by; 0: no fallback
SEVERAL_CHUNKS, DATA_TYPE, HEAD_DIM, PAGE_SIZE, GPU = 1, 2, 3, 4, 5
FALLBACKS = {
    SEVERAL_CHUNKS: "several prefill chunks in one step",
    DATA_TYPE: "data type",
    HEAD_DIM: "head dimension",
    PAGE_SIZE: "KV page size",
    GPU: "GPU architecture",
}
MOST_FALLBACKS = max(FALLBACKS)
ANY_NUMBER = 1 << 30


@dataclass(frozen=True)
class Supported:
    """Shapes that one kernel takes: data types, head dimensions, chunks at once, KV page sizes (`page_multiple`: any
    multiple; neither: any), and compute capabilities from `least` on, or exactly those of `capabilities`."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    chunks: int
    pages: tuple[int, ...] = ()
    page_multiple: int = 1
    capabilities: tuple[str, ...] = ()
    least: float = 0.0


SIXTEEN_BIT = ("float16", "bfloat16")
SUPPORTED = {
    "artefact": Supported(SIXTEEN_BIT, (128,), 1, page_multiple=256, capabilities=("8.0", "9.0")),
    "flashinfer": Supported(SIXTEEN_BIT, (64, 128, 256), 1, pages=(1, 16), least=8.0),
    "flashinfer-batch": Supported(SIXTEEN_BIT, (64, 128, 256), ANY_NUMBER, pages=(1, 16), least=8.0),
}


def supported_by(mode: AttentionMode, gpu: GpuSpec) -> Supported | None:
    """The limits of a mode's kernel on a GPU; None: it runs the same kernels as separate attention."""
    if mode.mode == "hfuse":
        return SUPPORTED["artefact"]
    if mode.mode == "batched":
        return SUPPORTED["flashinfer-batch"]
    return SUPPORTED[mode.kernel(gpu.compute_capability)] if mode.mode == "pod" else None


def fallback_of(mode: AttentionMode, model: ModelSpec, gpu: GpuSpec, page_size: int) -> int:
    """Why a mode never runs for this model on this GPU and KV page size; 0 if it may."""
    limits = supported_by(mode, gpu)
    if limits is None:
        return 0
    capability = gpu.compute_capability
    contiguous = mode.contiguous and limits is SUPPORTED["artefact"]
    bad_page = bool(limits.pages) and page_size not in limits.pages
    if (limits.capabilities and capability not in limits.capabilities) or float(capability) < limits.least:
        return GPU
    if model.dtype not in limits.dtypes:
        return DATA_TYPE
    if model.head_dim not in limits.head_dims:
        return HEAD_DIM
    if not contiguous and (bad_page or page_size % limits.page_multiple):
        return PAGE_SIZE
    return 0


def most_chunks(mode: AttentionMode, gpu: GpuSpec) -> int:
    """Prefill chunks that the mode's kernel takes at once."""
    limits = supported_by(mode, gpu)
    return ANY_NUMBER if limits is None else limits.chunks

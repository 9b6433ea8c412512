"""GPU memory of a calibration: model weights, a KV cache and scratch tensors, all random, allocated once.

Kernels are views into it, so a point allocates nothing; weights and caches are those of many layers, so that
going round them keeps the L2 as cold as a real step does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from calib.device import import_torch
from calib.models import ROLES, ModelShape
from sim.errors import CalibrationError

PAGE = 16  # tokens per KV page
WORKSPACE_BYTES = 256 << 20  # FlashInfer's split-KV workspace
FILL_ELEMENTS = 1 << 28  # elements drawn at a time


@dataclass
class Layer:
    """Weights of one layer, each [n, k] bf16, and its two norms [hidden]."""

    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    norm1: Any
    norm2: Any


@dataclass
class Pages:
    """Page table of a batch: indptr and last_page_len on the host, indices on the device (int32).

    `region` is the pages of one layer's cache, `copies` how many distinct layer caches there are.
    """

    indptr: Any
    indices: Any
    last_page_len: Any
    region: int
    copies: int

    def part(self, first: int, last: int) -> Pages:
        """The table of sequences first..last-1 alone."""
        start, end = int(self.indptr[first]), int(self.indptr[last])
        indptr = self.indptr[first : last + 1] - self.indptr[first]
        last_page_len = self.last_page_len[first:last]
        return Pages(indptr, self.indices[start:end], last_page_len, self.region, self.copies)


@dataclass
class Arena:
    """All device memory, and FlashInfer wrappers, for one model on one device ("cuda", or "cpu" in tests)."""

    model: ModelShape
    seed: int = 0
    device: str = "cuda"
    layers: int = 0
    kv_bytes: int = 0
    torch: Any = None
    weights: list[Layer] = field(default_factory=list)
    embedding: Any = None
    lm_head: Any = None
    final_norm: Any = None
    rope_cache: Any = None
    kv: Any = None
    dtype: str = "bfloat16"
    flashinfer: Any = None
    _scratch: dict[tuple[int, str, Any], Any] = field(default_factory=dict)
    _wrappers: dict[Any, Any] = field(default_factory=dict)
    _shuffle: dict[int, Any] = field(default_factory=dict)
    _views: dict[tuple[str, str], Arena] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.torch = import_torch()
        self.generator = self.torch.Generator(device=self.device).manual_seed(self.seed)
        self.layers = self.layers or self.model.layers
        self.flashinfer, self.flashinfer_state = (
            import_flashinfer() if self.device == "cuda" else (None, "not used")
        )

    def fill(self) -> None:
        """Allocate and draw everything; raises CalibrationError where the GPU's memory is too small."""
        torch, model = self.torch, self.model
        if self.device == "cuda":
            free = torch.cuda.mem_get_info()[0]
            weights = 2 * (self.layers * model.layer_weights + 2 * model.vocab * model.hidden)
            left = free - weights - (12 << 30)  # scratch, workspaces, graphs
            if left < (2 << 30):
                raise CalibrationError(
                    f"{model.name} with {self.layers} layers needs {(weights >> 30) + 14} GiB of GPU memory to be "
                    f"calibrated, and {free >> 30} GiB are free."
                )
            self.kv_bytes = min(self.kv_bytes or 80 << 30, left)
        for _ in range(self.layers):
            linear = {
                role: self.draw(model.linear(role), model.linear(role)[1] ** -0.5) for role in ROLES[:4]
            }
            self.weights.append(Layer(**linear, norm1=self._ones(), norm2=self._ones()))
        self.embedding = self.draw((model.vocab, model.hidden))
        self.lm_head = self.draw(model.linear("lm_head"), model.hidden**-0.5)
        self.final_norm = self._ones()
        self.rope_cache = self._rope_table(131072 if self.device == "cuda" else 4096)
        page_elements = 2 * PAGE * model.kv_heads * model.head_dim
        pages = max(2 * self.layers, self.kv_bytes // (2 * page_elements))
        self.kv = self.draw((pages // 2 * 2, 2, PAGE, model.kv_heads, model.head_dim))

    def viewed(self, model: ModelShape, dtype: str = "bfloat16") -> Arena:
        """The same memory as a cache of `model`'s heads and of another 16-bit type; linear layers stay this model's.

        bfloat16 bits read as float16 are random too, between 1 and 2 mostly: fit for timing and for comparison with
        float32 on the same values.
        """
        if (model, dtype) == (self.model, self.dtype):
            return self
        key = (model.name, dtype)
        if key not in self._views:
            page = 2 * PAGE * model.kv_heads * model.head_dim
            pages = self.kv.numel() // page // 2 * 2
            kv = self.kv.view(-1)[: pages * page].view(getattr(self.torch, dtype))
            kv = kv.view(pages, 2, PAGE, model.kv_heads, model.head_dim)
            view = copy.copy(self)
            view.model, view.dtype, view.kv = model, dtype, kv
            view._wrappers, view._shuffle, view._views = {}, {}, {}
            self._views[key] = view
        return self._views[key]

    def draw(self, shape: tuple[int, ...], scale: float = 1.0) -> Any:
        """A fresh random normal bf16 tensor."""
        out = self.torch.empty(shape, dtype=self.torch.bfloat16, device=self.device)
        flat = out.view(-1)
        for start in range(0, flat.numel(), FILL_ELEMENTS):
            flat[start : start + FILL_ELEMENTS].normal_(0.0, scale, generator=self.generator)
        return out

    def _ones(self) -> Any:
        return (1 + 0.1 * self.draw((self.model.hidden,))).to(self.torch.bfloat16)

    def _rope_table(self, positions: int) -> Any:
        # cos in the first half of a row, sin in the second; Llama 3's theta
        torch, half = self.torch, self.model.head_dim // 2
        inverse = 500000.0 ** (-torch.arange(half, device=self.device, dtype=torch.float32) / half)
        angle = torch.arange(positions, device=self.device, dtype=torch.float32)[:, None] * inverse
        return torch.cat([angle.cos(), angle.sin()], dim=1).contiguous()

    def scratch(self, slot: int, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """A named buffer of `slot` (0 or 1: the two sides of a co-run), grown where needed, random at first."""
        dtype = dtype or getattr(self.torch, self.dtype)
        count = math.prod(shape)
        key = (slot, name, dtype)
        held = self._scratch.get(key)
        if held is None or held.numel() < count:
            self._scratch.pop(key, None)
            held = self.torch.empty(count, dtype=dtype, device=self.device)
            if dtype.is_floating_point:
                held.normal_(generator=self.generator)
            self._scratch[key] = held
        return held[:count].view(shape)

    def refresh(self, tensor: Any, scale: float = 1.0) -> Any:
        """Draw `tensor` anew in place, so that no result is ever left over from another point."""
        return tensor.normal_(0.0, scale, generator=self.generator)

    def linear(self, role: str, layer: int) -> Any:
        """Weight [n, k] of the linear layer `role`; layers go round."""
        return self.lm_head if role == "lm_head" else getattr(self.weights[layer % self.layers], role)

    def pages(self, contexts: Sequence[int]) -> Pages:
        """Random distinct pages for sequences of `contexts` tokens each.

        Each slot has half of the arena, cut into as many equal layer caches as the batch leaves room for, at
        most one a layer. Raises CalibrationError if not even one fits.
        """
        torch = self.torch
        counts = [pages_of(tokens) for tokens in contexts]
        used, half = sum(counts), self.kv.shape[0] // 2
        if used > half:
            raise CalibrationError(
                f"A batch of {sum(contexts)} tokens of context does not fit the calibration's KV cache of "
                f"{half * PAGE} tokens."
            )
        copies = min(half // used, self.layers)
        region = half // copies
        if region not in self._shuffle:
            self._shuffle[region] = torch.randperm(region, generator=self.generator, device=self.device).int()
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        indptr[1:] = torch.cumsum(torch.tensor(counts), 0)
        last = torch.tensor([(tokens - 1) % PAGE + 1 for tokens in contexts], dtype=torch.int32)
        return Pages(indptr, self._shuffle[region][:used], last, region, copies)

    def cache(self, slot: int, layer: int, pages: Pages) -> Any:
        """The KV pages [region, 2, PAGE, kv_heads, head_dim] of `layer` that `pages` index into."""
        start = slot * (self.kv.shape[0] // 2) + (layer % pages.copies) * pages.region
        return self.kv[start : start + pages.region]

    def workspace(self, slot: int, name: str, size: int = WORKSPACE_BYTES) -> Any:
        """FlashInfer's float workspace of one wrapper of `slot`."""
        return self.scratch(slot, f"workspace-{name}", (size,), self.torch.uint8)

    def prefill_wrapper(self, slot: int, backend: str) -> Any:
        """The paged prefill wrapper ("fa2" or "fa3") of `slot`, made once and planned anew for each point."""
        key = ("prefill", slot, backend)
        if key not in self._wrappers:
            self._wrappers[key] = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace(slot, "prefill"), "NHD", backend=backend
            )
        return self._wrappers[key]

    def decode_wrapper(self, slot: int, batch: int, padded: bool) -> Any:
        """The paged tensor-core FA2 decode wrapper; `padded`: as CUDA graphs of a server need it (fixed grid)."""
        key = ("decode", slot, batch if padded else 0)
        if key not in self._wrappers:
            torch, options = self.torch, {}
            if padded:
                pages = torch.empty(self.kv.shape[0], dtype=torch.int32, device=self.device)
                shared = self._wrappers.setdefault(("indices", slot), pages)
                options = {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": torch.zeros(batch + 1, dtype=torch.int32, device=self.device),
                    "paged_kv_indices_buffer": shared,
                    "paged_kv_last_page_len_buffer": torch.ones(batch, dtype=torch.int32, device=self.device),
                }
            self._wrappers[key] = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace(slot, "decode"), "NHD", use_tensor_cores=True, backend="fa2", **options
            )
        return self._wrappers[key]

    def pod_wrapper(self, slot: int, batched: bool) -> Any:
        """FlashInfer's POD (one contiguous chunk) or, `batched`, BatchPOD (paged chunks)."""
        key = ("pod", slot, batched)
        if key not in self._wrappers:
            name = "BatchPODWithPagedKVCacheWrapper" if batched else "PODWithPagedKVCacheWrapper"
            # BatchPOD gives each side half of it, and splits of few KV heads need more than 128 MiB
            held = self.workspace(slot, "pod", 2 * WORKSPACE_BYTES)
            self._wrappers[key] = getattr(self.flashinfer, name)(held, "NHD")
        return self._wrappers[key]

    def side_stream(self) -> Any:
        """The stream of whatever runs beside the current one."""
        if "stream" not in self._wrappers:
            self._wrappers["stream"] = self.torch.cuda.Stream()
        return self._wrappers["stream"]


def pages_of(tokens: int) -> int:
    """KV pages that hold `tokens` tokens, at least one."""
    return max(1, -(-tokens // PAGE))


def import_flashinfer() -> tuple[Any, str]:
    """(the flashinfer module, its version), or (None, why there is none)."""
    try:
        import flashinfer
    except Exception as error:  # not installed, or built for another CUDA
        return None, f"{type(error).__name__}: {error}"[:200]
    return flashinfer, str(flashinfer.__version__)

"""Mixed attention on the CPU with stand-ins for FlashInfer's wrappers: what is planned and read, the references."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from calib.kernels import make
from calib.kernels.attention import reference
from calib.kernels.experts import dealt
from calib.kernels.fused import VARIANTS
from calib.models import MODELS, ModelShape
from sim.errors import CalibrationError

LLAMA = MODELS["llama-3.1-8b"]
TINY = ModelShape("tiny", 4, 256, 4, 2, 64, 512, 1000)
SHAPE = {"kind": "fused_attention", "q": [33], "h": [20], "contexts": [40, 7, 65]}


class Paged:
    """Attention over pages in float32, planned like FlashInfer's batch wrappers."""

    def __init__(self, torch: Any, causal: bool) -> None:
        self.torch, self.causal = torch, causal

    def plan_table(self, starts: Any, indptr: Any, indices: Any, last: Any) -> None:
        self.starts, self.indptr, self.indices, self.last = starts, indptr, indices, last

    def attend(self, q: Any, cache: Any) -> Any:
        parts = []
        for i in range(len(self.last)):
            rows = q[int(self.starts[i]) : int(self.starts[i + 1])]
            pages = cache[self.indices[int(self.indptr[i]) : int(self.indptr[i + 1])].long()]
            tokens = (len(pages) - 1) * 16 + int(self.last[i])
            k, v = (pages[:, j].reshape(-1, *pages.shape[3:])[:tokens] for j in (0, 1))
            parts.append(reference(self.torch, rows, k, v, self.causal and len(rows) > 1))
        return self.torch.cat(parts).to(q.dtype)


class Prefill(Paged):
    def plan(self, starts: Any, indptr: Any, indices: Any, last: Any, *args: Any, **options: Any) -> None:
        self.plan_table(starts, indptr, indices, last)

    def run(self, q: Any, cache: Any, out: Any, **options: Any) -> Any:
        return out.copy_(self.attend(q, cache))


class Decode(Paged):
    def plan(self, indptr: Any, indices: Any, last: Any, *args: Any, **options: Any) -> None:
        self.plan_table(range(len(last) + 1), indptr, indices, last)

    def run(self, q: Any, cache: Any, out: Any = None, **options: Any) -> Any:
        found = self.attend(q, cache)
        return found if out is None else out.copy_(found)


class Pod(Decode):
    def run(self, q: Any, k: Any, v: Any, q_d: Any, cache: Any, causal_p: bool, **options: Any) -> Any:
        return reference(self.torch, q, k, v, causal_p).to(q.dtype), self.attend(q_d, cache)


class BatchPod:
    def __init__(self, torch: Any) -> None:
        self.sides = (Paged(torch, True), Paged(torch, False))

    def plan(self, *args: Any, **options: Any) -> None:
        self.sides[0].plan_table(*args[:4])
        self.sides[1].plan_table(*args[4:8])

    def run(self, q: Any, cache: Any, q_d: Any, cache_d: Any, causal_p: bool, **options: Any) -> Any:
        assert causal_p
        return self.sides[0].attend(q, cache), self.sides[1].attend(q_d, cache_d)


@pytest.fixture
def arena() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from calib.arena import Arena

    held = Arena(TINY, device="cpu", kv_bytes=8 << 20)
    held.fill()
    held.flashinfer = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=lambda *a, **o: Prefill(torch, True),
        BatchDecodeWithPagedKVCacheWrapper=lambda *a, **o: Decode(torch, False),
        PODWithPagedKVCacheWrapper=lambda *a, **o: Pod(torch, False),
        BatchPODWithPagedKVCacheWrapper=lambda *a, **o: BatchPod(torch),
    )
    return held


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.startswith("streams")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_variant_computes_the_same_attention(arena: Any, variant: str, dtype: str) -> None:
    kernel = make(TINY, {**SHAPE, "attention": variant, "dtype": dtype})
    kernel.prepare(arena)
    assert kernel.reference_error() < 1e-2
    kernel.run(3)


def test_several_chunks(arena: Any) -> None:
    kernel = make(TINY, {**SHAPE, "q": [33, 5], "h": [20, 0], "attention": "batch_pod"})
    kernel.prepare(arena)
    assert kernel.reference_error() < 1e-2
    with pytest.raises(CalibrationError, match="one chunk"):
        make(TINY, {**SHAPE, "q": [33, 5], "h": [20, 0], "attention": "pod"})


def test_the_same_memory_serves_other_heads(arena: Any) -> None:
    other = ModelShape("other", 4, 256, 8, 1, 32, 512, 1000)
    view = arena.viewed(other)
    assert view.kv.shape[2:] == (16, 1, 32)
    assert view.kv.data_ptr() == arena.kv.data_ptr()
    assert arena.viewed(TINY) is arena
    kernel = make(other, {**SHAPE, "attention": "serial_fa2"})
    kernel.prepare(arena)
    assert kernel.reference_error() < 1e-2


def test_work_of_a_mixed_batch_is_that_of_its_parts() -> None:
    mixed = make(LLAMA, {**SHAPE, "attention": "batch_pod"})
    prefill = make(LLAMA, {"kind": "prefill_attention", "q": [33], "h": [20], "attention": "fa2"})
    decode = make(LLAMA, {"kind": "decode_attention", "contexts": [40, 7, 65], "attention": "fa2"})
    assert mixed.flops == prefill.flops + decode.flops
    assert mixed.bytes == prefill.bytes + decode.bytes
    columns = mixed.columns()
    assert (columns["decode_batch"], columns["context_sum"], columns["q_tokens"]) == (3, 112, "33")


def test_unknown_variants_and_empty_sides_are_refused() -> None:
    with pytest.raises(CalibrationError, match="not one of"):
        make(LLAMA, {**SHAPE, "attention": "pod2"})
    with pytest.raises(CalibrationError, match="a chunk and a decode batch"):
        make(LLAMA, {**SHAPE, "contexts": [], "attention": "pod"})


def test_experts_get_all_rows_and_the_popular_more() -> None:
    assert dealt(64, 16, 0.0) == [4] * 16
    skewed = dealt(1000, 128, 1.2)
    assert sum(skewed) == 1000
    assert skewed == sorted(skewed, reverse=True)
    # Zipf with exponent 1 over 4: shares 12/25, 6/25, 4/25, 3/25
    assert dealt(100, 4, 1.0) == [48, 24, 16, 12]


@pytest.mark.parametrize("role", ["gate_up", "down"])
def test_grouped_products_count_only_experts_in_use(role: str) -> None:
    kernel = make(LLAMA, {"kind": "moe", "experts_of": "qwen3-30b-a3b", "role": role, "m": 1})
    n, k = (1536, 2048) if role == "gate_up" else (2048, 768)
    assert kernel.flops == 2 * 8 * n * k
    assert kernel.bytes == 2 * (8 * (n + k) + 8 * n * k)

"""Counts of work, row columns and parsing, and the kernels themselves on the CPU where torch is installed."""

from __future__ import annotations

from typing import Any

import pytest

from calib.analytic import expected_s
from calib.fake import FACTS
from calib.kernels import make
from calib.models import MODELS, ModelShape
from calib.profiling import parse_trace
from calib.sweeps.operators import skewed
from sim.errors import CalibrationError

LLAMA = MODELS["llama-3.1-8b"]
TINY = ModelShape("tiny", 4, 256, 4, 2, 64, 512, 1000)


def test_shapes_of_llama_3_1_8b() -> None:
    assert LLAMA.linear("qkv") == (6144, 4096)
    assert LLAMA.linear("gate_up") == (28672, 4096)
    assert LLAMA.linear("down") == (4096, 14336)
    assert LLAMA.kv_bytes_per_token * LLAMA.layers == 131072
    assert LLAMA.layer_weights * LLAMA.layers == 6_979_321_856


def test_gemm_counts() -> None:
    kernel = make(LLAMA, {"kind": "gemm", "role": "qkv", "m": 100})
    assert kernel.flops == 2 * 100 * 6144 * 4096
    assert kernel.bytes == 2 * (100 * 4096 + 6144 * 4096 + 100 * 6144)
    assert kernel.columns() == {"m": 100, "n": 6144, "k": 4096, "layers": 1}


def test_causal_pairs_are_counted_with_history() -> None:
    # 2 rows on 3 earlier keys see 4 and 5 keys
    kernel = make(LLAMA, {"kind": "prefill_attention", "q": [2], "h": [3], "attention": "fa3"})
    assert kernel.flops == 4 * 32 * 128 * (4 + 5)
    assert kernel.columns()["q_tokens"] == "2"
    assert kernel.columns()["history_tokens"] == "3"


def test_decode_reads_every_context_once() -> None:
    kernel = make(LLAMA, {"kind": "decode_attention", "contexts": [10, 30], "attention": "fa2"})
    assert kernel.bytes == 40 * 4096 + 4 * 2 * 4096
    columns = kernel.columns()
    assert (columns["context_sum"], columns["context_mean"], columns["context_max"]) == (40, 20.0, 30)
    assert columns["decode_contexts"] == "10;30"


def test_a_step_is_the_sum_of_its_parts() -> None:
    shape = {"q": [64], "h": [128], "contexts": [500] * 8, "attention": "fa3"}
    step = make(LLAMA, {"kind": "mixed_step", **shape, "layers": 32})
    gemms = [make(LLAMA, {"kind": "gemm", "role": r, "m": 72}) for r in ("qkv", "o", "gate_up", "down")]
    prefill = make(LLAMA, {"kind": "prefill_attention", "q": [64], "h": [128], "attention": "fa3"})
    decode = make(LLAMA, {"kind": "decode_attention", "contexts": [500] * 8, "attention": "fa2"})
    head = make(LLAMA, {"kind": "lm_head", "m": 9})
    layers = 32 * (sum(g.flops for g in gemms) + prefill.flops + decode.flops)
    assert step.flops == pytest.approx(layers + head.flops)
    assert step.kind == "mixed_step"
    assert (
        make(LLAMA, {"kind": "prefill_layer", "q": [8], "h": [0], "attention": "fa3"}).kind == "prefill_layer"
    )


def test_skewed_batches_keep_their_mean() -> None:
    for batch, mean, skew in ((16, 512, 4), (64, 4096, 32)):
        contexts = skewed(batch, mean, skew)
        assert len(contexts) == batch
        assert max(contexts) == skew * mean
        assert sum(contexts) / batch == pytest.approx(mean, rel=0.01)


def test_unknown_kinds_and_back_ends_are_refused() -> None:
    with pytest.raises(CalibrationError, match="Did you mean 'gemm'"):
        make(LLAMA, {"kind": "gem", "m": 1})
    with pytest.raises(CalibrationError, match="fa9"):
        make(LLAMA, {"kind": "prefill_attention", "q": [2], "h": [3], "attention": "fa9"})


def test_the_expectation_grows_with_work_and_shrinks_with_sms() -> None:
    small, large = (make(LLAMA, {"kind": "gemm", "role": "qkv", "m": m}) for m in (512, 4096))
    assert expected_s(small, FACTS, 132) < expected_s(large, FACTS, 132) < expected_s(large, FACTS, 16)


def test_kernels_are_matched_to_their_range_by_correlation() -> None:
    def event(name: str, cat: str, ts: float, dur: float = 1.0, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}

    trace = {
        "traceEvents": [
            event("lanesim-point-0", "user_annotation", 0, 10),
            event("lanesim-point-1", "user_annotation", 20, 10),
            event("cudaLaunchKernel", "cuda_runtime", 2, correlation=1),
            event("cuLaunchKernelEx", "cuda_driver", 22, correlation=2),
            event("cudaLaunchKernel", "cuda_runtime", 15, correlation=3),
            event(
                "nvjet",
                "kernel",
                30,
                correlation=2,
                grid=[4, 5, 1],
                block=[128, 1, 1],
                **{"shared memory": 99},
            ),
            event(
                "norm", "kernel", 25, correlation=1, grid=[7, 1, 1], block=[256, 1, 1], **{"shared memory": 0}
            ),
            event("outside", "kernel", 27, correlation=3, grid=[1, 1, 1], block=[1, 1, 1]),
        ]
    }
    first, second = parse_trace(trace, 2)
    assert [k["kernel"] for k in first] == ["norm"]
    assert second == [{"kernel": "nvjet", "grid": "4x5x1", "block": "128x1x1", "smem_bytes": 99}]


POINTS = [
    {"kind": "gemm", "role": "qkv", "m": 33},
    {"kind": "gemm", "m": 5, "n": 100, "k": 64},
    {"kind": "lm_head", "m": 3},
    {"kind": "norm", "m": 5},
    {"kind": "rope", "m": 7},
    {"kind": "activation", "m": 4},
    {"kind": "kv_write", "m": 37},
    {"kind": "sampling", "m": 3},
    {"kind": "sampling", "m": 3, "label": "random"},
    {"kind": "prefill_attention", "q": [17, 5], "h": [20, 0], "attention": "sdpa"},
    {"kind": "decode_attention", "contexts": [5, 40, 17], "attention": "sdpa"},
    {"kind": "prefill_layer", "q": [17, 5], "h": [20, 3], "attention": "sdpa"},
    {"kind": "mixed_layer", "q": [9], "h": [30], "contexts": [5, 40], "layers": 2, "attention": "sdpa"},
]


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p['kind']}-{p.get('label', '')}")
def test_kernels_match_float32_on_the_cpu(point: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from calib.arena import Arena

    arena = Arena(TINY, device="cpu", layers=4, kv_bytes=8 << 20)
    arena.fill()
    kernel = make(TINY, point)
    kernel.prepare(arena)
    assert kernel.reference_error() < 1.5e-2


def test_sides_of_a_corun_share_no_kv_pages() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from calib.arena import Arena

    arena = Arena(TINY, device="cpu", layers=4, kv_bytes=8 << 20)
    arena.fill()
    pages = arena.pages([100, 40])
    assert sorted(pages.indices.tolist()) == sorted(set(pages.indices.tolist()))
    assert pages.indptr.tolist() == [0, 7, 10]
    assert pages.last_page_len.tolist() == [4, 8]
    spans = [
        (cache.data_ptr(), cache.data_ptr() + 2 * cache.numel())
        for slot in (0, 1)
        for layer in range(4)
        for cache in [arena.cache(slot, layer, pages)]
    ]
    assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
    with pytest.raises(CalibrationError, match="does not fit"):
        arena.pages([1 << 30])

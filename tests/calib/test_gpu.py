"""On a real GPU: partitions hold, kernels match float32, graphs equal eager runs, co-runs are sane."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lab() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from calib.lab import GpuLab
    from calib.measure import SMOKE
    from calib.models import MODELS

    return GpuLab(MODELS["llama-3.1-8b"], SMOKE, 0)


def backends(lab: Any) -> list[str]:
    if lab.arena.flashinfer is None:
        return ["sdpa"]
    return ["fa2", "fa3"] if lab.facts.capability[0] == 9 else ["fa2"]


def test_partitions_are_proved_and_disjoint(lab: Any) -> None:
    assert lab.splits()
    for size in lab.splits():
        a, b = lab.mechanism.split(size)
        assert len(a.smids) == a.sms == size
        assert len(b.smids) == b.sms == lab.facts.sms - size
        assert not a.smids & b.smids


def test_a_mask_leaks_into_no_library_kernel(lab: Any) -> None:
    from calib.kernels import make

    kernel = make(lab.model, {"kind": "gemm", "role": "gate_up", "m": 2048})
    small = min(size for size in lab.splits() if size >= lab.facts.sms // 8)
    ratio = lab.time(kernel, small).median_s / lab.time(kernel, lab.facts.sms).median_s
    assert ratio > 0.7 * lab.facts.sms / small


@pytest.mark.parametrize(
    "point",
    [
        {"kind": "gemm", "role": "qkv", "m": 129},
        {"kind": "gemm", "m": 130, "n": 1000, "k": 512},
        {"kind": "lm_head", "m": 5},
        {"kind": "norm", "m": 100},
        {"kind": "rope", "m": 100},
        {"kind": "activation", "m": 100},
        {"kind": "kv_write", "m": 100},
        {"kind": "sampling", "m": 10},
        {"kind": "stream_read", "size": 1 << 20},
        {"kind": "prefill_attention", "q": [200, 33], "h": [300, 0]},
        {"kind": "decode_attention", "contexts": [1, 17, 500, 2000]},
        {"kind": "mixed_layer", "q": [70], "h": [130], "contexts": [40, 333], "layers": 2},
    ],
    ids=lambda p: str(p["kind"]),
)
def test_kernels_match_float32(lab: Any, point: dict[str, Any]) -> None:
    from calib.kernels import make

    for backend in backends(lab):
        if point["kind"] == "decode_attention" and backend == "fa3":
            continue
        assert lab.error(make(lab.model, {**point, "attention": backend})) < 2e-2


def test_a_captured_step_gives_the_eager_tokens(lab: Any) -> None:
    from calib.kernels import make

    torch = lab.torch
    shape = {"q": [64], "h": [0], "contexts": [300] * 8, "layers": 4, "attention": backends(lab)[-1]}
    kernel = make(lab.model, {"kind": "mixed_step", **shape})
    stream = lab.partition(lab.facts.sms).stream()
    with torch.cuda.stream(stream):
        kernel.prepare(lab.arena)
        eager = kernel.run(0).clone()
        graph = lab.capture(kernel, 1)
        kernel._tokens.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(kernel._tokens, eager)


def test_a_graph_keeps_its_partition(lab: Any) -> None:
    from calib.kernels import make

    kernel = make(lab.model, {"kind": "gemm", "role": "gate_up", "m": 1024})
    size = min(size for size in lab.splits() if size >= lab.facts.sms // 8)
    torch, stream = lab.torch, lab.partition(size).stream()
    with torch.cuda.stream(stream):
        lab.ready(kernel, size, 0, padded=False)
        graph = lab.capture(kernel, 4)
        own = lab.replays(graph, stream, 5, 4).median_s
    other = lab.partition(lab.facts.sms).stream()
    with torch.cuda.stream(other):
        assert lab.replays(graph, other, 5, 4).median_s == pytest.approx(own, rel=0.15)


@pytest.mark.parametrize("mode", ["disjoint", "whole", "streams"])
def test_corun_is_not_faster_than_alone(lab: Any, mode: str) -> None:
    from calib.bench import Side
    from calib.kernels import make

    total = lab.facts.sms
    size = lab.splits()[len(lab.splits()) // 2]
    a = make(lab.model, {"kind": "gemm", "role": "gate_up", "m": 2048})
    b = make(lab.model, {"kind": "gemm", "role": "gate_up", "m": 32})
    sides = {"disjoint": (size, total - size), "whole": (size, total), "streams": (total, total)}[mode]
    pair = lab.pair(Side(a, sides[0]), Side(b, sides[1]), mode)
    assert len(pair.a.times_s) >= 3
    assert len(pair.b.times_s) >= 3
    for beside, alone in ((pair.a, pair.alone_a), (pair.b, pair.alone_b)):
        assert beside.median_s > 0.85 * alone.median_s
    assert pair.shared_sms == {"disjoint": 0, "whole": size, "streams": total}[mode]


def test_host_costs_are_positive(lab: Any) -> None:
    from calib.hostcost import LABELS

    for label in LABELS:
        if not label.startswith("plan") or lab.arena.flashinfer is not None:
            _, sample = lab.host_costs(label, 4)
            assert sample.median_s >= 0.0
            assert len(sample.times_s) == 30

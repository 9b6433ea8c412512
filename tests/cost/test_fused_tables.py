"""Tables of fused attention against the model that made them, measured surfaces, what-ifs and unsupported shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import MixedShape
from sim.cost.cta_terms import cta_terms
from sim.cost.fallbacks import DATA_TYPE, GPU, HEAD_DIM, PAGE_SIZE, fallback_of
from sim.cost.fused_modes import fused_run, serial_s
from sim.cost.gpu import load_gpu
from sim.cost.model import load_model
from sim.cost.shapes import Launch
from sim.cost.step import chunked_pass_s, fallback_code, fused_ratio, fused_saving_s, prefill_attention_s
from sim.errors import SimctlError

A100 = load_cost("llama-3-8b", "a100-80gb-sxm", "spec", {"tp": 2})
LIMITS: dict[str, Any] = {"max_tokens": 1024, "max_seqs": 128, "max_context": 16384}
POD = AttentionMode("pod")


def tables(cost=A100, mode=POD, **options):
    return cost.compile(**{**LIMITS, **options}, attention=mode, compiled=False)


def test_the_table_answers_as_the_model_does():
    p, terms, rng = tables(), cta_terms(A100.gpu), np.random.default_rng(3)
    errors = []
    for _ in range(300):
        q, batch = int(rng.integers(64, 1025)), int(rng.integers(4, 129))
        history, context = int(rng.integers(0, 15000)), int(np.exp(rng.uniform(6, 9.7)))
        shape = MixedShape(q, history, batch, context, 16, 4)
        exact = fused_run(terms, POD, shape).seconds / sum(serial_s(terms, shape))
        errors.append(abs(fused_ratio(p, q, history + (q + 1) // 2, batch, context) / exact - 1))
    # rows of half tiles, waves of decode and lengths of splits lie between the knots
    assert np.median(errors) < 0.03
    assert np.percentile(errors, 95) < 0.20


def test_the_ratio_is_continuous_beyond_the_knots():
    p = tables()
    assert fused_ratio(p, 512, 8192, 128, 4096) == fused_ratio(p, 512, 8192, 5000, 4096)
    assert fused_ratio(p, 512, 16384, 64, 16384) == fused_ratio(p, 512, 10**6, 64, 10**6)
    assert fused_ratio(p, 1024, 64, 64, 4096) == fused_ratio(p, 10**5, 1, 64, 4096)


def step(p, chunks=1, q=512, h=8000, b=64, mean=8000):
    pairs = q * h + q * (q + 1) // 2
    apart = prefill_attention_s(p, 0, q, h)
    return chunked_pass_s(p, 0, chunks, q, pairs, apart, b, b * mean, 0)


def test_only_steps_with_both_kinds_change():
    fused, serial = tables(), tables(mode=AttentionMode())
    assert step(fused) < step(serial)
    assert step(fused, b=0) == step(serial, b=0)
    assert fused_saving_s(serial, 1, 512, 512 * 8000, 64, 64 * 8000, 1.0) == 0.0


def test_several_chunks_fall_back_where_the_kernel_takes_one():
    p, serial = tables(), tables(mode=AttentionMode())
    assert fallback_code(p, 1) == 0
    assert fallback_code(p, 2) == 1
    assert step(p, chunks=2) == step(serial, chunks=2)  # the latency step at the edge of what is supported
    many = tables(mode=AttentionMode("pod", "flashinfer-batch"))
    assert fallback_code(many, 2) == 0


def test_a_given_speed_up_is_exact():
    serial, none, twice = (
        tables(mode=mode)
        for mode in (AttentionMode(), AttentionMode("pod", speedup=1.0), AttentionMode("pod", speedup=2.0))
    )
    assert step(none) == step(serial)
    assert fused_ratio(twice, 300, 5000, 33, 3000) == 0.5


def test_a_what_if_on_the_fused_kernel_scales_its_time():
    cost = load_cost(
        "llama-3-8b",
        "a100-80gb-sxm",
        "spec",
        {"tp": 2},
        {"scale": {"fused_attention": 0.9}, "attention": "pod"},
    )
    plain, scaled = tables(), cost.compile(**LIMITS, compiled=False)
    assert fused_ratio(scaled, 512, 8000, 64, 8000) == pytest.approx(
        0.9 * fused_ratio(plain, 512, 8000, 64, 8000)
    )
    launch = Launch(((512, 8000),), 64, 64 * 8000, attention="pod")
    assert (
        cost.solo(launch).gpu_s
        < A100.solo(launch).gpu_s
        < A100.solo(replace(launch, attention="serial")).gpu_s
    )


def test_a_launch_is_priced_as_the_table_says():
    p, launch = tables(), Launch(((512, 8192 - 256),), 64, 64 * 8192, attention="pod")
    parts = {part.name: part for part in A100.solo(launch).by_operator}
    apart = A100.solo(replace(launch, attention="serial"))
    both = sum(part.seconds for part in apart.by_operator if part.name.endswith("_attention"))
    assert parts["fused_attention"].seconds == pytest.approx(
        both * fused_ratio(p, 512, 8192, 64, 8192), rel=0.02
    )
    assert parts["fused_attention"].label == A100.fused_label(POD)
    assert A100.solo(launch).flops == pytest.approx(apart.flops)
    assert A100.solo(launch).sm_active <= apart.sm_active


@dataclass
class Surface:
    """A measured surface that answers 0.6 for chunks up to 300 tokens."""

    variants: tuple[str, ...] = ("batch_pod",)
    label: str = "measured"
    heads: tuple[int, int, int] = (32, 8, 128)

    def answers(self, variant: str, heads: tuple[int, int, int]) -> bool:
        return variant in self.variants and heads == self.heads

    def of_ctas(self, variant: str) -> bool:
        return False

    def label_of(self, variant: str, heads: tuple[int, int, int]) -> str:
        return self.label

    def base(self, variant: str) -> str:
        return "fa2"

    def table(self, variant, q, h, b, c):
        return np.full((*np.shape(q), *np.shape(b)), 0.6)

    def covered(self, variant, q, h, b, c):
        return np.broadcast_arrays(q <= 300, h >= 0, b >= 0, c >= 0)[0]


def test_what_was_measured_comes_before_the_model():
    spec = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    cost = replace(spec, profile=replace(spec.profile, fused=Surface()))
    mode = AttentionMode("pod")
    measured, modelled = tables(cost, mode), tables(spec, mode)
    # the spec profile has one curve of prefill attention, so bases agree
    assert fused_ratio(measured, 256, 5000, 33, 3000) == pytest.approx(0.6)
    assert fused_ratio(measured, 512, 5000, 33, 3000) == fused_ratio(modelled, 512, 5000, 33, 3000)
    assert cost.fused_label(mode) == "measured"
    assert spec.fused_label(mode).startswith("extrapolated from ")
    assert cost.fused_label(AttentionMode("pod", "artefact")).startswith("extrapolated from ")
    assert spec.fused_label() == ""
    # other heads were not measured
    yi = load_cost("yi-6b", "h200-sxm", "spec")
    assert replace(yi, profile=replace(yi.profile, fused=Surface())).fused_label(mode) == spec.fused_label(
        mode
    )


def test_lists_hold_the_same_ratios():
    arrays = A100.compile(**LIMITS, attention=POD, compiled=True)
    lists = tables()
    assert arrays.mix_ratio.tolist() == lists.mix_ratio
    assert fused_ratio(arrays, 300, 5000, 33, 3000) == fused_ratio(lists, 300, 5000, 33, 3000)


@pytest.mark.parametrize("mode", ["streams", "hfuse", "batched", "pod"])
def test_every_mode_has_prices_on_every_gpu(mode):
    for gpu in ("a100-80gb-sxm", "h200-sxm", "h20-sxm", "l40s", "b200-sxm"):
        p = tables(load_cost("llama-3.1-8b", gpu, "spec"), AttentionMode(mode))
        ratio = np.array(p.mix_ratio)
        assert np.isfinite(ratio).all()
        assert (ratio > 0).all()


MODEL = load_model("llama-3.1-8b")


@pytest.mark.parametrize(
    ("options", "changes", "gpu", "page", "why"),
    [
        ({}, {}, "a100-80gb-sxm", 16, 0),
        ({}, {}, "h200-sxm", 16, 0),
        ({"contiguous": False}, {}, "a100-80gb-sxm", 16, PAGE_SIZE),
        ({"contiguous": False}, {}, "a100-80gb-sxm", 512, 0),
        ({}, {}, "h200-sxm", 32, PAGE_SIZE),
        ({}, {}, "h200-sxm", 1, 0),
        ({}, {"dtype": "float32"}, "h200-sxm", 16, DATA_TYPE),
        ({}, {"head_dim": 64}, "a100-80gb-sxm", 16, HEAD_DIM),
        ({}, {"head_dim": 64}, "h200-sxm", 16, 0),
        ({"variant": "artefact"}, {}, "l40s", 16, GPU),
        ({"variant": "artefact"}, {}, "b200-sxm", 16, GPU),
        ({"variant": "flashinfer"}, {}, "l40s", 16, 0),
    ],
)
def test_what_the_kernels_support(options, changes, gpu, page, why):
    model = replace(MODEL, **changes)
    assert fallback_of(AttentionMode("pod", **options), model, load_gpu(gpu), page) == why


def test_separate_kernels_never_fall_back():
    for mode in ("serial", "streams"):
        assert fallback_of(AttentionMode(mode), replace(MODEL, dtype="float32"), load_gpu("l40s"), 7) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "pot"}, "attention mode 'pot' is none of serial, .* Did you mean 'pod'"),
        ({"mode": "pod", "variant": "artifact"}, "variant 'artifact' .* Did you mean 'artefact'"),
        ({"mode": "pod", "tickets": "60:40"}, "tickets '60:40'"),
        ({"mode": "pod", "split": "none"}, "split 'none'"),
        ({"mode": "pod", "ctas_per_sm": 3}, "ctas_per_sm is 3, but must be 2, 4 or 0"),
        ({"mode": "pod", "speedup": -1.0}, "speedup is -1"),
    ],
)
def test_bad_modes_are_told_in_one_sentence(options, sentence):
    with pytest.raises(SimctlError, match=sentence):
        AttentionMode(**options)

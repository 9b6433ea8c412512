"""Shapes of other models: their linear layers and heads, experts under routing skew, e4m3 products."""

from __future__ import annotations

from itertools import product

from calib.bench import Bench
from calib.models import ROLES, model_shape
from calib.sweep import Point
from calib.sweeps.common import SoloSweep

MODELS = ("llama-2-7b", "yi-6b", "llama-3.1-70b-tp4", "llama-3.1-70b-tp8")
M = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
CHUNKS, HISTORIES = (64, 256, 512, 1024, 2048, 4096), (0, 4096, 16384)
BATCHES, CONTEXTS = (4, 16, 64, 128, 256), (512, 2048, 8192)
EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
EXPERT_M = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SKEWS = (0.0, 0.6, 1.0, 1.2)
MOST_TOKENS = 1 << 20


class ShapesSweep(SoloSweep):
    """The linear layers and the attention of other models, on the whole GPU."""

    name = "shapes"
    weight = 6.0
    axes = ("m", "q", "h", "contexts", "batch")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        known = {lab.model.linear(role) for role in ROLES[:4]}
        for name, role in product(MODELS, ROLES[:4]):
            n, k = model_shape(name).linear(role)
            if (n, k) not in known:
                known.add((n, k))
                made += [{"kind": "gemm", "m": m, "n": n, "k": k, "model": name} for m in M]
        for name, q, h, backend in product(MODELS, CHUNKS, HISTORIES, ("fa3", "fa2")):
            made.append(
                {"kind": "prefill_attention", "q": [q], "h": [h], "attention": backend, "model": name}
            )
        for name, batch, context in product(MODELS, BATCHES, CONTEXTS):
            if batch * context * model_shape(name).kv_heads <= 8 * MOST_TOKENS:
                shape: Point = {"contexts": [context] * batch, "batch": batch, "attention": "fa2"}
                made.append({"kind": "decode_attention", **shape, "model": name})
        return [{**point, "sms": lab.facts.sms} for point in made]


class ExpertSweep(SoloSweep):
    """Grouped GEMMs of the experts of one layer against tokens and the exponent of the experts' popularity."""

    name = "moe"
    weight = 2.5
    axes = ("m", "skew")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        grid = product(EXPERTS, ("gate_up", "down"), EXPERT_M, SKEWS)
        return [
            {"kind": "moe", "experts_of": name, "role": role, "m": m, "skew": skew, "sms": lab.facts.sms}
            for name, role, m, skew in grid
        ]


class Fp8Sweep(SoloSweep):
    """Linear layers with e4m3 operands, of this model and of a 70B's eighth."""

    name = "gemm_fp8"
    weight = 1.5
    axes = ("m",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        shapes = {lab.model.linear(role) for role in ROLES[:4]}
        shapes |= {model_shape("llama-3.1-70b-tp8").linear(role) for role in ROLES[:4]}
        grid = product(sorted(shapes), M)
        return [{"kind": "gemm_fp8", "m": m, "n": n, "k": k, "sms": lab.facts.sms} for (n, k), m in grid]

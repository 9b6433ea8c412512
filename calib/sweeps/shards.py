"""Shapes of other models on SM partitions: linear layers, heads, attention, experts, e4m3 products, and what is around
experts and quantised inputs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from calib.bench import Bench
from calib.kernels.experts import DRAWN, FP8
from calib.kernels.experts import ROLES as EXPERT_ROLES
from calib.kernels.routing import QUANTISE, ROUTING
from calib.models import EXPERTS, ROLES, model_shape
from calib.sweep import Point
from calib.sweeps.common import SoloSweep
from calib.sweeps.shapes import MODELS as SEEN
from calib.sweeps.shapes import M, ShapesSweep

NEW = (
    "qwen3-32b",
    "llama-3.1-70b-tp2",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen3-235b-a22b-tp4",
    "qwen3-235b-a22b-tp8",
)
MIXTURES = {"qwen3-30b-a3b": 128, "qwen3-235b-a22b": 128}  # their router is a linear layer of so many columns
PARTS = (16, 32, 64, 100)  # SM sets beside the whole GPU; those that the mechanism makes
NEW_M = (*M, 8, 32, 8192)
PART_M = (16, 256, 2048)
HEAD_M = (1, 8, 32, 64, 128, 256)
# numbers of heads that `shapes` has not timed
HEADS = ("qwen3-32b", "qwen3-235b-a22b", "qwen3-235b-a22b-tp4")
EXPERT_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EXPERT_PART_M = (1, 8, 32, 128, 512, 2048)
ROUTING_M = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
QUANTISED = (2048, 4096, 8192, 14336)
FP8_M = (8, 32, 96, 192, 384, 768, 1536, 3072, 8192)  # between those of `gemm_fp8`
FP8_PART_M = (1, 32, 128, 512, 2048)
FP8_MODELS = ("llama-3.1-70b-tp4", "llama-2-7b", "qwen3-32b", "qwen3-8b")


def parts(lab: Bench) -> list[int]:
    """The sizes of `PARTS` that there are."""
    return [size for size in PARTS if size in lab.sizes()]


def linear_shapes(names: Iterable[str]) -> dict[tuple[int, int], str]:
    """(n, k) of the linear layers of models, each with the first that has it; of mixtures without experts."""
    found: dict[tuple[int, int], str] = {}
    for name in names:
        mixture = name.split("-tp")[0] in MIXTURES
        for role in ROLES[: 2 if mixture else 4]:
            found.setdefault(model_shape(name).linear(role), name)
        if name in MIXTURES:
            found.setdefault((MIXTURES[name], model_shape(name).hidden), name)
    return found


class ShardsSweep(SoloSweep):
    """Linear layers, heads and attention of other models: new ones on the whole GPU, all of them on some SM sets."""

    name = "shards"
    weight = 6.0
    axes = ("m", "q", "h", "contexts", "batch")

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total = lab.facts.sms
        own = {lab.model.linear(role) for role in ROLES[:4]}
        seen, new = linear_shapes(SEEN), linear_shapes(NEW)
        new = {shape: name for shape, name in new.items() if shape not in {*own, *seen}}
        made: list[Point] = []
        for sms, sizes, shapes in ((total, NEW_M, new), *((s, PART_M, {**seen, **new}) for s in parts(lab))):
            for ((n, k), name), m in product(shapes.items(), sizes):
                if (n, k) not in own:
                    made.append({"kind": "gemm", "m": m, "n": n, "k": k, "model": name, "sms": sms})
        return [*made, *self._heads(total), *self._rows(total), *self._attention(lab)]

    def _heads(self, total: int) -> list[Point]:
        sizes = {model_shape(name).linear("lm_head"): name for name in (*SEEN, *NEW)}
        return [
            {"kind": "lm_head", "m": m, "model": name, "sms": total}
            for name, m in product(sizes.values(), HEAD_M)
        ]

    def _rows(self, total: int) -> list[Point]:
        norms = ("qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b-tp8")
        activations = ("qwen3-30b-a3b", "qwen3-235b-a22b", "llama-3.1-70b-tp8", "llama-2-7b", "qwen3-32b")
        named = [("norm", name) for name in norms] + [("activation", name) for name in activations]
        return [
            {"kind": kind, "m": m, "model": name, "sms": total}
            for (kind, name), m in product(named, (1, 16, 128, 512, 2048, 8192))
        ]

    def _attention(self, lab: Bench) -> list[Point]:
        made = [
            {**point, "model": name}
            for name in HEADS
            for point in ShapesSweep().points(lab, True)
            if point["kind"] != "gemm" and point["model"] == "llama-3.1-70b-tp8"
        ]
        for name, sms in product((*SEEN, *HEADS), parts(lab)):
            for q, h in product((512, 2048), (0, 4096)):
                shape: Point = {"kind": "prefill_attention", "q": [q], "h": [h], "attention": "fa3"}
                made.append({**shape, "model": name, "sms": sms})
            for batch in (4, 64):
                shape = {"contexts": [2048] * batch, "batch": batch, "attention": "fa2"}
                made.append({"kind": "decode_attention", **shape, "model": name, "sms": sms})
        return made


class ExpertShardsSweep(SoloSweep):
    """Grouped GEMMs with rows as tokens draw their experts: shards, other shapes, e4m3, SM sets."""

    name = "experts"
    weight = 6.0
    axes = ("m",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total = lab.facts.sms
        made: list[Point] = []
        for name, role, m, skew in product(EXPERTS, EXPERT_ROLES, EXPERT_M, (0.0, 1.0)):
            made.append({"experts_of": name, "role": role, "m": m, "skew": skew, "sms": total})
        few = ("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-235b-a22b-tp8")
        for name, role, m, sms in product(few, EXPERT_ROLES, EXPERT_PART_M, parts(lab)):
            made.append({"experts_of": name, "role": role, "m": m, "skew": 0.0, "sms": sms})
        for name, role, m in product(("qwen3-30b-a3b", "qwen3-235b-a22b"), EXPERT_ROLES, EXPERT_PART_M):
            shape: Point = {"experts_of": name, "role": role, "m": m, "skew": 0.0, "dtype": FP8}
            made += [{**shape, "sms": sms} for sms in (total, *(s for s in parts(lab) if s == 64))]
        return [{"kind": "moe", "routing": DRAWN, **point} for point in made]


class RoutingSweep(SoloSweep):
    """Choice of experts, moving rows to them and back, and casting inputs to e4m3."""

    name = "routing"
    weight = 2.5
    axes = ("m",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        sets = (lab.facts.sms, *(size for size in parts(lab) if size in (32, 64)))
        for name, label, sms in product(("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b"), ROUTING, sets):
            sizes = ROUTING_M if sms == lab.facts.sms else ROUTING_M[::4]
            shape: Point = {"kind": "routing", "experts_of": name, "label": label, "sms": sms}
            made += [{**shape, "m": m} for m in sizes]
        for label, k, m in product(QUANTISE, QUANTISED, ROUTING_M):
            made.append({"kind": "quantise", "label": label, "m": m, "k": k, "sms": lab.facts.sms})
        return made


class Fp8ShardsSweep(SoloSweep):
    """Linear layers with e4m3 operands: more sizes, other models, SM sets."""

    name = "fp8"
    weight = 3.5
    axes = ("m",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total = lab.facts.sms
        own = linear_shapes((lab.model.name,))
        others = {shape: name for shape, name in linear_shapes(FP8_MODELS).items() if shape not in own}
        grids = [(own, FP8_M, (total,)), (own, FP8_PART_M, tuple(parts(lab))), (others, M, (total,))]
        return [
            {"kind": "gemm_fp8", "m": m, "n": n, "k": k, "sms": sms}
            for shapes, sizes, sets in grids
            for (n, k), m, sms in product(shapes, sizes, sets)
        ]

"""The operators that are timed, one module per family; `make` builds one from a point of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calib.kernels.attention import DecodeAttention, PrefillAttention
from calib.kernels.base import Kernel
from calib.kernels.elementwise import Activation, KvWrite, Norm, Rope, Sampling, StreamRead
from calib.kernels.experts import GroupedGemm
from calib.kernels.fused import MixedAttention
from calib.kernels.gemm import Gemm, GemmFp8
from calib.kernels.layer import Step
from calib.kernels.routing import Quantise, Routing
from calib.models import ModelShape, model_shape
from sim.errors import CalibrationError
from sim.suggest import nearest

ROWS = {cls.kind: cls for cls in (Norm, Rope, Activation, KvWrite)}


def make(model: ModelShape, point: Mapping[str, Any]) -> Kernel:
    """The kernel of a point: `kind` and that kind's shape keys (role, m, q, h, contexts, layers, attention, and
    `model` where it is not the calibration's own)."""
    kind = point["kind"]
    if "model" in point:
        model = model_shape(point["model"])
    if kind in ("gemm", "lm_head"):
        role = "lm_head" if kind == "lm_head" else point.get("role", "")
        return Gemm(model, role, point["m"], point.get("n", 0), point.get("k", 0))
    if kind == "gemm_fp8":
        return GemmFp8(model, point["m"], point["n"], point["k"])
    if kind == "moe":
        how = {key: point[key] for key in ("skew", "routing", "dtype") if key in point}
        return GroupedGemm(model, point["experts_of"], point["role"], point["m"], **how)
    if kind == "routing":
        return Routing(model, point["experts_of"], point["label"], point["m"])
    if kind == "quantise":
        return Quantise(model, point["label"], point["m"], point["k"])
    if kind == "fused_attention":
        return MixedAttention(
            model,
            point["q"],
            point["h"],
            point["contexts"],
            point["attention"],
            point.get("dtype", "bfloat16"),
        )
    if kind in ROWS:
        return ROWS[kind](model, point["m"])
    if kind == "sampling":
        return Sampling(model, point["m"], point.get("label", "greedy"))
    if kind == "stream_read":
        return StreamRead(model, point["size"])
    if kind == "prefill_attention":
        return PrefillAttention(
            model, point["q"], point["h"], point["attention"], point.get("dtype", "bfloat16")
        )
    if kind == "decode_attention":
        return DecodeAttention(model, point["contexts"], point["attention"], point.get("dtype", "bfloat16"))
    if kind.endswith(("_layer", "_step")):
        return Step(
            model,
            point.get("q", ()),
            point.get("h", ()),
            point.get("contexts", ()),
            point.get("layers", 1),
            point["attention"],
            head=kind.endswith("_step"),
        )
    raise CalibrationError(
        f"There is no operator '{kind}' to time.{nearest(kind, [*ROWS, 'gemm', 'lm_head'])}"
    )

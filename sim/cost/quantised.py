"""Which curves price a model whose projections are quantised: e4m3 weights and inputs, 16-bit outputs.

As vLLM's `--quantization fp8` runs: embedding, router, LM head, attention and KV cache keep 16 bits, and each
projection's input is cast by a kernel of its own (`quantise`).
"""

from __future__ import annotations

from dataclasses import replace

from sim.cost.model import ModelSpec
from sim.cost.operators import linear_operators
from sim.cost.profile import CurveProfile, digest
from sim.errors import SimctlError

FAMILIES = ("gemm", "moe")
KEPT = ("gemm/router",)  # 16-bit operators of a family that is quantised else
MULTIPLE = 16  # of both widths of an e4m3 product (cuBLAS, torch._scaled_mm)


def with_weights(profile: CurveProfile, model: ModelSpec) -> CurveProfile:
    """The profile with e4m3 curves under the names of the projections; unchanged for a model of 16 bits.

    `model`: the shard of one GPU. Raises SimctlError for a GPU without e4m3 products and for widths they do not take.
    """
    if not model.quantization:
        return profile
    gpu = profile.gpu
    if gpu.fp8_tflops is None:
        raise SimctlError(
            f"model.quantization {model.quantization}: {gpu.name} has no e4m3 tensor cores; use 16 bits."
        )
    for operator in linear_operators(model):
        if operator.dtype_bytes == 1 and operator.n and (operator.n % MULTIPLE or operator.k % MULTIPLE):
            raise SimctlError(
                f"model.quantization {model.quantization}: {operator.name} of {model.name} is {operator.n} x "
                f"{operator.k}, and e4m3 products take multiples of {MULTIPLE}."
            )
    curves = dict(profile.curves)
    curves |= {name: profile.curve(name) for name in KEPT}
    for family in FAMILIES:
        # what the profile holds by layer would hide the family's quantised curve
        curves = {
            name: one for name, one in curves.items() if name in KEPT or not name.startswith(f"{family}/")
        }
        curves[family] = profile.curve(f"{family}/{model.quantization}")
    return replace(profile, curves=curves, content_hash=digest([profile.content_hash, model.quantization]))

"""`simctl profile diff`: how two profiles of one GPU differ, operator by operator and for whole steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.cli.profile_rows import DEFAULT_MODEL
from sim.cost.gpu import GpuSpec, load_gpu
from sim.cost.launching import Launching
from sim.cost.model import load_model
from sim.cost.operators import decode_shape, prefill_shape
from sim.cost.profile import CurveProfile, find_folder, load_folder, spec_profile
from sim.cost.profile_schema import read_yaml
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Launch, Shape
from sim.errors import SimctlError

TOKENS = np.array([1, 16, 64, 256, 512, 1024, 2048, 4096, 8192])
SHARES = (1.0, 0.75, 0.5, 0.25)
CHUNKS = ((128, 0), (512, 0), (512, 4096), (2048, 0), (2048, 8192), (8192, 0))
BATCHES = ((1, 1024), (16, 1024), (64, 1024), (64, 4096), (256, 1024))


def compared(first: str, second: str, model: str | None) -> list[dict[str, Any]]:
    """Ratios of times by `second` over those by `first`: median, lowest and highest over common shapes."""
    names = [name for name in (first, second) if name != "spec"]
    if not names:
        raise SimctlError("Two profiles are compared; give a measured one beside 'spec'.")
    gpus = {str(read_yaml(find_folder(name)).get("gpu")) for name in names}
    if len(gpus) > 1:
        raise SimctlError(f"'{first}' and '{second}' are of different GPUs: {', '.join(sorted(gpus))}.")
    gpu = load_gpu(gpus.pop())
    about = read_yaml(find_folder(names[0])).get("about") or {}
    spec = load_model(model or about.get("model") or DEFAULT_MODEL)
    costs = [_cost(name, gpu, spec.name if model is None else model) for name in (first, second)]
    rows = []
    for operator, shape in _shapes(costs[0]).items():
        ratios = [
            costs[1].timing(operator, shape, sms).seconds / costs[0].timing(operator, shape, sms).seconds
            for sms in _widths(gpu)
        ]
        labels = [cost.profile.curve(operator).label_for(shape) for cost in costs]
        rows.append(_row(operator, np.concatenate([np.ravel(one) for one in ratios]), labels))
    for name, launches in _launches().items():
        pairs = [[cost.solo(launch).gpu_s for cost in costs] for launch in launches]
        rows.append(_row(name, np.array([b / a for a, b in pairs]), [cost.profile.name for cost in costs]))
    return rows


def _cost(name: str, gpu: GpuSpec, model: str) -> ProfiledCost:
    profile: CurveProfile = spec_profile(gpu) if name == "spec" else load_folder(find_folder(name), gpu)
    return ProfiledCost(load_model(model), profile, Launching("eager", profile.host), {})


def _widths(gpu: GpuSpec) -> list[int]:
    granule = gpu.sm_granule
    return [gpu.sms if s == 1.0 else max(granule, int(s * gpu.sms) // granule * granule) for s in SHARES]


def _shapes(cost: ProfiledCost) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for operator in cost.operators:
        count = TOKENS if operator.rows == "tokens" else TOKENS[TOKENS <= 256]
        found[operator.name] = operator.shape(count)
    q, h = (np.array(column) for column in zip(*CHUNKS, strict=True))
    found["prefill_attention"] = prefill_shape(cost.model, q, h)
    batch = np.array([b for b, _ in BATCHES])
    found["decode_attention"] = decode_shape(cost.model, batch, np.array([float(b * c) for b, c in BATCHES]))
    return found


def _launches() -> dict[str, list[Launch]]:
    return {
        "prefill_step": [Launch(chunks=(chunk,)) for chunk in CHUNKS],
        "decode_step": [Launch((), b, b * c, c, graph=True) for b, c in BATCHES],
    }


def _row(operator: str, ratios: Any, labels: list[str]) -> dict[str, Any]:
    return {
        "operator": operator,
        "shapes": len(ratios),
        "median": round(float(np.median(ratios)), 3),
        "lowest": round(float(np.min(ratios)), 3),
        "highest": round(float(np.max(ratios)), 3),
        "first": labels[0],
        "second": labels[1],
    }

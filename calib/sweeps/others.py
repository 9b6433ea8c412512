"""Host costs, the launch shapes of kernels, and random shapes that no grid holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from calib.bench import Bench
from calib.hostcost import LABELS
from calib.kernels import attention, elementwise, gemm, make
from calib.kernels.experts import DRAWN, FP8
from calib.kernels.routing import QUANTISE, ROUTING
from calib.models import ROLES
from calib.partition import HIGH, NORMAL
from calib.sweep import Point, Sweep
from calib.sweeps.common import PairSweep, affordable, size_beside, sizes, solo_row
from calib.sweeps.corun import decode_shape, prefill_shape, splits
from calib.sweeps.steps import mixed_shape

BATCHES = (1, 16, 64, 256)


class HostSweep(Sweep):
    """Host time of launches, replays, planning, reading back; device time of a hop between partitions."""

    name = "host"
    weight = 0.8
    axes = ("batch",)

    def points(self, lab: Bench, full: bool) -> list[Point]:
        return [{"kind": "host", "label": label, "batch": b} for label, b in product(LABELS, BATCHES)]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        columns, sample = lab.host_costs(point["label"], point["batch"])
        return [{**columns, "sms": lab.facts.sms, **sample.columns()}]


class KernelSweep(Sweep):
    """Name, grid, block and shared memory of the kernels that the libraries pick, one run a shape."""

    name = "kernels"
    weight = 0.8
    axes = ()

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = [
            {"shapes": [{"kind": "gemm", "role": r, "m": m} for m in gemm.M_AXIS]} for r in ROLES[:4]
        ]
        made.append({"shapes": [{"kind": "lm_head", "m": m} for m in gemm.HEAD_M_AXIS]})
        backends = product(("fa3", "fa2"), attention.Q_AXIS, (0, 4096))
        made.append(
            {
                "shapes": [
                    {"kind": "prefill_attention", "q": [q], "h": [h], "attention": a} for a, q, h in backends
                ]
            }
        )
        batches = product(attention.BATCH_AXIS, (512, 4096))
        made.append(
            {
                "shapes": [
                    {"kind": "decode_attention", "contexts": [c] * b, "attention": "fa2"} for b, c in batches
                ]
            }
        )
        made.append({"shapes": [{"kind": k, "m": 512} for k in ("norm", "rope", "activation", "kv_write")]})
        return made

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        kernels = [make(lab.model, shape) for shape in point["shapes"]]
        found = lab.launched(kernels)
        return [
            {"kind": k.kind, "label": k.label, **k.columns(), "sms": lab.facts.sms, **launch}
            for k, launches in zip(kernels, found, strict=True)
            for launch in launches
        ]

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return {"kind": point["shapes"][0]["kind"], "sms": lab.facts.sms}


class ErrorSweep(Sweep):
    """Each kernel against float32 on small random inputs."""

    name = "errors"
    weight = 0.5
    axes = ()

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = [{"kind": "gemm", "role": r, "m": 129} for r in ROLES[:4]]
        made += [
            {"kind": k, "m": 100} for k in ("lm_head", "norm", "rope", "activation", "kv_write", "sampling")
        ]
        made.append({"kind": "stream_read", "size": elementwise.READ_AXIS[0]})
        for backend in ("fa3", "fa2"):
            made.append({"kind": "prefill_attention", "q": [200, 33], "h": [300, 0], "attention": backend})
            shape = {"q": [70], "h": [130], "contexts": [40, 333], "attention": backend}
            made.append({"kind": "mixed_layer", **shape, "layers": 2})
        made.append({"kind": "decode_attention", "contexts": [1, 17, 500, 2000], "attention": "fa2"})
        mixture = {"experts_of": "qwen3-30b-a3b", "m": 40}
        for dtype in ("bfloat16", FP8):
            made.append({"kind": "moe", **mixture, "role": "gate_up", "routing": DRAWN, "dtype": dtype})
        made += [{"kind": "routing", **mixture, "label": label} for label in ROUTING]
        made += [{"kind": "quantise", "label": label, "m": 40, "k": 4096} for label in QUANTISE]
        return [{**p, "sms": lab.facts.sms} for p in made]

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        kernel = make(lab.model, point)
        error = lab.error(kernel)
        reason = "" if error < 2e-2 else f"relative error {error:.3g} against float32"
        columns = {"kind": kernel.kind, "label": kernel.label, **kernel.columns()}
        return [{**columns, "sms": lab.facts.sms, "error": error, "skip": reason}]


class RandomSweep(PairSweep):
    """Held out: `count` random shapes of every operator, step and co-run, drawn from `seed` and off every grid."""

    name = "random"
    weight = 7.0
    axes = ("late",)

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def points(self, lab: Bench, full: bool) -> list[Point]:
        rng = np.random.default_rng([self.seed, 7])
        made: list[Point] = []
        for draw in range(self.count):
            found = [*self._operators(lab, rng, sizes(lab, True)), *self._steps(lab, rng)]
            made += [{**p, "late": draw} for p in affordable(lab, found, full)]
            made.append({**self._corun(lab, rng), "late": draw})
        return made

    def _operators(self, lab: Bench, rng: np.random.Generator, where: list[int]) -> list[Point]:
        def sms() -> int:
            return int(rng.choice([lab.facts.sms, rng.choice([s for s in where if s >= 16])]))

        q, h = off_grid(rng, 8192, attention.Q_AXIS), off_grid(rng, 32768, attention.H_AXIS)
        batch = off_grid(rng, 256, attention.BATCH_AXIS)
        contexts = np.clip(rng.lognormal(7.0, 1.0, batch), 16, 16384).astype(int).tolist()
        rows = off_grid(rng, 8192, elementwise.M_AXIS)
        found: list[Point] = [
            {"kind": "gemm", "role": str(rng.choice(ROLES[:4])), "m": off_grid(rng, 8192, gemm.M_AXIS)},
            {"kind": "lm_head", "m": off_grid(rng, 512, gemm.HEAD_M_AXIS)},
            {"kind": "prefill_attention", "q": [q], "h": [h], "attention": str(rng.choice(["fa2", "fa3"]))},
            {"kind": "decode_attention", "contexts": contexts, "attention": "fa2"},
            {"kind": str(rng.choice(["norm", "rope", "activation", "kv_write"])), "m": rows},
        ]
        return [{**p, "sms": sms()} for p in found]

    def _steps(self, lab: Bench, rng: np.random.Generator) -> list[Point]:
        layers, total = lab.model.layers, lab.facts.sms
        mixed = {**mixed_shape(rng, layers), "attention": "fa3", "sms": total}
        decode = {key: mixed[key] for key in ("contexts", "layers", "attention", "sms")}
        prefill = {key: mixed[key] for key in ("q", "h", "layers", "attention", "sms")}
        kinds: list[Point] = [mixed, {**decode, "kind": "decode_step"}, {**prefill, "kind": "prefill_step"}]
        launch = str(rng.choice(["graph", "eager"]))
        return [{**kinds[int(rng.integers(3))], "launch": launch}]

    def _corun(self, lab: Bench, rng: np.random.Generator) -> Point:
        sms = int(rng.choice(splits(lab, True)))
        modes = [mode for mode in ("disjoint", "disjoint", "whole", "half") if size_beside(lab, sms, mode)]
        mode = str(rng.choice(modes))
        batch, context = off_grid(rng, 256, BATCHES), int(2 ** rng.uniform(8, 12))
        return {
            "a": prefill_shape(off_grid(rng, 6000, gemm.M_AXIS), int(rng.integers(0, 8192))),
            "b": decode_shape(lab, batch, context),
            "sms": sms,
            "sms_b": size_beside(lab, sms, mode),
            "mode": mode,
            "priority": NORMAL if mode == "disjoint" else str(rng.choice([NORMAL, HIGH])),
        }

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        if "a" in point:
            return super().measure(lab, point)
        kernel = make(lab.model, point)
        return [solo_row(kernel, point["sms"], lab.time(kernel, point["sms"], point.get("launch", "graph")))]

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        return super().shape(lab, point) if "a" in point else Sweep.shape(self, lab, point)


def off_grid(rng: np.random.Generator, most: int, grid: tuple[int, ...]) -> int:
    """A log-uniform integer from 1 to `most` that `grid` does not hold."""
    while True:
        value = int(2 ** rng.uniform(0, np.log2(most)))
        if value not in grid:
            return value

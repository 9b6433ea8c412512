"""Measured experts, casts and e4m3 products as points of curves: who got which rows, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.fake import FakeLab
from calib.fit.points import expert_counts, operator_points
from calib.fit.shapes import taken_apart
from calib.fit.solo import fit_one, read_points
from calib.kernels import make
from calib.kernels.experts import DRAWN, FP8, dealt, drawn
from calib.measure import QUICK
from calib.models import EXPERTS, MODELS
from calib.rows import frame, row, write_table
from calib.sweeps.shards import ExpertShardsSweep, Fp8ShardsSweep, RoutingSweep, ShardsSweep
from sim.cli import cli
from sim.cost.gpu import load_gpu
from sim.cost.model import load_model
from sim.cost.operators import linear_operators
from sim.cost.profile import spec_profile
from sim.cost.shapes import Elementwise, Experts, Gemm
from sim.errors import CalibrationError, SimctlError

GPU = load_gpu("h200-sxm")
LLAMA = MODELS["llama-3.1-8b"]


def moe(m: int, time_s: float = 1e-3, role: str = "gate_up", **more: Any) -> dict[str, Any]:
    shape = EXPERTS["qwen3-30b-a3b"]
    n, k = (1536, 2048) if role == "gate_up" else (2048, 768)
    base = {"m": m, "n": n, "k": k, "experts": shape.experts, "spread": 0.0, "sms": 132, "sd_s": 0.0}
    label = f"qwen3-30b-a3b/{role}"
    return row("moe", kind="moe", model="llama-3.1-8b", label=label, time_s=time_s, **{**base, **more})


def test_drawn_rows_are_distinct_experts_of_each_token() -> None:
    counts = drawn(50, 16, 4, 0.0)
    assert sum(counts) == 50 * 4
    assert max(counts) <= 50
    assert drawn(50, 16, 4, 0.0) == counts
    assert drawn(9, 8, 8, 1.0) == [9] * 8
    popular = np.mean([drawn(200, 32, 4, 1.2, seed) for seed in range(20)], axis=0)
    assert popular[0] > popular[8] > popular[31]
    assert popular[0] <= 200


def test_rows_of_a_point_are_those_that_the_sweep_gave_the_kernel() -> None:
    counts = expert_counts(frame([moe(40, spread=1.0), moe(40, spread=1.0, routing=DRAWN)]))
    assert counts[0].tolist() == dealt(320, 128, 1.0)
    assert counts[1].tolist() == drawn(40, 128, 8, 1.0)
    kernel = make(
        LLAMA, {"kind": "moe", "experts_of": "qwen3-30b-a3b", "role": "down", "m": 40, "routing": DRAWN}
    )
    assert kernel.rows == drawn(40, 128, 8, 0.0)  # type: ignore[attr-defined]
    assert kernel.columns()["routing"] == DRAWN


def test_types_and_rows_that_no_router_deals_are_kept_apart() -> None:
    found = operator_points(
        frame(
            [
                moe(16),  # dealt out evenly to the last one
                moe(16, spread=0.6),
                moe(16, routing=DRAWN),
                moe(16, routing=DRAWN, dtype=FP8),
            ]
        ),
        GPU,
    )
    assert len(found["moe"]) == 2
    assert found["moe"].keys[0] == (1536, 2048, 128, 8, 2)
    assert found["moe/fp8"].keys == ((1536, 2048, 128, 8, 1),)
    shape = found["moe"].shape(found["moe"].keys[0])
    assert isinstance(shape, Experts)
    assert shape.counts is not None
    assert shape.counts.sum(axis=1).tolist() == [128, 128]


def test_keys_of_casts_and_routing_are_those_that_the_cost_model_asks_for() -> None:
    made = [
        row("routing", kind="quantise", model="x", label=label, m=8, k=4096, sms=132, time_s=1e-6)
        for label in ("static", "dynamic")
    ]
    made += [
        row(
            "routing",
            kind="routing",
            model="x",
            label=f"qwen3-30b-a3b/{step}",
            m=8,
            n=2048,
            sms=132,
            time_s=1e-6,
        )
        for step in ("topk", "permute", "unpermute")
    ]
    found = operator_points(frame(made), GPU)
    assert set(found) == {"quantise", "routing/topk", "routing/permute"}
    assert len(found["quantise"]) == 1
    for model, name in (
        ("qwen3-30b-a3b", "routing/topk"),
        ("qwen3-30b-a3b", "routing/permute"),
        ("llama-3.1-8b-fp8", "quantise/qkv"),
    ):
        operator = next(op for op in linear_operators(load_model(model)) if op.name == name)
        points = found[name] if name in found else found[name.split("/")[0]]
        shape = operator.shape(np.array([8]))
        assert isinstance(shape, Elementwise)
        assert points.keys[0] == (shape.bytes_per_row,)


def test_e4m3_products_of_other_models_are_taken_apart() -> None:
    def gemm(kind: str, n: int, k: int, **more: Any) -> dict[str, Any]:
        return row(kind, kind=kind, model="llama-3.1-8b", m=64, n=n, k=k, sms=132, time_s=1e-5, **more)

    fp8 = [gemm("gemm_fp8", n, 4096, dtype=FP8) for n in (4096, 6144, 1280)]
    found = operator_points(frame([gemm("gemm", 4096, 4096), gemm("gemm", 6144, 4096), *fp8]), GPU)
    own, others = taken_apart(found, {})
    assert {key[:2] for key in own["gemm/fp8"].keys} == {(4096, 4096), (6144, 4096)}
    assert others["gemm/fp8"].keys == ((1280, 4096, 1),)
    shape = own["gemm/fp8"].shape((4096, 4096, 1))
    assert isinstance(shape, Gemm)
    assert shape.dtype_bytes == 1


def test_a_known_form_of_experts_comes_back_from_its_times(tmp_path: Path) -> None:
    """Times of the spec profile's form, 1.3 times as slow: the fitted curve says so, also for another routing."""
    form = spec_profile(GPU).curve("moe")
    made = []
    for m in (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        for role in ("gate_up", "down"):
            for skew in (0.0, 1.0):
                point = moe(m, routing=DRAWN, role=role, spread=skew)
                points = operator_points(frame([point]), GPU)["moe"]
                seconds = form.timing(points.shape(points.keys[0]), 132).seconds[0]
                made.append({**point, "time_s": 1.3 * float(seconds)})
    (tmp_path / "measurements").mkdir()
    write_table(made, tmp_path / "measurements" / "experts.csv.gz")
    points = read_points(tmp_path, GPU)["moe"]
    fitted = fit_one(tmp_path, GPU, points)
    assert fitted.record["errors"][fitted.record["method"]]["random"]["median"] < 0.05
    curve = fitted.fitted.curve
    for skew in (0.0, 0.6, 1.2):
        shape = Experts(np.array([24, 300]), 1536, 2048, 2, 128, 8, skew)
        expected = 1.3 * form.timing(shape, 132).seconds
        assert curve.timing(shape, 132).seconds == pytest.approx(expected, rel=0.08)
    assert curve.covered(shape, 132)
    assert curve.label_for(shape) == "measured"
    foreign = Experts(np.array([24]), 1024, 2048, 2, 64, 8)
    assert not curve.covered(foreign, 132)


@pytest.mark.parametrize("sweep", [ShardsSweep, ExpertShardsSweep, RoutingSweep, Fp8ShardsSweep])
def test_points_of_the_sweeps_can_be_built_and_are_no_others(sweep: Any) -> None:
    lab = FakeLab(LLAMA, QUICK, 0)
    points = sweep().points(lab, True)
    keys = [str(sorted(point.items(), key=str)) for point in points]
    assert len(set(keys)) == len(keys)
    for point in points[::40]:
        assert make(lab.model, point).bytes > 0
        assert point["sms"] in lab.sizes()


def test_unknown_experts_types_and_scales_are_refused() -> None:
    base = {"kind": "moe", "experts_of": "qwen3-30b-a3b", "role": "down", "m": 4}
    for change in ({"routing": "even"}, {"dtype": "int4"}, {"experts_of": "qwen9"}, {"role": "up"}):
        with pytest.raises(CalibrationError):
            make(LLAMA, {**base, **change})
    with pytest.raises(CalibrationError, match="static or dynamic"):
        make(LLAMA, {"kind": "quantise", "label": "lazy", "m": 4, "k": 64})
    with pytest.raises(CalibrationError, match="No experts"):
        make(LLAMA, {"kind": "routing", "experts_of": "qwen3-30b-a3b", "label": "sort", "m": 4})


def test_a_mixture_is_no_model_to_calibrate_with(tmp_path: Path) -> None:
    with pytest.raises(SimctlError, match="is a mixture"):
        cli.main(
            ["calibrate", "--fake", "--model", "qwen3-30b-a3b", "-o", str(tmp_path / "x")],
            standalone_mode=False,
        )


POINTS = [
    {"kind": "routing", "experts_of": "mixtral-8x7b", "label": "topk", "m": 5},
    {"kind": "routing", "experts_of": "mixtral-8x7b", "label": "permute", "m": 5},
    {"kind": "routing", "experts_of": "mixtral-8x7b", "label": "unpermute", "m": 5},
    {"kind": "quantise", "label": "static", "m": 5, "k": 64},
    {"kind": "quantise", "label": "dynamic", "m": 5, "k": 64},
]


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p['kind']}-{p['label']}")
def test_kernels_match_float32_on_the_cpu(point: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from calib.arena import Arena
    from calib.models import ModelShape

    arena = Arena(ModelShape("tiny", 4, 256, 4, 2, 64, 512, 1000), device="cpu", layers=4, kv_bytes=8 << 20)
    arena.fill()
    kernel = make(arena.model, point)
    kernel.prepare(arena)
    assert kernel.reference_error() < 1.5e-2

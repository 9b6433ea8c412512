"""`simctl profile predict` of experts and e4m3 products, and their rows in `profile show`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sim.cli.profile import profile
from sim.cost.measured_predict import COLUMNS

NAME = "h200-sxm"
MIXTURE = "qwen3-30b-a3b"


def call(*arguments: str) -> str:
    return CliRunner().invoke(profile, list(arguments), catch_exceptions=False).stdout


def answers(tmp_path: Path, *given: dict) -> list[dict]:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(given)
    return json.loads(call("predict", NAME, "--points", str(path), "--json"))


def test_the_products_of_a_layers_experts_add_up(tmp_path):
    parts = [{"n": 1536, "k": 2048}, {"n": 2048, "k": 768}]
    both, *each = answers(
        tmp_path, *({"kind": "moe", "model": MIXTURE, "m": 64, **part} for part in ({}, *parts))
    )
    assert both["label"] == "measured"
    assert both["flags"] == []
    assert both["gpu_s"] == pytest.approx(sum(one["gpu_s"] for one in each))
    # measured with rows drawn by 64 tokens: 272 and 152 us
    assert both["gpu_s"] == pytest.approx(424e-6, rel=0.05)
    assert 0 < both["sd_s"] < 0.1 * both["gpu_s"]


def test_experts_on_fewer_sms_in_e4m3_and_as_a_shard(tmp_path):
    row = {"kind": "moe", "model": MIXTURE, "m": 128}
    whole, part, small, large, shard = answers(
        tmp_path,
        row,
        {**row, "sms": 32},
        {**row, "model": f"{MIXTURE}-fp8"},
        {**row, "model": "qwen3-235b-a22b"},
        {**row, "model": "qwen3-235b-a22b", "tp": 8},
    )
    assert 3.0 < part["gpu_s"] / whole["gpu_s"] < 4.2
    assert 0.4 < small["gpu_s"] / whole["gpu_s"] < 0.75
    assert 1 / 8 < shard["gpu_s"] / large["gpu_s"] < 1 / 4  # a slice has narrow tiles
    assert {one["label"] for one in (whole, part, small, large, shard)} == {"measured"}


def test_models_without_such_products_are_refused_in_a_flag(tmp_path):
    dense, wrong = answers(
        tmp_path,
        {"kind": "moe", "model": "llama-3.1-8b", "m": 4},
        {"kind": "moe", "model": MIXTURE, "m": 4, "n": 7},
    )
    assert dense["gpu_s"] is wrong["gpu_s"] is None
    assert "has no experts" in dense["flags"][0]
    assert "1536 x 2048 and 2048 x 768" in wrong["flags"][0]


def test_a_quantised_model_prices_its_projections_in_e4m3_and_its_head_in_16_bits(tmp_path):
    row = {"kind": "gemm", "m": 512, "n": 28672, "k": 4096}
    head = {"kind": "gemm", "m": 64, "n": 128256, "k": 4096}
    router = {"kind": "gemm", "m": 64, "n": 128, "k": 2048, "model": MIXTURE}
    wide, small, head_wide, head_small, *routers = answers(
        tmp_path,
        row,
        {**row, "model": "llama-3.1-8b-fp8"},
        head,
        {**head, "model": "llama-3.1-8b-fp8"},
        router,
        {**router, "model": f"{MIXTURE}-fp8"},
    )
    assert 1.5 < wide["gpu_s"] / small["gpu_s"] < 2.1
    assert head_wide["gpu_s"] == head_small["gpu_s"]
    assert routers[0]["gpu_s"] == routers[1]["gpu_s"]


def test_steps_of_mixtures_and_of_quantised_models_are_answered(tmp_path):
    step = {"kind": "step", "prefill_tokens": "2048", "decode_contexts": "512;1024"}
    dense, mixture, small = answers(
        tmp_path, step, {**step, "model": MIXTURE}, {**step, "model": "llama-3.1-8b-fp8"}
    )
    assert all(one["gpu_s"] > 0 and one["step_s"] >= one["gpu_s"] for one in (dense, mixture, small))
    assert small["gpu_s"] < dense["gpu_s"]


def test_show_has_errors_of_experts_and_of_e4m3_products():
    found = json.loads(call("show", NAME, "--json"))["operators"]
    for name in ("moe", "moe/fp8", "gemm/fp8", "routing/topk", "routing/permute", "quantise"):
        assert found[name]["label"] == "measured"
        assert found[name]["points"] >= 40
        assert 0 < found[name]["median_error"] < found[name]["p95_error"]
    assert found["moe"]["median_error"] < 0.05

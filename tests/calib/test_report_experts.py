"""Sections of the page on experts, e4m3 products and other models' shapes, on known data."""

from __future__ import annotations

from typing import Any

import pandas as pd

from calib.kernels.experts import DRAWN, FP8
from calib.report.data import Profile
from calib.report.experts import experts
from calib.report.shapes import fp8, others
from calib.rows import frame, row

RUN = {"model": "llama-3.1-8b", "gpu": {"name": "NVIDIA Test", "sms": 132}}


def profile(rows: dict[str, list[dict[str, Any]]], operators: dict[str, Any] | None = None) -> Profile:
    tables: dict[str, pd.DataFrame] = {name: frame(of) for name, of in rows.items()}
    return Profile("test", RUN, tables, {"errors": {"operators": operators or {}}})


def moe(m: int, time_us: float, spread: float = 0.0, sms: int = 132, **more: Any) -> dict[str, Any]:
    shape = {"m": m, "n": 1536, "k": 2048, "experts": 128, "spread": spread, "sms": sms, "flops": 1e9, **more}
    return row("moe", kind="moe", label="qwen3-30b-a3b/gate_up", time_s=1e-6 * time_us, **shape)


def test_a_skew_is_told_by_its_times_and_tiles() -> None:
    dealt = [moe(2048, 100.0), moe(2048, 150.0, 1.2), moe(32, 80.0), moe(32, 40.0, 1.2)]
    drawn = [
        moe(8, 60.0, routing=DRAWN),
        moe(8, 45.0, 1.0, routing=DRAWN),
        moe(8, 180.0, sms=32, routing=DRAWN),
        moe(8, 30.0, routing=DRAWN, dtype=FP8),
    ]
    held = {"moe": {"held_out": {"rows": {"median": 0.03, "p95": 0.12}}}}
    found = experts(profile({"moe": dealt, "experts": drawn}, held))
    assert found is not None
    text = "\n".join([found.lead, *found.body])
    assert "up to 1.50 times" in found.lead
    assert "| qwen3-30b-a3b/gate_up | 2048 | 100 |" in text
    assert "takes 1.50 to 1.50 times as long" in text
    assert "gives the most popular expert 35 times as many rows" in text
    assert "take 0.75 to 0.75 times as long" in text  # drawn with a skew
    assert "| qwen3-30b-a3b/gate_up | 8 | 3.00 |" in text  # 32 SMs
    assert "2.00 to 2.00 times as fast as in bf16" in text
    assert "moe: rows 3.0 % / 12.0 %" in text


def test_no_experts_no_section() -> None:
    assert experts(profile({"gemm": [moe(1, 1.0)]})) is None
    assert fp8(profile({"gemm": [moe(1, 1.0)]})) is None
    assert others(profile({})) is None


def test_e4m3_products_and_casts() -> None:
    def gemm(sweep: str, time_us: float, **more: Any) -> dict[str, Any]:
        shape = {"m": 128, "n": 4096, "k": 4096, "sms": 132, "flops": 4e9, **more}
        return row(sweep, kind=sweep, time_s=1e-6 * time_us, **shape)

    casts = [
        row("routing", kind="quantise", label=label, m=128, k=4096, sms=132, time_s=1e-6 * us)
        for label, us in (("static", 2.0), ("dynamic", 15.0))
    ]
    found = fp8(
        profile({"gemm": [gemm("gemm", 30.0)], "gemm_fp8": [gemm("gemm_fp8", 20.0)], "routing": casts})
    )
    assert found is not None
    assert "1.50 to 1.50 times" in found.lead
    text = "\n".join(found.body)
    assert "| static | 4096 |" in text
    assert "15" in text


def test_what_transfers_and_what_is_refitted_is_said_by_shape() -> None:
    summary = {"points": 9, "median": 0.2, "p95": 0.5, "bias": 0.1}
    record = {
        "without": summary,
        "random": {**summary, "median": 0.04},
        "each": {
            "32x32": {"without": [0.2, 0.5], "random": [0.04, 0.1]},
            "16x2": {"without": [0.01, 0.02], "random": [0.04, 0.1]},
        },
        "refitted": ["32x32"],
    }
    wide = {
        "without": summary,
        "random": summary,
        "unseen": {**summary, "median": 0.06},
        "each": {"12288x4096": {"without": [0.2, 0.5], "random": [0.03, 0.1]}},
    }
    operators = {"decode_attention": {"other_models": record}, "gemm": {"other_models": wide}}
    found = others(profile({}, operators))
    assert found is not None
    lines = "\n".join(found.body).splitlines()
    (kept,) = [line for line in lines if line.startswith("| decode_attention | 32 × 32")]
    assert "llama-2-7b" in kept
    assert kept.endswith("refitted |")
    (same,) = [line for line in lines if "| 16 × 2 |" in line]
    assert same.endswith("transfers |")
    (sized,) = [line for line in lines if "12288 × 4096" in line]
    assert "llama-2-7b" in sized
    assert "6.0 % / 50.0 %" in "\n".join(lines)

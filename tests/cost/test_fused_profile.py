"""Mixed attention as the H200's profile prices it in a simulation: what is measured, for which heads, how near."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.attention import AttentionMode
from sim.cost.fused import apart_s
from sim.cost.fused_ctas import FusedShape
from sim.cost.shapes import Launch
from sim.cost.step import fused_ratio

NAME = "h200-sxm"
SINGLE, BATCHED = AttentionMode("pod", "flashinfer"), AttentionMode("pod", "flashinfer-batch")


@pytest.fixture(scope="module", params=["llama-3.1-8b", "llama-2-7b"])
def cost(request: pytest.FixtureRequest) -> Any:
    return load_cost(request.param, NAME)


def heads(cost: Any) -> tuple[int, int, int]:
    return cost.model.q_heads, cost.model.kv_heads, cost.model.head_dim


@pytest.mark.parametrize(("mode", "variant"), [(SINGLE, "pod"), (BATCHED, "batch_pod")])
def test_tables_of_measured_heads_are_near_the_kernels_own_seconds(
    cost: Any, mode: Any, variant: str
) -> None:
    p = cost.compile(max_tokens=2048, max_seqs=128, max_context=16384, attention=mode, compiled=False)
    rng, off = np.random.default_rng(11), []
    for _ in range(40):
        q, h = int(rng.integers(2, 17)) * 128, int(2 ** rng.uniform(10, 13.5))
        batch, context = int(rng.integers(8, 129)), int(2 ** rng.uniform(10, 13))
        sizes = [np.array([[one]]) for one in (q, h, batch, context)]
        apart = sum(float(part.item()) for part in apart_s(cost, *sizes))
        exact = cost.profile.fused.seconds(variant, heads(cost), [FusedShape(q, h, (context,) * batch)])[0]
        off.append(abs(fused_ratio(p, q, h + (q + 1) // 2, batch, context) * apart / exact - 1))
    assert np.median(off) < 0.06
    assert np.quantile(off, 0.9) < 0.25


def test_pod_is_measured_for_both_and_transferred_to_heads_like_them(cost: Any) -> None:
    assert cost.fused_label(AttentionMode("pod")) == "measured"
    other = replace(cost, model=replace(cost.model, q_heads=64, kv_heads=4))
    assert other.fused_label(SINGLE) == "extrapolated from other heads of 128, measured"
    unlike = replace(cost, model=replace(cost.model, head_dim=256))
    assert unlike.fused_label(SINGLE).startswith("extrapolated from attention kernels alone")


def test_one_launch_takes_the_kernels_own_seconds(cost: Any) -> None:
    launch = Launch(((512, 3000),), 40, 40 * 2000, attention="pod")
    parts = {part.name: part.seconds for part in cost.solo(launch).by_operator}
    shape = FusedShape(512, 3000, (2000,) * 40)
    exact = float(cost.profile.fused.seconds("batch_pod", heads(cost), [shape])[0]) * cost.model.layers
    # a step has its attention as composed with the rest of a layer
    assert parts["fused_attention"] == pytest.approx(exact, rel=0.05)

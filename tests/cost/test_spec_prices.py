"""The analytic spec profile: physical bounds, monotonicity, and the measurements it was set by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost import load_cost
from sim.cost.gpu import list_gpus
from sim.cost.launching import grid_tokens
from sim.cost.model import list_models
from sim.cost.shapes import Gemm, Launch
from sim.errors import SimctlError

GPUS = [gpu.name for gpu in list_gpus()]
MODELS = [model.name for model in list_models()]
COSTS = {(m, g): load_cost(m, g, profile="spec") for m in MODELS for g in GPUS}
H200 = COSTS["llama-3.1-8b", "h200-sxm"]

launches = st.builds(
    lambda chunks, batch, mean, graph: Launch(tuple(chunks), batch, batch * mean, graph=graph and not chunks),
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 60_000)), max_size=3),
    st.integers(0, 512),
    st.integers(1, 60_000),
    st.booleans(),
).filter(lambda launch: launch.tokens > 0)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(list(COSTS)), launches, st.floats(0.1, 1.0))
def test_nothing_is_faster_than_the_data_sheet(pair, launch, share):
    cost = COSTS[pair]
    sms = max(1, int(share * cost.gpu.sms))
    step = cost.solo(launch, sms)
    assert step.gpu_s >= step.flops / cost.gpu.peak_flops * cost.gpu.sms / sms
    assert step.gpu_s >= step.hbm_bytes / cost.gpu.hbm_bytes_per_s
    for part in step.by_operator:
        assert part.seconds >= part.flops / cost.gpu.peak_flops * cost.gpu.sms / sms
        assert part.seconds >= part.hbm_bytes / cost.gpu.hbm_bytes_per_s
        assert 0 < part.sm_s <= sms * part.seconds * (1 + 1e-12)
    assert step.step_s >= step.gpu_s
    assert step.tensor_active <= sms * step.gpu_s
    assert 0 < step.watts <= cost.gpu.tdp_w


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(COSTS)), launches, st.integers(1, 130), st.integers(1, 60))
def test_more_sms_are_never_slower(pair, launch, few, more):
    cost = COSTS[pair]
    few = min(few, cost.gpu.sms)
    assert cost.solo(launch, min(few + more, cost.gpu.sms)).gpu_s <= cost.solo(launch, few).gpu_s * (1 + 1e-9)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(COSTS)), st.integers(1, 1000), st.integers(1, 100_000), st.integers(1, 100_000))
def test_time_rises_with_context_at_a_fixed_batch(pair, batch, mean, more):
    cost = COSTS[pair]
    sums = (batch * mean, batch * (mean + more))
    short, long = (
        next(p for p in cost.solo(Launch((), batch, c)).by_operator if p.name == "decode_attention").seconds
        for c in sums
    )
    window = cost.model.window or 10**9
    assert long > short if mean < window else long == short


@pytest.mark.parametrize("pair", COSTS, ids="-".join)
def test_time_never_falls_with_tokens_at_tile_edges(pair):
    cost = COSTS[pair]
    for history in (0, 8192):
        times = [
            cost.solo(Launch(((q, history),))).gpu_s for q in (*range(16, 512, 32), *range(512, 8193, 256))
        ]
        assert np.all(np.diff(times) >= -1e-12)


@pytest.mark.parametrize("pair", COSTS, ids="-".join)
def test_history_and_riding_decodes_cost_something(pair):
    cost = COSTS[pair]
    chunk = cost.solo(Launch(((512, 0),)))
    window = cost.model.window or 10**9
    late = cost.solo(Launch(((512, min(16_384, window)),)))
    riding = cost.solo(Launch(((512, 0),), 32, 32 * 2048))
    assert late.gpu_s > 1.01 * chunk.gpu_s
    # a chunk of a large mixture reads all experts anyway
    assert riding.gpu_s > (1.01 if cost.model.experts else 1.02) * chunk.gpu_s
    assert riding.hbm_bytes > chunk.hbm_bytes + 32 * 2048 * cost.model.kv_bytes_per_token()


@settings(deadline=None, max_examples=50)
@given(launches, st.integers(800, 1900))
def test_a_lower_clock_is_slower_but_leaves_memory_alone(launch, mhz):
    slow, fast = H200.solo(launch, sm_mhz=mhz), H200.solo(launch)
    assert fast.gpu_s < slow.gpu_s <= fast.gpu_s * H200.gpu.boost_mhz / mhz
    assert slow.flops == fast.flops


def test_layers_and_ends_add_up_to_the_whole_pass():
    for chunks, batch in ((((1000, 500),), 0), ((), 40)):
        whole = H200.solo(Launch(chunks, batch, batch * 700))
        parts = [
            H200.solo(Launch(chunks, batch, batch * 700, layers=span)) for span in ((0, 5), (5, 30), (30, 32))
        ]
        assert sum(part.gpu_s for part in parts) == pytest.approx(whole.gpu_s, rel=1e-12)
        assert sum(part.flops for part in parts) == pytest.approx(whole.flops, rel=1e-12)
        names = [{op.name for op in part.by_operator} for part in parts]
        assert "embedding" in names[0] - names[1] - names[2]
        assert {"lm_head", "sampling"} <= names[2] - names[0] - names[1]


def test_several_chunks_share_the_fixed_cost_of_one_call():
    one, two = (H200.solo(Launch(((300, 100),) * n)) for n in (1, 2))
    attention = [next(p for p in s.by_operator if p.name == "prefill_attention").seconds for s in (one, two)]
    fixed = H200.model.layers * H200.prefill_fixed_s()
    assert attention[1] == pytest.approx(2 * attention[0] - fixed, rel=1e-12)


# first measurements on an H200: GEMM 2048 x 4096 x 28672, decode GEMM of 32 tokens, FA3 at 2048 on 2048, decode
# attention of 32 x 8192; microseconds
def test_the_h200_spec_profile_gives_back_the_first_measurements():
    curve = H200.profile.curve("gemm/gate_up")
    rows = np.array([32, 2048])
    decode, prefill = curve.timing(Gemm(rows, 28672, 4096, 2), 132).seconds * 1e6
    assert prefill == pytest.approx(609, rel=0.02)
    assert decode == pytest.approx(60.2, rel=0.03)
    q = np.array([2048])
    assert H200.prefill(q, q, 132).seconds[0] * 1e6 == pytest.approx(220, rel=0.1)
    batch = np.array([32])
    assert H200.decode(batch, batch * 8192.0, 132).seconds[0] * 1e6 == pytest.approx(245, rel=0.03)


@pytest.mark.parametrize(("sms", "ratio"), [(16, 7.2), (32, 3.65), (64, 1.91), (96, 1.30), (112, 1.19)])
def test_gemm_scales_with_sms_as_first_measured(sms, ratio):
    curve = H200.profile.curve("gemm")
    few, all_sms = (curve.timing(Gemm(np.array([2048]), 28672, 4096, 2), n).seconds[0] for n in (sms, 132))
    assert few / all_sms == pytest.approx(ratio, rel=0.12)


@pytest.mark.parametrize(("sms", "ratio"), [(8, 4.3), (16, 2.3), (32, 1.50), (64, 1.07), (96, 1.09)])
def test_a_decode_gemm_saturates_bandwidth_with_a_quarter_of_the_sms(sms, ratio):
    curve = H200.profile.curve("gemm")
    few, all_sms = (curve.timing(Gemm(np.array([32]), 28672, 4096, 2), n).seconds[0] for n in (sms, 132))
    assert few / all_sms == pytest.approx(ratio, rel=0.12)


def test_whole_steps_of_an_8b_model_on_an_h200_are_plausible():
    decode = H200.solo(Launch((), 32, 32 * 2048, graph=True))
    weights = 2 * (H200.model.params() - H200.model.embedding_params())
    floor = (weights + 32 * 2048 * H200.model.kv_bytes_per_token()) / 4.8e12
    assert floor < decode.gpu_s < 1.5 * floor
    assert 6e-3 < decode.gpu_s < 8e-3
    prefill = H200.solo(Launch(((2048, 0),)))
    assert 40e-3 < prefill.gpu_s < 50e-3


@pytest.mark.parametrize(("tokens", "mfu"), [(1024, 0.52), (4096, 0.825), (8192, 0.894), (32768, 0.943)])
def test_h20_prefill_attention_reaches_the_published_share_of_peak(tokens, mfu):
    """InferSim's table for 32 query and 8 KV heads; its kernels come far nearer to a cut peak than an H200's."""
    cost = COSTS["llama-3.1-8b", "h20-sxm"]
    q = np.array([tokens])
    seconds = cost.prefill(q, 0 * q, 78).seconds[0]
    assert 4 * 32 * 128 * tokens * tokens / 2 / seconds / 148e12 == pytest.approx(mfu, rel=0.08)


def test_chunking_a_16k_prompt_costs_about_what_was_published():
    """A100, Llama-3.1-8B: 1k chunks take 1.13x the unchunked time, the last 1.9x the first (arXiv:2504.19516, 2.2)."""
    cost = COSTS["llama-3.1-8b", "a100-80gb-sxm"]
    whole = cost.solo(Launch(((16_384, 0),))).gpu_s
    chunks = [cost.solo(Launch(((1024, 1024 * i),))).gpu_s for i in range(16)]
    assert sum(chunks) / whole == pytest.approx(1.13, abs=0.07)
    assert chunks[-1] / chunks[0] == pytest.approx(1.9, abs=0.25)


def test_a_few_tokens_past_a_tile_edge_cost_a_stair():
    """Chunk 257 against 256 costs more than one token's worth (Sarathi-Serve, section 4.3, saw 32 % on an A100)."""
    cost = COSTS["llama-3.1-8b", "a100-80gb-sxm"]
    before, at, after = (cost.solo(Launch(((q, 0),))).gpu_s for q in (255, 256, 257))
    assert after - at > 5 * (at - before)


def test_a_window_bounds_what_long_contexts_cost():
    mistral = COSTS["mistral-7b-v0.1", "h200-sxm"]
    times = [mistral.solo(Launch((), 16, 16 * c)).gpu_s for c in (4096, 8192, 32_000)]
    assert times[0] == times[1] == times[2]
    assert mistral.solo(Launch((), 16, 16 * 2048)).gpu_s < times[0]


def test_demand_tells_compute_bound_from_memory_bound():
    decode = H200.solo(Launch((), 16, 16 * 4096)).demand
    prefill = H200.solo(Launch(((4096, 0),))).demand
    assert decode.hbm > 0.6 > 0.2 > prefill.hbm
    assert prefill.tensor > 0.6 > 0.1 > decode.tensor
    assert prefill.power > decode.power


@pytest.mark.parametrize(
    ("sms", "launch", "message"),
    [(0, Launch(((1, 0),)), "1 to 132"), (133, Launch(((1, 0),)), "1 to 132"),
     (132, Launch(((1, 0),), attention="pot"), "none of")],
)  # fmt: skip
def test_impossible_launches_are_refused(sms, launch, message):
    with pytest.raises(SimctlError, match=message):
        H200.solo(launch, sms)


def test_grid_sizes_never_round_down():
    m = np.arange(1, 70_000)
    grid = grid_tokens(m)
    assert np.all(grid >= m)
    assert np.all((grid - m)[m > 128] / m[m > 128] < 0.065)
    assert np.all(grid_tokens(grid) == grid)

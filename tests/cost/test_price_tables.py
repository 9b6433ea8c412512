"""Price tables against the cost model that they were made from."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim.jit
from sim.cost import load_cost, step
from sim.cost.compile import chunk_knots, decode_knots, history_knots, noise
from sim.cost.launching import captured_tokens
from sim.cost.prices import Prices
from sim.cost.shapes import Launch
from sim.errors import SimctlError

SMS = (132, 32, 72, 100)
LIMITS = {"max_tokens": 16384, "max_seqs": 600, "max_context": 65536}
COSTS = {
    name: load_cost(name, "h200-sxm", profile="spec")
    for name in ("llama-3.1-8b", "llama-2-7b", "mistral-7b", "qwen3-8b")
}
TABLES = {
    name: cost.compile(**LIMITS, partitions=SMS[1:], seed=0, jitter=False) for name, cost in COSTS.items()
}


def interpreted():
    """`sim.cost.step` as CPython runs it, whether or not numba is present."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.jit, "jit", lambda function: function)
        spec = importlib.util.spec_from_file_location("interpreted_step", step.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def priced(P: Prices, part: int, launch: Launch, step=step) -> tuple[float, float, float]:
    """GPU seconds, step seconds and SM-seconds of a launch by look-up, as an engine puts them together."""
    b, c, n, graph = launch.decode_batch, launch.decode_context_sum, launch.sequences, launch.graph
    seconds = step.dense_s(P, part, launch.tokens, graph) + step.head_s(P, part, n)
    sm_s = step.dense_sm(P, part, launch.tokens, graph) + step.head_sm(P, part, n)
    seconds += step.decode_attention_s(P, part, b, c)
    sm_s += step.decode_attention_sm(P, part, b, c)
    for i, (q, h) in enumerate(launch.chunks):
        seconds += step.prefill_attention_s(P, part, q, h) - (P.pre_fixed_s[part] if i else 0.0)
        sm_s += step.prefill_attention_sm(P, part, q, h)
    host, gap = (P.host_graph_s, P.gap_graph_s) if graph else (P.host_eager_s, P.gap_eager_s)
    return seconds, step.step_s(P, seconds, host[n], gap[n], 0), sm_s


launches = st.builds(
    lambda chunks, batch, mean, rest, graph: Launch(
        tuple(chunks), batch, batch * mean + (rest % batch if batch else 0), graph=graph and not chunks
    ),
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 60_000)), max_size=3),
    st.integers(0, 512),
    st.integers(1, 60_000),
    st.integers(0, 511),
    st.booleans(),
).filter(lambda launch: launch.tokens > 0)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(list(COSTS)), st.integers(0, 3), launches)
def test_a_looked_up_price_is_the_cost_models_within_half_a_per_cent(name, part, launch):
    seconds, step_s, sm_s = priced(TABLES[name], part, launch)
    solo = COSTS[name].solo(launch, SMS[part])
    assert seconds == pytest.approx(solo.gpu_s, rel=5e-3)
    assert step_s == pytest.approx(solo.step_s, rel=5e-3)
    # activity jumps where decode attention changes its KV splits; a line between knots cuts the corner
    assert sm_s == pytest.approx(solo.sm_active, rel=0.1)
    assert 0 < sm_s <= SMS[part] * seconds


def test_both_sides_of_tile_edges_are_exact():
    P, cost = TABLES["llama-3.1-8b"], COSTS["llama-3.1-8b"]
    for q in (32, 33, 256, 257, 1024, 1025, 4096, 4097):
        for h in (0, 1024, 16_384):
            exact = 32 * cost.prefill(np.array([q]), np.array([h]), 132).seconds[0]
            assert step.prefill_attention_s(P, 0, q, h) == pytest.approx(exact, rel=1e-9)


def test_lists_hold_the_same_numbers_to_the_bit():
    cost = COSTS["llama-3.1-8b"]
    knobs = {
        "max_tokens": 600,
        "max_seqs": 20,
        "max_context": 3000,
        "partitions": (32,),
        "seed": 5,
        "jitter": True,
    }
    arrays = cost.compile(**knobs, compiled=True)
    lists = cost.compile(**knobs, compiled=False)
    for (name, array), (_, plain) in zip(arrays.items(), lists.items(), strict=True):
        if isinstance(array, np.ndarray):
            assert array.ndim == 1
            assert array.flags.c_contiguous
            assert isinstance(plain, list), name
            assert array.tolist() == plain
        else:
            assert array == plain
    launch = Launch(((100, 700), (33, 0)), 7, 7 * 900)
    assert priced(arrays, 1, launch) == priced(lists, 1, launch, interpreted())


def test_table_sizes_are_as_documented():
    P = TABLES["llama-3.1-8b"]
    assert (P.partitions, P.max_tokens, P.max_seqs) == (4, 16384, 600)
    for table in (P.dense_graph_s, P.dense_eager_s, P.dense_graph_sm, P.dense_eager_sm):
        assert len(table) == 4 * 16385
    assert len(P.head_s) == len(P.head_sm) == 4 * 601
    assert len(P.dec_a) == len(P.dec_b) == len(P.dec_sm_a) == len(P.dec_sm_b) == 4 * 601 * P.segments
    assert len(P.pre_s) == len(P.pre_sm) == 4 * P.q_knots * P.h_knots
    assert len(P.pre_qi) == 16385
    assert len(P.pre_fixed_s) == 4
    assert len(P.host_graph_s) == len(P.host_eager_s) == len(P.gap_graph_s) == len(P.gap_eager_s) == 601
    assert len(P.over_s) == len(P.over_sm) == 4 * 601
    assert len(P.spare_graph) == len(P.spare_eager) == 601
    assert len(P.noise) == 1


def test_the_first_partition_is_the_whole_gpu_and_fewer_sms_are_slower():
    P = TABLES["llama-3.1-8b"]
    by_part = [step.dense_s(P, part, 2048, False) for part in range(4)]
    assert by_part[0] < by_part[3] < by_part[2] < by_part[1]


def test_graphs_pay_for_padding_and_large_batches_are_not_captured():
    P = TABLES["llama-3.1-8b"]
    assert step.dense_s(P, 0, 257, True) == step.dense_s(P, 0, 272, False)
    assert step.dense_s(P, 0, 513, True) == step.dense_s(P, 0, 513, False)
    assert P.host_graph_s[512] < P.host_graph_s[513] == P.host_eager_s[513]
    assert captured_tokens([1, 2, 3, 5, 9, 255, 257, 512, 513]).tolist() == [
        1,
        2,
        4,
        8,
        16,
        256,
        272,
        512,
        513,
    ]


def test_nothing_costs_nothing():
    P = TABLES["llama-3.1-8b"]
    assert step.dense_s(P, 0, 0, True) == step.head_s(P, 0, 0) == 0.0
    assert step.decode_attention_s(P, 0, 0, 0) == step.decode_attention_sm(P, 0, 0, 0) == 0.0


def test_small_steps_are_bound_by_the_host():
    P = TABLES["llama-3.1-8b"]
    host, gap = P.host_eager_s[1], P.gap_eager_s[0]
    assert step.step_s(P, 1e-6, host, gap, 0) == host + gap
    assert step.step_s(P, 1.0, host, gap, 0) == 1.0 + gap
    assert step.step_s(P._replace(noise=[1.0, 1.5]), 1.0, host, gap, 3) == 1.5 * (1.0 + gap)


def test_jitter_is_seeded_per_replica_and_keeps_the_mean():
    drawn = noise(3, 1, 0.01)
    assert np.array_equal(drawn, noise(3, 1, 0.01))
    assert not np.array_equal(drawn, noise(3, 2, 0.01))
    assert not np.array_equal(drawn, noise(4, 1, 0.01))
    assert drawn.mean() == pytest.approx(1.0, abs=4 * 0.01 / np.sqrt(len(drawn)))
    assert drawn.std() == pytest.approx(0.01, rel=0.1)
    cost = COSTS["llama-3.1-8b"]
    small = {"max_tokens": 64, "max_seqs": 4, "max_context": 256}
    assert cost.compile(**small, jitter=False).noise.tolist() == [1.0]
    assert np.array_equal(cost.compile(**small, seed=3, replica=1, jitter=True).noise, drawn)


def test_tables_are_kept_by_content_not_by_name():
    plain = load_cost("llama-3.1-8b", "h200-sxm")
    scaled = load_cost("llama-3.1-8b", "h200-sxm", kernels={"scale": {"gemm": 0.5}})
    small = {"max_tokens": 64, "max_seqs": 4, "max_context": 256}
    assert plain.profile_hash != scaled.profile_hash
    assert scaled.compile(**small).dense_eager_s[64] < 0.7 * plain.compile(**small).dense_eager_s[64]


@pytest.mark.parametrize(
    "change", [{"max_tokens": 0}, {"max_seqs": 0}, {"max_context": 0}, {"partitions": (133,)}]
)
def test_impossible_limits_are_refused(change):
    knobs = {"max_tokens": 64, "max_seqs": 4, "max_context": 256, **change}
    with pytest.raises(SimctlError):
        COSTS["llama-3.1-8b"].compile(**knobs)


@given(st.integers(1, 100_000), st.sampled_from([8, 16, 32, 128]))
def test_knots_rise_and_reach_the_limits(limit, tile):
    for knots in (decode_knots(limit), history_knots(limit), chunk_knots(limit, tile)):
        assert np.all(np.diff(knots) > 0)
        assert knots[-1] >= limit
    assert np.all(decode_knots(limit) % 64 == 0)
    assert np.all(history_knots(limit) % 128 == 0)


@pytest.mark.parametrize("extreme", [1, 2])
def test_the_smallest_tables_answer_their_own_limits(extreme):
    cost = COSTS["llama-3.1-8b"]
    P = cost.compile(max_tokens=extreme, max_seqs=extreme, max_context=extreme)
    launch = Launch(((extreme, 0),))
    assert priced(P, 0, launch)[0] == pytest.approx(cost.solo(launch).gpu_s, rel=5e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_replicas_share_all_but_their_noise(compiled):
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    shape = {"max_tokens": 256, "max_seqs": 16, "max_context": 1024, "jitter": True, "compiled": compiled}
    one, other = (cost.compile(**shape, seed=3, replica=k) for k in (0, 1))
    for name, values in one.items():
        if name != "noise" and hasattr(values, "__len__"):
            assert values is getattr(other, name), name
    assert list(one.noise) != list(other.noise)

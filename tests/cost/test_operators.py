"""Work of operators: conservation over chunks, grouped heads, windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost import load_cost
from sim.cost.model import list_models, load_model
from sim.cost.operators import (
    causal_pairs,
    decode_shape,
    flops,
    hbm_bytes,
    kv_bytes,
    linear_operators,
    prefill_keys,
    prefill_shape,
)
from sim.cost.shapes import Launch
from sim.cost.work import total_work

MODELS = [model.name for model in list_models()]


def ints(*values):
    return np.array(values, dtype=np.int64)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.sampled_from([None, 1, 7, 4096]),
)
def test_pairs_of_chunks_add_up_to_those_of_the_prompt(chunks, window):
    histories = np.cumsum([0, *chunks[:-1]])
    parts = causal_pairs(np.array(chunks), histories, window).sum()
    assert parts == causal_pairs(ints(sum(chunks)), ints(0), window)[0]


@given(st.integers(1, 300), st.integers(0, 300), st.sampled_from([None, 1, 16, 100]))
def test_pairs_are_what_counting_gives(q, h, window):
    counted = sum(min(h + i, window or h + i) for i in range(1, q + 1))
    assert causal_pairs(ints(q), ints(h), window)[0] == counted


def test_kv_rereads_of_a_16k_prompt_in_1k_chunks():
    model = load_model("llama-3.1-8b")
    size, count = 1024, 16
    keys = prefill_keys(np.full(count, size), size * np.arange(count))
    shape = prefill_shape(model, ints(size), ints(0))
    read = model.layers * kv_bytes(shape, keys).sum()
    # chunk i reads i chunks' worth: N (N + 1) / 2 in all (arXiv:2504.19516, section 2.2)
    assert read == count * (count + 1) / 2 * size * model.kv_bytes_per_token()


@pytest.mark.parametrize("name", MODELS)
def test_kv_is_read_once_per_kv_head(name):
    model = load_model(name)
    shape = decode_shape(model, ints(4), np.array([4000.0]))
    queries = 2 * 4 * model.q_width * model.dtype_bytes
    read = model.layers * (hbm_bytes(shape)[0] - queries)
    window = model.window or 10**9
    assert read == 4 * min(1000, window) * model.kv_bytes_per_token()


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_hold_all_parameters(name):
    """Weights read by a pass + the embedding table + what no GEMM reads (norms, biases) = all parameters."""
    model = load_model(name)
    products = [op for op in linear_operators(model) if op.n and op.scope == "layer"]
    per_layer = sum(op.n * op.k * max(op.experts, 1) for op in products)
    head = sum(op.n * op.k for op in linear_operators(model) if op.n and op.scope == "last")
    rest = model.params() - model.layers * per_layer - model.embedding_params()
    if not model.tied_embeddings:
        rest -= head
    assert 0 < rest < 0.001 * model.params()


def test_flops_of_a_prefill_are_two_per_parameter_and_token_plus_attention():
    cost = load_cost("llama-3.1-8b", "h200-sxm")
    step = cost.solo(Launch(chunks=((2048, 0),)))
    model = cost.model
    dense = 2.0 * 2048 * model.layers * (model.layer_params() - 2 * model.hidden)
    attention = model.layers * 4.0 * model.q_width * 2048 * 2049 / 2
    assert step.flops == pytest.approx(dense + attention + 2.0 * model.head_params(), rel=1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), max_size=4),
    st.integers(0, 300),
    st.integers(1, 4000),
    st.sampled_from(["llama-3.1-8b", "qwen3-8b", "opt-13b"]),
)
def test_totals_of_a_run_give_the_work_of_its_passes(chunks, batch, context, name):
    if not chunks and not batch:
        return
    cost = load_cost(name, "h200-sxm")
    step = cost.solo(Launch(tuple(chunks), batch, batch * context))
    q, h = (
        (np.array(column, dtype=np.int64) for column in zip(*chunks, strict=True))
        if chunks
        else (ints(), ints())
    )
    totals = {
        "dense_tokens": q.sum() + batch,
        "head_rows": len(q) + batch,
        "prefill_pairs": causal_pairs(q, h).sum(),
        "prefill_kv_tokens": prefill_keys(q, h).sum(),
        "decode_kv_tokens": batch * context,
        "launches_graph": 0,
        "launches_eager": 1,
    }
    work = total_work(cost.model, totals)
    assert work.flops == pytest.approx(step.flops, rel=1e-9)
    assert work.hbm_bytes == pytest.approx(step.hbm_bytes, rel=1e-9)


def test_flops_of_all_operator_kinds_are_counted_by_hand():
    model = load_model("yi-6b")
    assert flops(decode_shape(model, ints(2), np.array([30.0])))[0] == 4 * 32 * 128 * 30
    assert flops(prefill_shape(model, ints(3), ints(2)))[0] == 4 * 32 * 128 * (3 + 4 + 5)
    qkv = next(op for op in linear_operators(model) if op.name == "gemm/qkv")
    assert flops(qkv.shape(ints(5)))[0] == 2 * 5 * (32 + 8) * 128 * 4096

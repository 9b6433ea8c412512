"""Tables of the analytic belief: the SM-scaling roofline times alpha, measured at a few points and interpolated.

alpha = measured / form (arXiv:2504.19516, section 3.2), linear between samples along SMs and along the logarithms of
tokens, batch and context, and flat beyond them. Which points are sampled is left open there and chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.cost.compile import decode_knots
from sim.cost.prices import Prices
from sim.cost.shapes import Floats, Ints
from sim.cost.srm import Srm
from sim.cost.step import decode_attention_s, prefill_attention_s

# where alpha is sampled: a share of the SMs, the inflection and all; tokens of a prompt, decode batches, mean contexts
FEW_SMS = 0.15
TOKENS = (128, 512, 2048)
BATCHES = (4, 32, 256)
CONTEXTS = (256, 1024, 4096)


def analytic_prices(srm: Srm, p: Prices, sizes: Sequence[int], attention_term: bool) -> Prices:
    """`p` with its times replaced by form x alpha; `sizes`: SMs of each partition.

    Each phase has one alpha, as in the paper; with `attention_term` its attention has another.
    """
    made = {**_prefill(srm, p, sizes, attention_term), **_decode(srm, p, sizes, attention_term)}
    made["over_s"] = np.zeros(len(p.over_s))  # the form knows the sum of the contexts only
    return p._replace(**{name: np.ascontiguousarray(table.ravel()) for name, table in made.items()})


def over(values: Floats, at: Sequence[float], points: Any, axis: int) -> Floats:
    """Interpolate along one axis, whose positions are the ascending `at`, at `points`; flat beyond them."""
    wanted = np.clip(np.asarray(points, np.float64), at[0], at[-1])
    if len(at) == 1:
        return np.repeat(values, len(wanted), axis)
    knots = np.asarray(at, np.float64)
    low = np.clip(np.searchsorted(knots, wanted, side="right") - 1, 0, len(at) - 2)
    part = (wanted - knots[low]) / (knots[low + 1] - knots[low])
    part = part.reshape([-1 if n == axis else 1 for n in range(values.ndim)])
    found: Floats = values.take(low, axis) * (1.0 - part) + values.take(low + 1, axis) * part
    return found


def over_log(values: Floats, at: Sequence[int], points: Any, axis: int) -> Floats:
    """`over`, linear in the logarithm of the positions."""
    return over(values, np.log2(at).tolist(), np.log2(np.maximum(points, 1)), axis)


def _over_sms(alpha: Floats, sampled: Sequence[int], sizes: Sequence[int]) -> Floats:
    """Alpha of the sampled partitions, along the first axis, for all partitions."""
    return over(alpha, [sizes[i] for i in sampled], sizes, 0)


def _sampled(srm: Srm, sizes: Sequence[int]) -> list[int]:
    """The partitions nearest to where alpha is sampled, by rising SMs."""
    wanted = (FEW_SMS * sizes[0], srm.inflection, sizes[0])
    near = {min(range(len(sizes)), key=lambda i: abs(sizes[i] - sms)) for sms in wanted}
    return sorted(near, key=lambda i: sizes[i])


def _within(samples: Sequence[int], limit: int) -> list[int]:
    return sorted({min(sample, limit) for sample in samples})


def _of(table: Any, sizes: Sequence[int]) -> Floats:
    """A price table with a row a partition."""
    return np.asarray(table, np.float64).reshape(len(sizes), -1)


def _alphas(linear: tuple[Floats, Floats], own: tuple[Floats, Floats], split: bool) -> tuple[Floats, Floats]:
    """(alpha of the linear layers, of attention) from (measured, form) of each; one alpha unless `split`."""
    if split:
        return linear[0] / linear[1], own[0] / own[1]
    whole = (linear[0] + own[0]) / (linear[1] + own[1])
    return whole, whole


def _prefill(srm: Srm, p: Prices, sizes: Sequence[int], split: bool) -> dict[str, Floats]:
    """`dense_eager_s` by partition and tokens, `pre_s` by partition and knots."""
    sms = np.array(sizes)
    tokens = np.arange(p.max_tokens + 1)
    knots_q, knots_h = np.asarray(p.pre_q, np.int64), np.asarray(p.pre_h, np.int64)
    dense = srm.linear_s("tokens", tokens, sms[:, None])
    own = srm.prefill_s(knots_q[:, None], knots_h, sms[:, None, None])
    samples, sampled = _within(TOKENS, p.max_tokens), _sampled(srm, sizes)
    at = np.ix_(sampled, samples)
    measured = np.array([[prefill_attention_s(p, part, q, 0) for q in samples] for part in sampled])
    form = srm.prefill_s(np.array(samples), np.zeros(len(samples), np.int64), sms[sampled][:, None])
    alphas = _alphas((_of(p.dense_eager_s, sizes)[at], dense[at]), (measured, form), split)
    of_dense, of_own = (_over_sms(alpha, sampled, sizes) for alpha in alphas)
    return {
        "dense_eager_s": dense * over_log(of_dense, samples, tokens, 1),
        "pre_s": own * over_log(of_own, samples, knots_q, 1)[:, :, None],
    }


def _decode(srm: Srm, p: Prices, sizes: Sequence[int], split: bool) -> dict[str, Floats]:
    """`dense_graph_s` by partition and tokens, `head_s` by partition and batch, `dec_a` and `dec_b` by segment too."""
    sms, rows, tokens = np.array(sizes), np.arange(p.max_seqs + 1), np.arange(p.max_tokens + 1)
    knots = decode_knots(int(p.pre_h[-1]))[: p.segments + 1]
    dense = srm.linear_s("tokens", tokens, sms[:, None])
    head = srm.linear_s("sequences", rows, sms[:, None])
    start, slope = _lines(srm, rows, knots, sms)
    rest = dense[:, np.minimum(rows, p.max_tokens)] + head
    of_rest, of_own = _decode_alphas(srm, p, sizes, rest, split)
    middles = np.sqrt(np.maximum(knots[:-1], 32) * knots[1:].astype(float))
    of_rest, of_own = (over_log(alpha, CONTEXTS, middles, 2) for alpha in (of_rest, of_own))
    # alpha depends on the context, the linear layers' table does not: attention carries the difference
    base = of_rest.min(axis=2)
    carried = (of_rest - base[:, :, None]) * rest[:, :, None]
    return {
        "dense_graph_s": dense * base[:, np.minimum(tokens, p.max_seqs)],
        "head_s": head * base,
        "dec_a": of_own * start + carried,
        "dec_b": of_own * slope,
    }


def _lines(srm: Srm, rows: Ints, knots: Ints, sms: Ints) -> tuple[Floats, Floats]:
    """Attention's form as intercept and slope over the context sum: shape (partitions, batches, segments)."""
    batch = np.maximum(rows, 1)[:, None]
    context = (batch * knots).astype(np.float64)
    form = srm.decode_s(np.broadcast_to(batch, context.shape), context, sms[:, None, None])
    slope = np.diff(form, axis=2) / np.diff(context, axis=1)
    start = form[:, :, :-1] - slope * context[:, :-1]
    busy = (rows > 0)[:, None]
    return start * busy, slope * busy


def _decode_alphas(
    srm: Srm, p: Prices, sizes: Sequence[int], rest: Floats, split: bool
) -> tuple[Floats, Floats]:
    """Alpha of the linear layers and of attention: shape (partitions, batches, sampled contexts)."""
    batches, sampled = _within(BATCHES, p.max_seqs), _sampled(srm, sizes)
    at = np.ix_(sampled, batches)
    measured = np.array(
        [[[decode_attention_s(p, part, b, b * c) for c in CONTEXTS] for b in batches] for part in sampled]
    )
    batch, context = np.array(batches)[:, None], np.outer(batches, CONTEXTS).astype(np.float64)
    form = srm.decode_s(batch, context, np.array(sizes)[sampled][:, None, None])
    graph, head = _of(p.dense_graph_s, sizes)[at], _of(p.head_s, sizes)[at]
    linear = np.broadcast_to((graph + head)[:, :, None], form.shape)
    alphas = _alphas((linear, np.broadcast_to(rest[at][:, :, None], form.shape)), (measured, form), split)
    rows = np.arange(p.max_seqs + 1)
    first, second = (over_log(_over_sms(alpha, sampled, sizes), batches, rows, 1) for alpha in alphas)
    return first, second

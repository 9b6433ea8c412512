"""Slowdowns of the analytic belief, from a few co-running points (arXiv:2504.19516, section 3.2.3).

Disjoint sets: the bandwidth that a prefill of that length leaves replaces D_p in the decode step's form, alpha corrects
the rest; prefill has alpha alone. Overlapping sets, which the paper does not model, have alpha alone on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.cost.analytic import over, over_log
from sim.cost.pairs import B_KNOTS, BS, C_KNOTS, CS, HS, Q_KNOTS, QS, Pairs
from sim.cost.shapes import Floats
from sim.cost.srm import Srm

# knots at which alpha is sampled: 512 and 8192 prompt tokens, 8 and 128 decodes, mean contexts of 512 and 4096
AT_Q, AT_B, AT_C = (4, 8), (3, 7), (1, 4)
SPLITS = 3  # disjoint pairs of sets at which co-running points are sampled


def analytic_pairs(srm: Srm, x: Pairs) -> Pairs:
    """`x` with its factors replaced by form x alpha; no history is looked at."""
    sizes = np.asarray(x.sms)
    config = np.asarray(x.config).reshape(len(sizes), len(sizes))
    ran = [tuple(sizes[np.argwhere(config == number)[0]]) for number in range(int(config.max()) + 1)]
    if not ran:
        return x
    of_prefill, of_decode = (
        np.asarray(table, np.float64).reshape(len(ran), QS, HS, BS, CS)[:, :, 0]
        for table in (x.factor_prefill, x.factor_decode)
    )
    form = np.stack(
        [
            _decode_form(srm, int(d), found[:, -1, -1]) if p + d <= sizes[0] else np.ones((QS, BS, CS))
            for (p, d), found in zip(ran, of_decode, strict=True)
        ]
    )
    believed = (
        _calibrated(of_prefill, np.ones_like(form), ran, int(sizes[0])),
        _calibrated(of_decode, form, ran, int(sizes[0])),
    )
    prefill, decode = (np.repeat(one[:, :, None], HS, axis=2).ravel() for one in believed)
    return x._replace(factor_prefill=prefill, factor_decode=decode)


def _decode_form(srm: Srm, sms: int, slowed: Floats) -> Floats:
    """T' of decode steps with what is left of the bandwidth over T' with all of it, shape (Q, B, C).

    `slowed`, by prompt tokens: how much longer a step takes that only reads memory.
    """
    context = np.outer(B_KNOTS, C_KNOTS).astype(np.float64)

    def step(factor: Any) -> Floats:
        linear = srm.linear_s("tokens", B_KNOTS, sms, factor[:, None])
        linear = linear + srm.linear_s("sequences", B_KNOTS, sms, factor[:, None])
        return linear[:, :, None] + srm.decode_s(B_KNOTS[:, None], context, sms, factor[:, None, None])

    return step(slowed) / step(np.ones(1))


def _calibrated(truth: Floats, form: Floats, ran: Sequence[tuple[Any, Any]], total: int) -> Floats:
    """Form x alpha, never below 1; interpolated in logarithms along sizes, between splits along the decode's SMs."""
    at = np.ix_(range(len(ran)), AT_Q, AT_B, AT_C)
    alpha = np.log(truth[at] / form[at])
    disjoint = [n for n, (p, d) in enumerate(ran) if p + d <= total]
    if len(disjoint) > SPLITS:
        by_size = sorted(disjoint, key=lambda n: (ran[n][1], ran[n][0]))
        kept = [by_size[i] for i in np.linspace(0, len(by_size) - 1, SPLITS).round().astype(int)]
        alpha[disjoint] = over(alpha[kept], [ran[n][1] for n in kept], [ran[n][1] for n in disjoint], 0)
    for axis, (knots, samples) in enumerate(((Q_KNOTS, AT_Q), (B_KNOTS, AT_B), (C_KNOTS, AT_C)), start=1):
        alpha = over_log(alpha, knots[list(samples)].tolist(), knots, axis)
    return np.maximum(1.0, form * np.exp(alpha))

"""What a policy believes about prices: the truth, the papers' analytic form, or the truth with noise.

Time always passes by the profile. A belief is a second set of the same tables, which only the policy reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.cost.base import CostModel
from sim.cost.pairs import Pairs
from sim.cost.prices import Prices
from sim.cost.shapes import Launch
from sim.errors import SimctlError
from sim.jit import COMPILED

TIME_TABLES = ("dense_graph_s", "dense_eager_s", "head_s", "dec_a", "dec_b", "pre_s")


def believe(
    estimator: Any,
    cost: CostModel,
    p: Prices,
    x: Pairs,
    partitions: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    seed: int,
) -> tuple[Prices, Pairs]:
    """The tables that a policy consults.

    `oracle`: the truth without jitter. `analytic`: SM-scaling roofline times alpha (Bullet, arXiv:2504.19516 section
    3.2): compute falls linearly with the SMs, bandwidth is flat down to an inflection, and alpha is measured at two
    SM counts for each phase and interpolated between; contention as the profile's surface. `{noisy: {sigma, bias}}`:
    each table of the truth times one log-normal factor. Raises SimctlError for anything else.
    """
    plain = p._replace(noise=np.ones(1) if COMPILED else [1.0])
    if estimator == "oracle":
        return plain, x
    if estimator == "analytic":
        return _srm(cost, plain, [cost.gpu.sms, *partitions]), x
    if isinstance(estimator, Mapping) and set(estimator) == {"noisy"}:
        settings = {"sigma": 0.1, "bias": 0.0, **(estimator["noisy"] or {})}
        if set(settings) != {"sigma", "bias"} or not settings["sigma"] >= 0:
            raise SimctlError("estimator.noisy takes sigma (0 or more) and bias, like {noisy: {sigma: 0.1}}")
        return _noisy(plain, settings["sigma"], settings["bias"], seed), x
    raise SimctlError(f"unknown estimator {estimator!r}; use oracle, analytic or {{noisy: {{sigma: 0.1}}}}")


def bandwidth_knee(cost: CostModel) -> int:
    """Fewest SMs (in steps of 4) on which a decode step that is bound by memory is at most 5 % slower than on all."""
    probe = Launch(decode_batch=32, decode_context_sum=32 * 8192, decode_context_max=8192, graph=True)
    best = cost.solo(probe).gpu_s
    for sms in range(4, cost.gpu.sms, 4):
        if cost.solo(probe, sms).gpu_s <= 1.05 * best:
            return sms
    return cost.gpu.sms


def _same_kind(values: Any) -> Any:
    return values if COMPILED else values.tolist()


def _noisy(p: Prices, sigma: float, bias: float, seed: int) -> Prices:
    rng = np.random.default_rng([seed, 0xBE11EF])
    changed = {}
    for name in TIME_TABLES:
        table = np.asarray(getattr(p, name), np.float64)
        parts = table.reshape(p.partitions, -1)
        factors = np.exp(rng.normal(bias, sigma, (p.partitions, 1)))
        changed[name] = _same_kind((parts * factors).ravel())
    return p._replace(**changed)


def _srm(cost: CostModel, p: Prices, sizes: Sequence[int]) -> Prices:
    """Scale whole-GPU prices to fewer SMs by the roofline's law, corrected by alpha at the extremes."""
    if len(sizes) == 1:
        return p
    share = np.array(sizes) / sizes[0]
    knee = bandwidth_knee(cost) / sizes[0]
    changed = {}
    for name, memory_bound in (
        ("dense_graph_s", True),
        ("dec_a", True),
        ("dec_b", True),
        ("head_s", True),
        ("dense_eager_s", False),
        ("pre_s", False),
    ):
        parts = np.asarray(getattr(p, name), np.float64).reshape(p.partitions, -1)
        ideal = 1.0 / np.minimum(1.0, share / knee) if memory_bound else 1.0 / share
        truth = np.array([np.sum(part) for part in parts])
        alpha_low, alpha_high = 1.0, 1.0
        low = int(np.argmin(share))
        if truth[0] > 0:
            alpha_low = truth[low] / truth[0] / ideal[low]
        at = (share - share[low]) / (1.0 - share[low])
        alpha = alpha_low + (alpha_high - alpha_low) * at
        changed[name] = _same_kind((parts[0][None, :] * (ideal * alpha)[:, None]).ravel())
    return p._replace(**changed)

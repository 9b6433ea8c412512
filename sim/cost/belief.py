"""What a policy believes about prices: the truth, the papers' analytic form, or the truth with noise.

Time always passes by the profile. A belief is a second set of the same tables, which only the policy reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.cost.analytic import analytic_prices
from sim.cost.analytic_pairs import analytic_pairs
from sim.cost.base import CostModel
from sim.cost.pairs import Pairs
from sim.cost.prices import Prices
from sim.cost.srm import make_srm
from sim.errors import SimctlError

TIME_TABLES = ("dense_graph_s", "dense_eager_s", "head_s", "dec_a", "dec_b", "over_s", "pre_s")
TERMS = ("wave_term", "attention_term")
KINDS = "oracle, analytic, {analytic: {wave_term: true}} or {noisy: {sigma: 0.1}}"


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

    `oracle`: the truth without jitter. `analytic`: Bullet's SM-scaling roofline times alpha, for prices and slowdowns;
    `{analytic: {wave_term, attention_term}}` puts the waves' tails into the form, and gives attention an alpha of its
    own. `{noisy: {sigma, bias}}`: the truth, each table and SM set times one log-normal factor. Raises SimctlError for
    anything else.
    """
    plain = p._replace(noise=np.ones(1))
    if estimator == "oracle":
        return plain, x
    if estimator == "analytic":
        estimator = {"analytic": {}}
    if not isinstance(estimator, Mapping) or len(estimator) != 1:
        raise SimctlError(f"unknown estimator {estimator!r}; use {KINDS}")
    ((kind, given),) = estimator.items()
    if kind == "analytic":
        terms = _terms(given or {})
        srm = make_srm(cost, terms["wave_term"])
        sizes = [cost.gpu.sms, *partitions]
        return analytic_prices(srm, plain, sizes, terms["attention_term"]), analytic_pairs(srm, x)
    if kind == "noisy":
        settings = {"sigma": 0.1, "bias": 0.0, **(given or {})}
        if set(settings) != {"sigma", "bias"} or not settings["sigma"] >= 0:
            raise SimctlError("estimator.noisy takes sigma (0 or more) and bias, like {noisy: {sigma: 0.1}}")
        return _noisy(plain, settings["sigma"], settings["bias"], seed), x
    raise SimctlError(f"unknown estimator {estimator!r}; use {KINDS}")


def _terms(given: Mapping[str, Any]) -> dict[str, bool]:
    if not set(given) <= set(TERMS) or not all(isinstance(value, bool) for value in given.values()):
        raise SimctlError(
            f"estimator.analytic takes {' and '.join(TERMS)}, each true or false, not {dict(given)}"
        )
    return {**dict.fromkeys(TERMS, False), **given}


def _noisy(p: Prices, sigma: float, bias: float, seed: int) -> Prices:
    rng = np.random.default_rng([seed, 0xBE11EF])
    changed = {}
    for name in TIME_TABLES:
        parts = np.asarray(getattr(p, name), np.float64).reshape(p.partitions, -1)
        factors = np.exp(rng.normal(bias, sigma, (p.partitions, 1)))
        changed[name] = (parts * factors).ravel()
    return p._replace(**changed)

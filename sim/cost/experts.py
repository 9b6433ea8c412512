"""How tokens come to the experts of a mixture, in expectation: experts that are touched, tiles of rows that they make.

Each token draws `chosen` distinct experts with odds of rank ** -skew, independently of other tokens. Skew 0, all alike,
is what training with a loss on the balance of load aims at (Qwen3: arXiv:2505.09388 section 2); batches of one topic
are more skewed (profiles of Qwen3-235B-A22B and others: arXiv:2604.23150).
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

from sim.cost.shapes import Experts, Floats

QUANTILES = 48  # of the rows of an expert, which are binomial, for the tiles beyond its first


@lru_cache(maxsize=64)
def chances(experts: int, chosen: int, skew: float) -> tuple[tuple[float, int], ...]:
    """(chance that a token draws an expert, experts that have it), over all experts; chances add up to `chosen`.

    Draws without replacement are as if each expert had an exponential clock and the first `chosen` won: expert e has
    the chance 1 - exp(-odds t), with t such that they add up. Exact for `skew` 0, else off by under 1 %.
    """
    if skew == 0.0 or chosen == experts:
        return ((chosen / experts, experts),)
    odds = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    low, high = 0.0, chosen / float(odds[-1]) * experts
    for _ in range(200):
        middle = 0.5 * (low + high)
        if float(np.sum(-np.expm1(-odds * middle))) < chosen:
            low = middle
        else:
            high = middle
    return tuple((float(chance), 1) for chance in -np.expm1(-odds * high))


def touched(shape: Experts) -> Floats:
    """Distinct experts that m tokens touch: the sum of 1 - (1 - chance) ** m, or E (1 - (1 - k/E) ** m) of E alike."""
    if shape.counts is not None:
        return np.asarray((shape.counts > 0).sum(axis=-1), dtype=np.float64)
    m = np.asarray(shape.m, dtype=np.float64)
    return _touched(m.tobytes(), shape.experts, shape.chosen, shape.skew).reshape(m.shape)


def row_tiles(shape: Experts, tile: int) -> Floats:
    """Tiles of `tile` rows that the experts' rows make, each expert's last one as if full."""
    if shape.counts is not None:
        return np.asarray((-(-shape.counts // tile)).sum(axis=-1), dtype=np.float64)
    m = np.asarray(shape.m, dtype=np.float64)
    return _row_tiles(m.tobytes(), shape.experts, shape.chosen, shape.skew, tile).reshape(m.shape)


# a price table asks for the same tokens on every SM set, and at every clock that a power cap tries
@lru_cache(maxsize=64)
def _touched(tokens: bytes, experts: int, chosen: int, skew: float) -> Floats:
    m = np.frombuffer(tokens, dtype=np.float64)[:, None]
    chance, alike = _table(experts, chosen, skew)
    found: Floats = (alike * (1.0 - (1.0 - chance) ** m)).sum(axis=-1)
    return found


@lru_cache(maxsize=64)
def _row_tiles(tokens: bytes, experts: int, chosen: int, skew: float, tile: int) -> Floats:
    m = np.frombuffer(tokens, dtype=np.float64)[:, None, None]
    chance, alike = (column[:, None] for column in _table(experts, chosen, skew))
    mean, sd = m * chance, np.sqrt(m * chance * (1.0 - chance))
    rows = np.round(mean + sd * _normal())
    beyond = np.maximum(np.ceil(np.minimum(rows, m) / tile) - 1.0, 0.0).mean(axis=-1)
    tiles: Floats = _touched(tokens, experts, chosen, skew) + (alike[:, 0] * beyond).sum(axis=-1)
    return tiles


def _table(experts: int, chosen: int, skew: float) -> tuple[Floats, Floats]:
    found = np.array(chances(experts, chosen, skew))
    return found[:, 0], found[:, 1]


@lru_cache(maxsize=1)
def _normal() -> Floats:
    """Middles of equal shares of the standard normal."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])

"""Two launches side by side on the GPUs of a group: for a part of its time each waits for a collective.

Contention was measured of launches on one GPU, whose operators compute all the time. Beside a collective an operator
slows down as the profile measured it, or by the SMs that the collective takes from a shared set; on SMs of their own
they leave each other alone unless it was measured. Which part of one launch meets which of the other is left to
chance: the factors are means weighed by the shares of either's own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sim.cost.collectives import Beside, is_collective, message_bytes
from sim.cost.launching import grid_tokens
from sim.cost.operators import calls
from sim.cost.shapes import Floats, Launch

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost

# compute to look for in the rows of a profile, nearest first: what most of a prompt's, or of a decode step's time is
KINDS = {True: ("gemm", "prefill_attention"), False: ("decode_attention", "elementwise", "gemm")}


@dataclass(frozen=True)
class Waits:
    """Collectives of launches alone, one array element each: seconds in all, bytes of a message and SMs that it holds
    (means over the time), and the share of the time that does not grow with the bytes. `prefill`: has it chunks?"""

    seconds: Floats
    size: Floats
    held: Floats
    fixed: Floats
    prefill: Floats


def waits(cost: ProfiledCost, launches: Sequence[Launch], sms: int) -> Waits:
    """The collectives of launches on `sms` SMs."""
    tokens = np.array([one.tokens for one in launches], dtype=np.int64)
    graph = np.array([one.graph for one in launches], dtype=bool)
    padded = np.where(graph, cost.launching.padded(tokens, True), tokens)
    rows = {"tokens": grid_tokens(padded), "sequences": grid_tokens([one.sequences for one in launches])}
    total = np.zeros((4, len(launches)))
    for operator in cost.operators:
        if not is_collective(operator.name):
            continue
        times = np.array([calls(operator, cost.model, one.layers) for one in launches])
        shape = operator.shape(rows[operator.rows])
        found = cost.timing(operator.name, shape, sms)
        seconds = times * found.seconds
        fixed = np.minimum(times * cost.profile.curve(operator.name).fixed_s(shape), seconds)
        total += [seconds, seconds * message_bytes(shape), times * found.sm_s, fixed]
    whole = np.maximum(total[0], 1e-30)
    chunked = np.array([bool(one.chunks) for one in launches])
    return Waits(total[0], total[1] / whole, total[2] / whole, total[3] / whole, chunked)


@dataclass(frozen=True)
class Side:
    """One of two sides: its collectives, seconds of its compute, its SMs, and the factors on that compute beside the
    other's compute."""

    waits: Waits
    compute_s: Floats
    sms: int
    slowdown: Floats

    @property
    def share(self) -> Floats:
        """Share of its time alone in collectives."""
        return self.waits.seconds / np.maximum(self.waits.seconds + self.compute_s, 1e-30)


def beside_collectives(cost: ProfiledCost, a: Side, b: Side, overlap: int) -> tuple[Floats, Floats]:
    """Factors on the whole of every a beside every b, shape (len(a), len(b)) each."""
    of_b = _factor(cost, b, a, overlap)
    turned = replace(a, slowdown=a.slowdown.T)
    return _factor(cost, turned, b, overlap).T, of_b


def _factor(cost: ProfiledCost, mine: Side, other: Side, overlap: int) -> Floats:
    """Factors on `mine` along the last axis beside `other` along the first."""
    waiting, beside = mine.share[None, :], other.share[:, None]
    compute = (1 - beside) * mine.slowdown + beside * _compute_factor(cost, mine, other, overlap)
    collective = (1 - beside) * _collective_factor(cost, mine, other, overlap)
    collective = collective + beside * _both(cost, mine)
    return np.asarray((1 - waiting) * compute + waiting * collective)


def _compute_factor(cost: ProfiledCost, mine: Side, other: Side, overlap: int) -> Floats:
    """Of my compute beside the other's collectives, shape (other, mine)."""
    # on shared SMs a collective takes those that it holds away
    taken = np.minimum(other.waits.held, min(overlap, mine.sms - 1))
    found = np.repeat((mine.sms / (mine.sms - taken))[:, None], len(mine.compute_s), axis=1)
    for prefill in (True, False):
        rows = _rows(cost, KINDS[prefill], overlap, mine.sms)
        if rows:
            factors = _between(rows, [one.compute_factor for one in rows], other.waits.size)
            found[:, mine.waits.prefill == prefill] = factors[:, None]
    return found


def _collective_factor(cost: ProfiledCost, mine: Side, other: Side, overlap: int) -> Floats:
    """Of my collectives beside the other's compute, shape (other, mine)."""
    found = np.ones((len(other.compute_s), len(mine.compute_s)))
    for prefill in (True, False):
        rows = _rows(cost, KINDS[prefill], overlap, other.sms)
        if rows:
            factors = _between(rows, [one.collective_factor for one in rows], mine.waits.size)
            found[other.waits.prefill == prefill, :] = factors[None, :]
    return found


def _both(cost: ProfiledCost, mine: Side) -> Floats:
    """Of my collectives beside the other's: what grows with the bytes shares the link."""
    source = cost.profile.collectives
    rows = [] if source is None else source.beside_rows(("allreduce",), "shared")
    if rows:
        return _between(rows, [one.collective_factor for one in rows], mine.waits.size)[None, :]
    return 2.0 - mine.waits.fixed[None, :]


def _rows(cost: ProfiledCost, kinds: Sequence[str], overlap: int, sms: int) -> list[Beside]:
    """Rows of the profile for that kind of compute, of the set of SMs nearest to `sms`."""
    source = cost.profile.collectives
    rows = [] if source is None else source.beside_rows(kinds, "shared" if overlap else "disjoint")
    if not rows:
        return []
    nearest = min({one.compute_sms for one in rows}, key=lambda count: (abs(count - sms), count))
    return [one for one in rows if one.compute_sms == nearest]


def _between(rows: Sequence[Beside], factors: Sequence[float], size: Floats) -> Floats:
    """Factors at message sizes, linear in their logarithm, held at both ends."""
    at = np.log2(np.maximum([one.size for one in rows], 1.0))
    return np.asarray(np.interp(np.log2(np.maximum(size, 1.0)), at, factors))


def beside_label(cost: ProfiledCost) -> str:
    """Where the factors beside a collective come from."""
    source = cost.profile.collectives
    if source is not None and source.beside:
        return source.label
    return f"extrapolated from {cost.profile.name} by the SMs that a collective holds"

"""CTAs of two kinds, each with work of its own, on a GPU's SMs: when the last one ends.

Where `sim.cost.cta_schedule` takes all CTAs of a kind as alike, here each has its own length: causal tiles grow along a
chunk, the last piece of a split context is short, batches are ragged. Launches run side by side in arrays, each from
one end of a CTA to the next. Between two ends rates are constant:

- prefill: an SM's arithmetic is shared by its prefill CTAs; one alone cannot use all of it (`alone`), less beside a
  decode CTA (`beside`);
- decode: all that read share HBM, each at the same rate, which saturates smoothly towards `bandwidth`; beside a prefill
  CTA, whose warps take issue slots and whose tiles take shared memory's, a share `decode_beside` of it.

The ticket rule is that of `sim.cost.cta_schedule`. A free SM draws in the order of its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.cost.cta_schedule import Tickets
from sim.cost.shapes import Floats

NONE, PREFILL, DECODE = -1, 0, 1
TOGETHER = 2e-3  # ends as close as this, of the time that all work takes at best, are one
CELLS = 1 << 21  # slots of all launches that are run at a time


@dataclass(frozen=True)
class CtaRates:
    """What CTAs get of a GPU: shares of an SM's arithmetic, bytes/s of one decode CTA alone (`stream`) and of all
    (`bandwidth`), and how sharply the latter saturates."""

    alone: float
    beside: float
    decode_beside: float
    stream: float
    bandwidth: float
    bandwidth_p: float


@dataclass(frozen=True)
class Launch:
    """One launch: SM-seconds of each prefill CTA and bytes of each decode CTA, in the order of their numbers.

    `by_block`: kinds alternate in proportion by block index, whatever SM a block lands on.
    """

    prefill: Floats
    decode: Floats
    tickets: Tickets
    slots: int = 2
    by_block: bool = False


def spans(launches: Sequence[Launch], rates: CtaRates, sms: int) -> Floats:
    """Seconds from the first CTA's start to the last one's end, shape (launches, 2): to the last of each kind."""
    found = np.zeros((len(launches), 2))
    order = sorted(range(len(launches)), key=lambda i: (launches[i].slots, _size(launches[i])))
    start = 0
    while start < len(order):
        slots = launches[order[start]].slots
        end, most = start, max(1, CELLS // (slots * sms))
        while end < min(len(order), start + most) and launches[order[end]].slots == slots:
            end += 1
        part = order[start:end]
        found[part] = _Batch([launches[i] for i in part], rates, sms).run()
        start = end
    return found


def _size(launch: Launch) -> int:
    return len(launch.prefill) + len(launch.decode)


class _Batch:
    """Launches with as many slots an SM, side by side; arrays have a row a launch and a column a slot, all first slots
    before all second ones."""

    def __init__(self, launches: Sequence[Launch], rates: CtaRates, sms: int) -> None:
        self.rates, self.sms, self.slots = rates, sms, launches[0].slots
        self.work = [_padded([one.prefill for one in launches]), _padded([one.decode for one in launches])]
        self.count = np.array([[len(one.prefill), len(one.decode)] for one in launches])
        self.given = np.zeros_like(self.count)  # CTAs that have started, by kind
        self.period = np.array([one.tickets.period for one in launches])[:, None]
        self.first = np.array([one.tickets.prefill for one in launches])[:, None]
        self.by_block = np.array([one.by_block for one in launches])[:, None]
        shape = (len(launches), self.slots * sms)
        self.kind, self.left = np.full(shape, NONE, np.int8), np.zeros(shape)
        self.tickets = np.zeros((len(launches), sms), np.int64)
        self.now, self.ends = np.zeros(len(launches)), np.zeros((len(launches), 2))
        self.rows = np.arange(len(launches))  # of `ends`, of launches still under way
        best = [one.prefill.sum() / sms + one.decode.sum() / rates.bandwidth for one in launches]
        self.together = TOGETHER * np.array(best)

    def run(self) -> Floats:
        """Ends of the last CTA of each kind."""
        self._fill()
        while len(self.rows):
            self._advance()
            if (self.given < self.count).any():
                self._fill()
            busy = (self.kind != NONE).any(axis=1)
            if busy.sum() <= 0.8 * len(busy) or not busy.any():
                self._keep(busy)
        return self.ends

    def _keep(self, busy: NDArray[np.bool_]) -> None:
        names = (
            "count",
            "given",
            "period",
            "first",
            "by_block",
            "kind",
            "left",
            "tickets",
            "now",
            "rows",
            "together",
        )
        for name in names:
            setattr(self, name, getattr(self, name)[busy])
        self.work = [work[busy] for work in self.work]

    def _advance(self) -> None:
        """To the next end of a CTA in every launch."""
        by_sm = self.kind.reshape(len(self.kind), self.slots, self.sms)
        prefill, decode = (by_sm == PREFILL).sum(axis=1), (by_sm == DECODE).sum(axis=1)
        rates = self.rates
        reading = decode.sum(axis=1)
        wanted = reading * rates.stream / rates.bandwidth
        each = rates.stream * (1.0 + wanted**rates.bandwidth_p) ** (-1.0 / rates.bandwidth_p)
        most = np.where(decode > 0, rates.beside, rates.alone)
        p_rate = np.minimum(most, 1.0 / np.maximum(prefill, 1))
        d_rate = each[:, None] * np.where(prefill > 0, rates.decode_beside, 1.0)
        tiled = (len(self.kind), self.slots, self.sms)
        rate = np.where(
            self.kind == PREFILL,
            np.broadcast_to(p_rate[:, None], tiled).reshape(self.kind.shape),
            np.broadcast_to(d_rate[:, None], tiled).reshape(self.kind.shape),
        )
        active = self.kind != NONE
        ahead = np.where(active, self.left / rate, np.inf)
        step = ahead.min(axis=1)
        step = np.where(np.isfinite(step), step, 0.0)
        ended = active & (ahead <= (step + self.together)[:, None])
        self.now += step
        self.left -= rate * step[:, None]
        for kind in (PREFILL, DECODE):
            some = (ended & (self.kind == kind)).any(axis=1)
            self.ends[self.rows[some], kind] = self.now[some]
        self.kind[ended] = NONE

    def _fill(self) -> None:
        """Start CTAs wherever there is room: one to an SM, and round after round."""
        for slot in range(self.slots):
            rows = np.flatnonzero((self.given < self.count).any(axis=1))
            at = slice(slot * self.sms, (slot + 1) * self.sms)
            free = self.kind[rows, at] == NONE
            turn, period = self.tickets[rows], self.period[rows]
            wants = (turn % np.maximum(period, 1) < self.first[rows]) | (period == 0)
            if self.by_block[rows].any():
                wants = np.where(self.by_block[rows], self._by_block(rows, free), wants)
            self.tickets[rows] += free
            asked = (free & wants, free & ~wants)
            over = [self._give(rows, slot, asked[kind], kind) for kind in (PREFILL, DECODE)]
            for kind in (PREFILL, DECODE):
                self._give(rows, slot, over[1 - kind], kind)

    def _by_block(self, rows: NDArray[np.intp], free: NDArray[np.bool_]) -> NDArray[np.bool_]:
        block = self.given[rows].sum(axis=1)[:, None] + np.cumsum(free, axis=1) - free
        prefill, total = self.count[rows, PREFILL][:, None], self.count[rows].sum(axis=1)[:, None]
        return np.asarray((block + 1) * prefill // total > block * prefill // total)

    def _give(
        self, rows: NDArray[np.intp], slot: int, asked: NDArray[np.bool_], kind: int
    ) -> NDArray[np.bool_]:
        """Start the next CTAs of a kind in a slot of the SMs that ask for one; the SMs that get none."""
        if not asked.any():
            return asked
        number = self.given[rows, kind][:, None] + np.cumsum(asked, axis=1) - asked
        got = asked & (number < self.count[rows, kind][:, None])
        launch, sm = np.nonzero(got)
        at = (rows[launch], slot * self.sms + sm)
        self.kind[at] = kind
        self.left[at] = self.work[kind][rows[launch], number[launch, sm]]
        self.given[rows, kind] += got.sum(axis=1)
        return np.asarray(asked & ~got)


def _padded(works: Sequence[Floats]) -> Floats:
    held = np.zeros((len(works), max(1, *(len(work) for work in works))))
    for row, work in zip(held, works, strict=True):
        row[: len(work)] = work
    return held

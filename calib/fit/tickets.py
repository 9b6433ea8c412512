"""The list schedule of CTAs against synthetic ones: terms from each kind alone and beside the other, mixes held out.

All jobs of a launch start within a fifth of a microsecond and draw their numbers in no order (`cta_timeline`), so of
jobs that differ an SM gets any: a prediction is the median over as many random orders as a measurement has runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from calib.fit.folds import errors
from calib.fit.points import Floats
from calib.kernels.tickets import ALONE, LOOP_BYTES, works
from calib.sweeps.power import BESIDE_SEED, MIXES
from sim.cost.cta_events import CtaRates, Launch, spans
from sim.cost.cta_schedule import HALF, PREFILL_FIRST, proportional

RULES = ("proportional", "half", "cta_parallel")  # whose CTAs do one job of one kind
ORDERS = 9
SEED = 47


@dataclass(frozen=True)
class TicketTerms:
    """Seconds of a compute loop on a full SM (`loop_s`), share of the SM that one CTA gets `alone` and `beside` a
    bandwidth CTA, share of its rate that a bandwidth CTA keeps beside compute (`decode_beside`), bytes/s of one
    (`stream`) and of all, how sharply they saturate, and the seconds of a CTA's start and a launch's."""

    loop_s: float
    alone: float
    stream: float
    bandwidth: float
    bandwidth_p: float
    start_s: float
    launch_s: float
    beside: float = 1.0
    decode_beside: float = 1.0


START = TicketTerms(1.35e-7, 0.95, 17e9, 5e12, 2.0, 3e-7, 1e-6)
OF_ONE = ("loop_s", "alone", "stream", "bandwidth", "bandwidth_p", "start_s", "launch_s")
OF_BOTH = ("beside", "decode_beside")


def predicted_s(rows: pd.DataFrame, terms: TicketTerms, orders: int = ORDERS) -> Floats:
    """Makespans of the rows of a ticket sweep."""
    launches, owner = [], []
    for i, row in enumerate(rows.itertuples()):
        loops = [
            np.array(
                works(int(row.seed) + n, int(count), int(work), float(row.spread)) if count else [], float
            )
            for n, (count, work) in enumerate(
                ((row.compute_ctas, row.compute_work), (row.bandwidth_ctas, row.bandwidth_work))
            )
        ]
        rng = np.random.default_rng([SEED, i])
        for _ in range(orders if row.spread else 1):
            launches.append(_launch(str(row.label), loops, terms, int(row.ctas_per_sm)))
            owner.append(i)
            loops = [rng.permutation(one) for one in loops]
    rates = CtaRates(
        min(terms.alone, 1.0),
        min(terms.beside, terms.alone, 1.0),
        min(terms.decode_beside, 1.0),
        terms.stream,
        terms.bandwidth,
        terms.bandwidth_p,
    )
    found = np.zeros(len(launches))
    sizes = rows["sms"].to_numpy(int)[owner]
    for sms in np.unique(sizes):
        at = np.flatnonzero(sizes == sms)
        found[at] = spans([launches[i] for i in at], rates, int(sms)).max(axis=1)
    return np.asarray(pd.Series(found).groupby(owner).median()) + terms.launch_s


def _launch(rule: str, loops: Sequence[Floats], terms: TicketTerms, slots: int) -> Launch:
    compute, reads = loops
    tickets = PREFILL_FIRST
    if rule == "half" and len(compute) and len(reads):
        tickets = HALF
    elif rule == "proportional":
        tickets = proportional(len(compute), len(reads))
    return Launch(
        compute * terms.loop_s + terms.start_s,
        reads * LOOP_BYTES + terms.start_s * terms.stream,
        tickets,
        slots,
        rule == "cta_parallel",
    )


def fit_tickets(rows: pd.DataFrame) -> TicketTerms:
    """Terms from CTAs of one kind, all alike, and then from both kinds beside each other in mixes of their own."""
    alone, beside = fitted_rows(rows)
    terms = _fit(alone, START, OF_ONE)
    return _fit(beside, terms, OF_BOTH) if len(beside) else terms


def fitted_rows(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(rows of one kind, rows of both kinds) that terms are fitted to: no random mix is among them."""
    alone = rows[rows["label"].isin(ALONE) & (rows["spread"] == 0)]
    return alone, rows[(rows["seed"] >= BESIDE_SEED) & rows["label"].isin(RULES)]


def _fit(rows: pd.DataFrame, start: TicketTerms, names: Sequence[str]) -> TicketTerms:
    first = np.log(
        [min(getattr(start, name), 0.9) if name in OF_BOTH else getattr(start, name) for name in names]
    )
    measured = rows["span_s"].to_numpy(float)

    def terms(x: Floats) -> TicketTerms:
        return TicketTerms(**{**vars(start), **dict(zip(names, np.exp(x).tolist(), strict=True))})

    def off(x: Floats) -> Floats:
        return np.asarray(np.log(predicted_s(rows, terms(x)) / measured))

    found = least_squares(off, first, loss="soft_l1", f_scale=0.02, diff_step=1e-2, max_nfev=7)
    return terms(found.x)


def mix_errors(rows: pd.DataFrame, terms: TicketTerms) -> dict[str, Any]:
    """Errors on the random mixes by rule: of jobs alike, of jobs that differ, and of all."""
    found = {}
    for rule in RULES:
        part = rows[(rows["label"] == rule) & (rows["seed"] < MIXES)].reset_index(drop=True)
        if not len(part):
            continue
        guess, measured = predicted_s(part, terms), part["span_s"].to_numpy(float)
        spread = part["spread"].to_numpy(float) > 0
        found[rule] = {
            "all": errors(guess, measured),
            "alike": errors(guess[~spread], measured[~spread]),
            "differing": errors(guess[spread], measured[spread]),
        }
    return found

"""How long a replica can be left alone: nothing leaves it before a request can have all its tokens.

A router that counts requests needs a replica's state only from then on. Every step gives a request one token at most
and takes a least time, so what is in flight and the tokens that are missing give a bound; it need not be sharp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.engine.lane import accept, settle
from sim.engine.lanes import accept_lanes, next_end, settle_lanes
from sim.engine.layout import (
    BURST,
    BUSY,
    COHORT,
    COMMITTED,
    DUE,
    IN_CHUNKS,
    MANY,
    N_PARTIAL,
    N_READY,
    N_RUN,
    N_WAIT,
    NOW,
    STEP,
    WAIT_HEAD,
)
from sim.jit import jit

NEVER = 1e300
MOST_WAITING = 8  # looked at; of a longer queue nothing is known
SHORTER = 0.5  # share of its table time that a step on a cool GPU takes at least


@jit
def steps_to_finish(q: Any, r: Any) -> int:
    """Steps, those in flight among them, before which no request can have its last token; 1 if that is not known."""
    iv = r.iv
    if iv[N_WAIT] > MOST_WAITING:
        return 1
    least, seen = MANY, iv[COHORT] + iv[N_READY] + iv[N_PARTIAL]
    if iv[COHORT] > 0:
        least = r.heap_key[0] - iv[STEP]
    for n in range(iv[N_READY]):
        i = r.ready[n]
        least = min(least, q.output[i] - q.generated[i])
    for n in range(iv[N_PARTIAL]):
        i = r.partial[n]
        least = min(least, q.output[i] - q.generated[i])
    if iv[BUSY] == 1:
        for n in range(iv[IN_CHUNKS]):
            i = r.chunk_id[n]
            least = min(least, q.output[i] - q.generated[i])
            seen += 1
    i = iv[WAIT_HEAD]
    while i >= 0:
        least = min(least, q.output[i] - q.generated[i])
        i = q.next[i]
    # chunks in flight may be counted twice, but nobody is left out
    return int(max(1, least)) if seen >= iv[N_RUN] else 1


@jit
def next_leave(q: Any, r: Any, least_step_s: float) -> float:
    """A time before which nobody can leave the replica, whose state is committed up to the last decision or later."""
    iv = r.iv
    if iv[N_WAIT] + iv[N_RUN] == 0:
        return NEVER
    steps = steps_to_finish(q, r)
    if iv[BUSY] == 0:
        return float(r.fv[NOW] + steps * least_step_s)
    left = iv[BURST] - iv[COMMITTED]
    if steps <= left:
        return float(r.ends[iv[COMMITTED] + steps - 1])
    return float(r.ends[iv[BURST] - 1] + (steps - left) * least_step_s)


@jit
def settle_and_look(q: Any, r: Any, p: Any, now: float, least_step_s: float) -> float:
    """Bring a replica of one lane up to `now`; returns a time before which nobody leaves."""
    settle(q, r, p, now)
    return next_leave(q, r, least_step_s)


@jit
def accept_and_look(q: Any, r: Any, p: Any, i: int, now: float, least_step_s: float) -> float:
    """Request i arrives on one lane; returns a time before which nobody leaves."""
    accept(q, r, p, i, now)
    return next_leave(q, r, least_step_s)


@jit
def settle_lanes_and_look(q: Any, r: Any, x: Any, now: float) -> float:
    """The same for two lanes: nobody leaves before something ends, or is launched."""
    settle_lanes(q, r, x, now)
    return next_end(r) if r.iv[DUE] == 0 else r.fv[NOW]


@jit
def accept_lanes_and_look(q: Any, r: Any, x: Any, i: int, now: float) -> float:
    """The same for two lanes."""
    accept_lanes(q, r, x, i, now)
    return next_end(r) if r.iv[DUE] == 0 else r.fv[NOW]


def least_step_s(p: Any) -> float:
    """Seconds that no step on the whole GPU goes below, by its price tables."""

    def table(name: str, entries: int) -> np.ndarray[Any, Any]:
        return np.asarray(getattr(p, name), np.float64)[1 : entries + 1]

    n, m = p.max_seqs, p.max_tokens
    found = []
    for mode in ("graph", "eager"):
        gpu = table(f"dense_{mode}_s", m).min() + table("head_s", n).min()
        found.append(max(gpu, table(f"host_{mode}_s", n).min()) + table(f"gap_{mode}_s", n).min())
    cool = SHORTER if p.heat_on else 1.0
    return cool * float(min(found)) * float(np.min(p.noise))

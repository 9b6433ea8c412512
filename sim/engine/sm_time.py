"""Where SM time goes: every SM-second of a window belongs to exactly one class, so they add up to SMs x window.

While nothing is in flight the GPU is *empty*; while something is, SMs of no busy lane are an *idle lane*. What a launch
holds, its SMs times its seconds, is split in this order:

- *switch*: moving the lane to another SM set;
- *host*: seconds beyond the GPU's own, when the host or an unhidden gap is what takes time (jitter included);
- *active*: SM-seconds with a resident warp, as the price tables have them. Parts of it, which are not added again:
  *attention*, decode attention in a launch of decodes alone, bound by memory at an intensity of a few FLOP a byte, so
  that its SMs cannot use their tensor cores; *lockstep*, the same in a launch that carries prompts as well, where
  compute-bound work is at hand and waits for it;
- *contention*: seconds that it takes longer because of its neighbour, as the slowdown surface has it. Where the sets
  overlap, only what is left of them: an SM on which the neighbour works is not lost;
- *tail*: the rest. SMs without a warp while a kernel runs or starts: last waves and gaps between kernels.
- *lent*: of the tails of prefill, what decode works in (`LEND`). Out of the tail, and SM activity as well: the
  borrower's own SMs are active for so much less.

Two lanes whose sets overlap hold the common SMs in proportion to what they get done, SMs over slowdown.
"""

from __future__ import annotations

from typing import Any

from sim.engine.layout import (
    ATTENTION_SM_S,
    CONTENTION_SM_S,
    HOST_SM_S,
    LAUNCH_SM,
    LENT_SM_S,
    LOCKSTEP_SM_S,
    SM_CLASSES,
    SM_S,
    SWITCH_SM_S,
    TAIL_SM_S,
)
from sim.jit import jit


@jit
def split_launch(
    r: Any,
    held: float,
    contention: float,
    switch: float,
    host: float,
    sm_s: float,
    attention: float,
    mixed: bool,
    lent: float,
    borrowed: float,
) -> None:
    """Split the SM-seconds `held` of one launch into the classes of `LAUNCH_SM`; all in SM-seconds.

    `sm_s`: with a resident warp, of which `attention` in decode attention; `lent` to the neighbour, `borrowed` from it.
    """
    launch = r.fv
    switch = min(held, switch)
    rest = held - switch
    host = min(rest, host)
    rest -= host
    active = min(rest, max(0.0, sm_s - borrowed))
    rest -= active
    contention = min(rest, contention)
    rest -= contention
    lent = min(rest, lent)
    attention = min(attention, active)
    at = LAUNCH_SM - SM_S
    launch[at + SM_S] = active
    launch[at + TAIL_SM_S] = rest - lent
    launch[at + HOST_SM_S] = host
    launch[at + CONTENTION_SM_S] = contention
    launch[at + SWITCH_SM_S] = switch
    launch[at + LENT_SM_S] = lent
    launch[at + ATTENTION_SM_S] = 0.0 if mixed else attention
    launch[at + LOCKSTEP_SM_S] = attention if mixed else 0.0


@jit
def add_launch(r: Any, share: float) -> None:
    """Add `share` of the launch just split to the sums."""
    fv = r.fv
    for n in range(SM_CLASSES):
        fv[SM_S + n] += fv[LAUNCH_SM + n] * share


@jit
def count_step(
    r: Any, held: float, host: float, sm_s: float, attention: float, mixed: bool, share: float
) -> None:
    """Split a launch that has the GPU to itself and add `share` of it: what the two above do, in fewer steps."""
    fv = r.fv
    rest = held - host
    active = min(sm_s, rest)
    tail = rest - active
    attention = min(attention, active)
    at = LAUNCH_SM - SM_S
    fv[at + SM_S] = active
    fv[at + TAIL_SM_S] = tail
    fv[at + HOST_SM_S] = host
    fv[SM_S] += active * share
    fv[TAIL_SM_S] += tail * share
    fv[HOST_SM_S] += host * share
    mine, other = (LOCKSTEP_SM_S, ATTENTION_SM_S) if mixed else (ATTENTION_SM_S, LOCKSTEP_SM_S)
    fv[at + mine] = attention
    fv[at + other] = 0.0
    fv[mine] += attention * share

"""A fixed share of the SMs for each phase: prefill and decode side by side, never re-partitioned by load.

The idea of MuxServe (arXiv:2404.02015) within one model, and Bullet's static arms: SM-84 (prefill 84, decode free to
use all of the 108) and SM-108 (no partition), arXiv:2504.19516 Fig. 22. Left open there and chosen here: prompts
are admitted first come first served, whole, up to `max_prefill_tokens` a batch, with blocks for the whole prompt.
"""

from __future__ import annotations

from typing import Any

from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import D_LAUNCH, D_PART, FREE, IN_CHUNKS, N_PREEMPT, P_LAYERS, P_PART
from sim.errors import SimctlError
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.two_lanes import (
    WholePrompts,
    admit_prompts,
    clear_lanes,
    decodable,
    has_prefill,
    layers_left,
    make_room,
    may_decode,
    may_prefill,
)

TOKENS, SEQS, SPARE, GROUP, EXPAND, PREFILL_PART, DECODE_PART = 0, 1, 2, 3, 4, 5, 6


@jit
def plan(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Launch whatever is idle on its own set; on all SMs if the other phase has nothing to do."""
    clear_lanes(a)
    free = r.iv[FREE]
    if may_decode(r) and decodable(r) > 0:
        free = make_room(q, r, a)
        a.iv[D_LAUNCH] = 1
    if may_prefill(r):
        if r.iv[IN_CHUNKS] == 0 and a.iv[N_PREEMPT] == 0:
            admit_prompts(q, r, a, ki[TOKENS], ki[SEQS], ki[SPARE], free)
        if has_prefill(r, a):
            left = layers_left(r)
            a.iv[P_LAYERS] = min(ki[GROUP], left) if ki[GROUP] > 0 else left
            alone = ki[EXPAND] == 1 and decodable(r) == 0
            a.iv[P_PART] = 0 if alone else ki[PREFILL_PART]
    a.iv[D_PART] = 0 if ki[EXPAND] == 1 and not has_prefill(r, a) else ki[DECODE_PART]


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, ki)
        if not execute_lanes(q, r, a, p, x):
            return


class StaticSplitPolicy(WholePrompts):
    """Fixed SM shares for prefill and decode."""

    name = "static-split"
    source = "MuxServe, arXiv:2404.02015; Bullet's static arms, arXiv:2504.19516 Fig. 22"
    mirrors = "no engine: a reference point"
    knobs = {  # noqa: RUF012
        "prefill_sms": Knob(
            None, "SMs of prefill; default by prefill_share", "a choice of the experiment", minimum=1
        ),
        "decode_sms": Knob(
            None, "SMs of decode; default by decode_share", "a choice of the experiment", minimum=1
        ),
        "prefill_share": Knob(
            0.5, "share of the SMs for prefill", "50:50 as the survey articles call it", minimum=0, maximum=1
        ),
        "decode_share": Knob(
            0.0, "share of the SMs for decode, may overlap; 0: the rest", "choice", minimum=0, maximum=1
        ),
        "expand_when_idle": Knob(
            False, "a phase alone takes all SMs from its next launch", "choice; off = strictly static"
        ),
        "layer_step": Knob(0, "layers per prefill launch; 0: all at once", "choice", minimum=0),
        **WholePrompts.admission,
    }
    advance = advance

    def __init__(self, label: str | None = None, **settings: Any) -> None:
        super().__init__(label, **settings)
        self._shared = "prefill_share" in settings  # asked for, not a default
        for side in ("prefill", "decode"):
            if f"{side}_share" in settings and self[f"{side}_sms"] is not None:
                raise SimctlError(
                    f"policy '{self.label}': {side}_sms and {side}_share both say how many SMs {side} gets; give one"
                )

    def split(self, deployment: Deployment) -> tuple[int, int]:
        """SMs of prefill and of decode. Raises SimctlError for sets that the mechanism cannot make."""
        total = deployment.sms
        sizes = deployment.mechanism.sizes(total, deployment.compute_capability)
        prefill, decode = self["prefill_sms"], self["decode_sms"]
        if decode is None and self["decode_share"] > 0:
            decode = _nearest(self["decode_share"], sizes, total)
        if prefill is None:
            rest = self["decode_sms"] is not None and not self._shared
            prefill = total - int(decode) if rest else _nearest(self["prefill_share"], sizes, total)
        if decode is None:
            decode = total - int(prefill)
        sides = [("prefill_sms", int(prefill)), ("decode_sms", int(decode))]
        # what the user gave comes first, so that a fault is told of that side
        for side, sms in sorted(sides, key=lambda pair: self[pair[0]] is None):
            if sms <= 0:
                other = "decode" if side == "prefill_sms" else "prefill"
                raise SimctlError(
                    f"policy '{self.label}': {other} takes all {total} SMs and leaves none; give {side} as well, "
                    "and the sets overlap"
                )
            if not (sms == total or sms in sizes or total - sms in sizes):
                near = min([*sizes, total], key=lambda size: abs(size - sms))
                raise SimctlError(
                    f"policy '{self.label}': {side} = {sms} is no set that '{deployment.mechanism.name}' can make on "
                    f"{deployment.gpu} ({total} SMs); the nearest is {near}"
                )
        return int(prefill), int(decode)

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """The split, and what it overlaps with while one side has expanded."""
        p, d = self.split(deployment)
        expanded = [(deployment.sms, d), (p, deployment.sms)] if self["expand_when_idle"] else []
        return list(dict.fromkeys([(p, d), *expanded]))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Limits, layer group, expansion, and the two price partitions."""
        sizes = self.price_partitions(deployment)
        p, d = self.split(deployment)
        group, expand = int(self["layer_step"]), int(self["expand_when_idle"])
        return [*self.limits(deployment), group, expand, sizes.index(p), sizes.index(d)], []


def _nearest(share: float, sizes: list[int], total: int) -> int:
    """The set of the mechanism that is nearest to a share of the SMs; the smaller of two."""
    return min([*sizes, total], key=lambda size: (abs(size - share * total), size))

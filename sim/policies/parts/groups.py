"""Groups of pre-built green contexts: all SMs for prefill, a split of them, or all for decode.

A policy with groups has one in force (`GROUP` of its state: 0 at first, then 1 + the number of the split, or one of the
two behind the last split). To change it, both streams are synchronised: nothing may be in flight on either lane.
"""

from __future__ import annotations

from typing import Any

from sim.engine.deployment import Deployment
from sim.engine.layout import D_DELAY_NS, D_LAUNCH, D_PART, P_DELAY_NS, P_LAYERS, P_PART, WHOLE_GPU
from sim.jit import jit
from sim.policies.parts.splits import check_ready
from sim.policies.parts.two_lanes import WholePrompts

GROUP, GRANTED = 0, 1  # policy_i: the group in force; prefill layers that may follow what is in flight
N_SPLITS, SYNC_NS, SPLITS = 3, 4, 5  # ki, behind the limits: then prefill's partitions, then decode's


@jit
def all_prefill(ki: Any) -> int:
    """Number of the group in which prefill has all SMs."""
    return int(ki[N_SPLITS] + 1)


@jit
def all_decode(ki: Any) -> int:
    """Number of the group in which decode has all SMs."""
    return int(ki[N_SPLITS] + 2)


@jit
def prefill_part(ki: Any, group: int) -> int:
    """Price partition of prefill in a group."""
    return int(ki[SPLITS + group - 1]) if 1 <= group <= ki[N_SPLITS] else WHOLE_GPU


@jit
def decode_part(ki: Any, group: int) -> int:
    """Price partition of decode in a group."""
    return int(ki[SPLITS + ki[N_SPLITS] + group - 1]) if 1 <= group <= ki[N_SPLITS] else WHOLE_GPU


@jit
def enter_group(r: Any, a: Any, ki: Any, group: int) -> None:
    """The group that the plan's launches are for; a change of it costs both lanes a synchronisation."""
    if r.policy_i[GROUP] != group:
        if r.policy_i[GROUP] != 0:
            a.iv[P_DELAY_NS] += ki[SYNC_NS]
            a.iv[D_DELAY_NS] += ki[SYNC_NS]
        r.policy_i[GROUP] = group
        r.policy_i[GRANTED] = 0


@jit
def launch_layers(r: Any, a: Any, ki: Any, layers: int, left: int) -> None:
    """Prefill runs so many layers, of `left`, in the group in force."""
    a.iv[P_LAYERS] = min(layers, left)
    a.iv[P_PART] = prefill_part(ki, r.policy_i[GROUP])
    r.policy_i[GRANTED] = 0


@jit
def launch_step(r: Any, a: Any, ki: Any) -> None:
    """A decode step in the group in force."""
    a.iv[D_LAUNCH] = 1
    a.iv[D_PART] = decode_part(ki, r.policy_i[GROUP])


class GroupedPolicy(WholePrompts):
    """Base of the policies with groups; `splits` tells which there are."""

    def splits(self, deployment: Deployment) -> list[tuple[int, int]]:
        """(prefill SMs, decode SMs) of each split, by growing decode."""
        raise NotImplementedError

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """The splits: in the other groups one lane is idle."""
        check_ready(deployment, self.label)
        return self.splits(deployment)

    def group_parameters(self, deployment: Deployment, sync_us: float) -> list[int]:
        """Integers that the functions here read."""
        splits, parts = self.splits(deployment), self.price_partitions(deployment)
        prefill, decode = ([parts.index(one[side]) for one in splits] for side in range(2))
        return [*self.limits(deployment), len(splits), round(1e3 * sync_us), *prefill, *decode]

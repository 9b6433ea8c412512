"""Running a policy written in plain Python, any object with `plan(view)`, on one lane or on two.

Attributes that the engine looks for, all optional: `max_num_seqs` (256), `max_num_batched_tokens` (8192), `lanes` (1),
`sm_sets` (pairs of SM counts, or a method of the deployment that returns them), `wait_order`, `run_order`, `label`;
`mixes` and `heeds_estimator`, which say with False that `kernels.attention` or an estimator is of no account to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.cost.base import CostModel
from sim.cost.traits import TraitModel
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import D_LAUNCH, DUE, N_PREEMPT, P_LAYERS
from sim.engine.replica import OneLane, TwoLanes
from sim.engine.rows import Rows
from sim.engine.translate import write_lanes, write_plan
from sim.engine.view import Fixed, View
from sim.errors import SimctlError
from sim.native import HotCode


def object_sets(policy: Any, d: Deployment) -> list[tuple[int, int]]:
    """Its (prefill SMs, decode SMs) pairs: as declared, or every split that the mechanism can make."""
    if getattr(policy, "lanes", 1) == 1:
        return []
    declared = getattr(policy, "sm_sets", None)
    sizes = d.mechanism.sizes(d.sms, d.compute_capability)
    if declared is None:
        return [(size, d.sms - size) for size in sizes]
    pairs = [(int(p), int(s)) for p, s in (declared(d) if callable(declared) else declared)]
    legal = {d.sms, *sizes, *(d.sms - size for size in sizes)}
    for size in sorted({size for pair in pairs for size in pair} - legal):
        near = min(legal, key=lambda other: (abs(other - size), other))
        raise SimctlError(
            f"policy '{getattr(policy, 'label', type(policy).__name__)}': {size} SMs are no set that "
            f"'{d.mechanism.name}' can make on {d.gpu} ({d.sms} SMs); the nearest is {near}"
        )
    return pairs


def sizes_of(pairs: Sequence[tuple[int, int]], d: Deployment) -> list[int]:
    """SMs of each price partition that the pairs need, the whole GPU first."""
    return [d.sms, *sorted({size for pair in pairs for size in pair} - {d.sms})]


class ObjectLoop:
    """The loop of one replica: `loop(limit, look_ahead)` asks the policy until `limit`."""

    def __init__(
        self,
        policy: Any,
        lanes: OneLane,
        hot: HotCode,
        a: Any,
        cost: CostModel,
        d: Deployment,
        sms: list[int],
    ) -> None:
        q, r = hot.shown(lanes.q), hot.shown(lanes.r)
        self.policy, self.q, self.r, self.a = policy, q, r, hot.shown(a)
        if isinstance(lanes, TwoLanes):
            self._begin = hot.bind(begin_lanes, lanes.q, lanes.r, lanes.x)
            self._execute = hot.bind(execute_lanes, lanes.q, lanes.r, a, lanes.p, lanes.x)
        else:
            self._begin = hot.bind(begin, lanes.q, lanes.r, lanes.p)
            self._execute = hot.bind(execute, lanes.q, lanes.r, a, lanes.p)
        self.rows = Rows(q, r)
        self.fixed = Fixed(
            prompt=np.array(q.prompt, np.int64),
            max_new=np.array(q.max_new, np.int64),
            slo_class=np.array(q.slo_class, np.int64),
            priority=np.array(q.priority, np.int64),
            deployment=d,
            sm_sets=tuple(object_sets(policy, d)),
            sms=tuple(sms),
            believer=lanes,
            traits=TraitModel(cost),
        )

    def one(self, limit: float, look_ahead: float) -> None:
        """Run one lane until `limit`."""
        q, r, a = self.q, self.r, self.a
        while self._begin(limit):
            write_plan(q, r, a, self.policy.plan(self.view()), self.rows)
            if not self._execute(look_ahead) and a.iv[N_PREEMPT] == 0:
                return  # after evictions alone it is asked again

    def two(self, limit: float) -> None:
        """Run two lanes until `limit`."""
        q, r, a = self.q, self.r, self.a
        while self._begin(limit):
            write_lanes(q, r, a, self.policy.plan(self.view()), self.rows, self.fixed)
            launched = self._execute()
            if a.iv[N_PREEMPT] > 0 and a.iv[P_LAYERS] + a.iv[D_LAUNCH] == 0:
                r.iv[DUE] = 1
            elif not launched:
                return

    def view(self) -> View:
        """What the policy is shown now."""
        return View(self.q, self.r, self.fixed, *self.rows.refresh())

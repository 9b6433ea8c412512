"""Two CUDA streams without a partition: prefill and decode both may use every SM, and the hardware decides.

What a serving engine gets by launching the two phases on two streams: the first grid that fills the GPU keeps the
other's blocks waiting, so that decode starves behind prefill. Priced by the profile's measured surface of whole layers
on all SMs of both sides (`sim.cost.measured_contention`, regime `streams`); Bullet calls it SM-108 and its ablation
arm Naive (arXiv:2504.19516, Figs. 22 and 23). Scheduling is that of `static-split`.
"""

from __future__ import annotations

from typing import Any

from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import WHOLE_GPU
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.two_lanes import WholePrompts
from sim.policies.static_split import plan


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, ki)
        if not execute_lanes(q, r, a, p, x):
            return


class StreamsPolicy(WholePrompts):
    """Prefill and decode on two streams, both on all SMs."""

    name = "streams"
    source = (
        "CUDA streams and their priorities, CUDA C++ Programming Guide; Bullet's SM-108, arXiv:2504.19516"
    )
    mirrors = "no engine: what unpartitioned co-location does"
    knobs = {  # noqa: RUF012
        "layer_step": Knob(
            0, "layers per prefill launch; 0: all at once", "bullet-serve: whole pass", minimum=0
        ),
        "decode_stream": Knob(
            "normal",
            "priority of decode's stream; matters only where the profile has measured it",
            "PyTorch's default stream; bullet-serve gives decode the higher one",
            choices=("normal", "high"),
        ),
        **WholePrompts.admission,
    }
    advance = advance

    @property
    def decode_priority(self) -> str:
        """Priority of decode's stream, which the contention surface goes by."""
        return str(self["decode_stream"])

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """All SMs beside all SMs."""
        return [(deployment.sms, deployment.sms)]

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """As static-split's, both lanes on the whole GPU."""
        return [*self.limits(deployment), int(self["layer_step"]), 0, WHOLE_GPU, WHOLE_GPU], []

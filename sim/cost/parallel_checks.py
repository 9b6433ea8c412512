"""What the model says of a layer or a step of a tensor-parallel group that was measured as it is.

One GPU's shard with the collectives that join it to the others, or without any; priced at its own size, under a graph
whatever that size, since that is how such a measurement captures it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.cost.collectives import is_collective
from sim.cost.launching import Launching
from sim.cost.model import load_model
from sim.cost.operators import layer_span
from sim.cost.parallel import shard, with_group
from sim.cost.profile import CurveProfile
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Launch


@dataclass(frozen=True)
class Predicted:
    """GPU seconds in all and of the collectives, the label of each operator, and flags of what no curve covers.

    `step_s`: the longer of the GPU's time and of the host's to launch it.
    """

    seconds: float
    step_s: float
    collectives_s: float
    labels: dict[str, str]
    flags: tuple[str, ...]


def predicted(
    profile: CurveProfile,
    model: str,
    tp: int,
    launch: Launch,
    *,
    mode: str = "graph",
    joined: bool = True,
    attention: str = "",
) -> Predicted:
    """Seconds of `launch` on one of `tp` GPUs: layers (`launch.layers`) or a whole step.

    `mode`: graph or eager; `joined`: with the collectives; `attention`: back end of prefill attention (fa2, fa3; empty:
    the profile's own). Raises SimctlError for an unknown model, or one that cannot be cut so.
    """
    chosen = profile
    if attention and f"prefill_attention/{attention}" in profile.curves:
        own = {"prefill_attention": profile.curves[f"prefill_attention/{attention}"]}
        chosen = replace(profile, curves={**profile.curves, **own})
    if joined:
        chosen = with_group(chosen, tp)
    launching = Launching(mode, chosen.host, pads=False)
    cost = ProfiledCost(shard(load_model(model), tp), chosen, launching, {}, tp if joined else 1)
    price = cost.solo(replace(launch, graph=mode == "graph"))
    between = sum(part.seconds for part in price.by_operator if is_collective(part.name))
    labels = {part.name: part.label for part in price.by_operator}
    layers, _, _ = layer_span(cost.model, launch.layers)
    # bare layers are replayed without a step's own host work
    terms = chosen.host
    host = layers * terms.eager_layer_s + (0.0 if launch.layers else terms.eager_base_s)
    step_s = max(price.gpu_s, host) if mode == "eager" else price.gpu_s
    return Predicted(price.gpu_s, step_s, between, labels, price.flags)

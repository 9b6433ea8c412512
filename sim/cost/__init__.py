"""Pure cost model: from (launch shape, profile, model, parallelism) to seconds, activity, bytes and watts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.cost.model import ModelSpec
    from sim.cost.profiled import ProfiledCost

KERNEL_KEYS = ("attention", "launch", "scale")
PARALLEL_KEYS = ("tp", "pp", "ep", "dp")


def load_cost(
    model: str | ModelSpec,
    gpu: str,
    profile: str = "auto",
    parallel: Mapping[str, int] | None = None,
    kernels: Mapping[str, Any] | None = None,
    power_cap_w: float | None = None,
) -> ProfiledCost:
    """The cost model of a model on a GPU under a profile; of a group of `parallel: {tp: n}` GPUs it prices one.

    `model`: a name, or what `sim.cost.model.load_model` made of one.
    `kernels`: `attention` (of mixed steps: a mode of `sim.cost.attention`), `launch` (graph or eager), `scale`
    (operator -> factor on its time).
    `power_cap_w`: watts of one GPU (`sim.cost.power`). SimctlError for unknown names and for what isn't modelled:
    pipeline and expert parallelism.
    """
    from dataclasses import replace

    from sim.cost.attention import AttentionMode
    from sim.cost.gpu import load_gpu
    from sim.cost.launching import Launching, layer_launches
    from sim.cost.model import load_model
    from sim.cost.parallel import shard, with_group
    from sim.cost.power import with_cap
    from sim.cost.profile import load_profile
    from sim.cost.profiled import ProfiledCost, checked_scale
    from sim.cost.quantised import with_weights

    _check_parallel(parallel or {})
    options = dict(kernels or {})
    _check_kernels(options)
    spec = load_model(model) if isinstance(model, str) else model
    tp = (parallel or {}).get("tp", 1)
    part = shard(spec, tp)
    loaded = with_weights(load_profile(profile, load_gpu(gpu)), part)
    loaded = replace(loaded, host=layer_launches(loaded.host, part))
    chosen = with_group(with_cap(loaded, power_cap_w), tp)
    launching = Launching(options.get("launch", "graph"), chosen.host)
    scale = checked_scale(options.get("scale"), spec, tp)
    attention = AttentionMode(options.get("attention", "serial"))
    return ProfiledCost(part, chosen, launching, scale, tp, spec.kv_bytes_per_token(), attention)


def _check_parallel(parallel: Mapping[str, int]) -> None:
    from sim.errors import SimctlError
    from sim.suggest import nearest

    for key, value in parallel.items():
        if key not in PARALLEL_KEYS:
            raise SimctlError(f"parallel: unknown key '{key}'.{nearest(key, PARALLEL_KEYS)}")
        if value != 1 and key != "tp":
            raise SimctlError(f"parallel.{key} = {value} is not modelled; use 1.")


def _check_kernels(kernels: Mapping[str, Any]) -> None:
    from sim.errors import SimctlError
    from sim.suggest import nearest

    for key in kernels:
        if key not in KERNEL_KEYS:
            raise SimctlError(f"kernels: unknown key '{key}'.{nearest(key, KERNEL_KEYS)}")

"""Pure cost model: from (launch shape, profile, model, parallelism) to seconds, activity, bytes and watts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost

KERNEL_KEYS = ("attention", "launch", "scale")
PARALLEL_KEYS = ("tp", "pp", "ep", "dp")


def load_cost(
    model: str,
    gpu: str,
    profile: str = "auto",
    parallel: Mapping[str, int] | None = None,
    kernels: Mapping[str, Any] | None = None,
) -> ProfiledCost:
    """The cost model of a model on a GPU under a profile.

    `kernels`: `attention` (serial), `launch` (graph or eager), `scale` (operator -> factor on its time).
    SimctlError for unknown names and for what isn't modelled: tensor, pipeline and expert parallelism.
    """
    from sim.cost.gpu import load_gpu
    from sim.cost.launching import Launching
    from sim.cost.model import load_model
    from sim.cost.profile import load_profile
    from sim.cost.profiled import ProfiledCost, checked_scale

    _check_parallel(parallel or {})
    options = dict(kernels or {})
    _check_kernels(options)
    spec = load_model(model)
    chosen = load_profile(profile, load_gpu(gpu))
    launching = Launching(options.get("launch", "graph"), chosen.host)
    return ProfiledCost(spec, chosen, launching, checked_scale(options.get("scale"), spec))


def _check_parallel(parallel: Mapping[str, int]) -> None:
    from sim.errors import SimctlError
    from sim.suggest import nearest

    for key, value in parallel.items():
        if key not in PARALLEL_KEYS:
            raise SimctlError(f"parallel: unknown key '{key}'.{nearest(key, PARALLEL_KEYS)}")
        if value != 1:
            raise SimctlError(f"parallel.{key} = {value} is not modelled: a replica is one GPU, so use 1.")


def _check_kernels(kernels: Mapping[str, Any]) -> None:
    from sim.errors import SimctlError
    from sim.suggest import nearest

    for key in kernels:
        if key not in KERNEL_KEYS:
            raise SimctlError(f"kernels: unknown key '{key}'.{nearest(key, KERNEL_KEYS)}")
    attention = kernels.get("attention", "serial")
    if attention != "serial":
        raise SimctlError(f"kernels.attention '{attention}' is not priced; use serial.")

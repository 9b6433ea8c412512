"""The GPUs of an experiment: cost models of its replicas and pools, and the link between these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sim.config.schema import Experiment
from sim.config.schema import Pool as PoolSpec
from sim.cost import load_cost
from sim.cost.gpu import load_gpu
from sim.cost.model import ModelSpec, load_model
from sim.cost.profiled import ProfiledCost
from sim.engine.link import DEFAULT_LATENCY_S, Link, default_link, default_rate
from sim.engine.pools import Pool, count_gpus, pools_of


def model_of(e: Experiment) -> ModelSpec:
    """The experiment's model, quantised and with the skew of its routing."""
    entry = e.model_entry()
    return load_model(entry.name, entry.quantization, entry.routing_skew)


@lru_cache(maxsize=4)
def _cost(
    model: ModelSpec,
    gpu: str,
    profile: str,
    kernels: tuple[tuple[str, Any], ...],
    tp: int,
    power_cap_w: float | None,
) -> ProfiledCost:
    made = {key: dict(value) if isinstance(value, tuple) else value for key, value in kernels}
    return load_cost(model, gpu, profile, {"tp": tp}, made, power_cap_w)


def cost_of(e: Experiment, pool: PoolSpec | None = None) -> ProfiledCost:
    """Prices on the experiment's own GPU, or on a pool's; loaded once per process.

    A pool takes from the experiment what it does not say; the experiment's profile only for the same GPU.
    """
    pool = pool or PoolSpec()
    gpu = pool.gpu or e.gpu
    profile = pool.profile or (e.profile if gpu == e.gpu else "auto")
    kernels = e.kernels.model_dump()
    kernels["scale"] = tuple(kernels["scale"].items())
    cap = e.power_cap_w if pool.power_cap_w is None else pool.power_cap_w
    if e.power_cap_w is not None and pool.power_cap_w == load_gpu(gpu).tdp_w:
        cap = None  # lifts the experiment's
    return _cost(model_of(e), gpu, profile, tuple(kernels.items()), pool.tp or e.parallel.tp, cap)


def has_pools(policy: Any) -> bool:
    """Does the policy split prefill from decode?"""
    return bool(getattr(policy, "pools", ()))


def pools_for(e: Experiment, policy: Any) -> list[Pool] | None:
    """The pools that a policy runs on; None if it has none. Without `pools:` one replica each."""
    if not has_pools(policy):
        return None
    if e.pools is None:
        return [Pool("prefill", 1, cost_of(e)), Pool("decode", 1, cost_of(e))]
    named = {name: getattr(e.pools, name) for name in ("prefill", "decode", "mixed")}
    return [Pool(name, spec.count, cost_of(e, spec)) for name, spec in named.items() if spec is not None]


def link_for(e: Experiment, pools: Sequence[Pool] | None) -> Link | None:
    """The link between pools as the experiment wants it; with a rate or a latency of its own it is modelled, what it
    leaves open being the GPU table's, otherwise as measured or from the GPU table."""
    if pools is None or e.link is None:
        return None
    spec, by_name = e.link, {pool.name: pool.cost for pool in pools}
    ends, gpus = (by_name["prefill"], by_name["decode"]), count_gpus(pools)
    if spec.bandwidth_gb_s is None and spec.latency_us is None:
        return default_link(*ends, gpus, spec.kind, spec.sharing, spec.overlap)
    rate, source = default_rate(*ends, gpus, spec.kind)
    if spec.bandwidth_gb_s is not None:
        rate, source = spec.bandwidth_gb_s * 1e9, "the experiment"
    latency_s = DEFAULT_LATENCY_S if spec.latency_us is None else spec.latency_us / 1e6
    return Link(rate, latency_s, spec.sharing, spec.overlap, source)


def hardware(e: Experiment, policy: Any) -> list[Pool]:
    """What a policy runs on: its pools, or one nameless pool of all replicas. Raises SimctlError if that cannot be."""
    pools, _ = pools_of(policy, cost_of(e), e.replicas, pools_for(e, policy), None)
    return pools


def num_gpus(e: Experiment, policy: Any) -> int:
    """GPUs that a policy runs on."""
    return count_gpus(hardware(e, policy))

"""From an experiment to its runs: everything is checked here, before anything is simulated or written."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sim.config.load import load_experiment, parse_experiment
from sim.config.resolve import content_hash, plain, resolve
from sim.config.schema import Experiment, SloTargets
from sim.config.source import Source
from sim.cost.profiled import ProfiledCost
from sim.engine.building import check_settings
from sim.engine.deploying import deploy, is_compiled, largest_step, plan_pool
from sim.engine.deployment import Deployment, Target
from sim.engine.pools import Pool
from sim.engine.routers import check_router
from sim.errors import SimctlError
from sim.metrics import Slo
from sim.policies import make_policy
from sim.study.hardware import cost_of, hardware, has_pools, num_gpus
from sim.workload.build import build_workload
from sim.workload.workload import Workload

MIXES = "leaves the attention of mixed steps to it, as vllm, sarathi and duetserve do"
VERSIONED = ("lanesim", "numpy", "pandas", "pyarrow", "simpy")


@dataclass(frozen=True)
class Run:
    """One simulation of a study. `policy` is an entry of the experiment file or a policy object.

    `request_rate` is what is offered to all its GPUs; `rate_per_gpu` is set where the sweep counts per GPU.
    """

    index: int
    policy: Any
    label: str
    request_rate: float | None
    replicate: int
    seed: int
    rate_per_gpu: float | None = None


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share; small enough to be sent to every worker."""

    experiment: Experiment
    base_dirs: tuple[Path, ...]

    def cost(self) -> ProfiledCost:
        """The cost model of the experiment's own GPU, loaded once per process."""
        return cost_of(self.experiment)

    def workload(self, request_rate: float | None, seed: int) -> Workload:
        """The workload at a rate; the latest ones are kept, since policies share them."""
        return _workload(self, request_rate, seed)

    def policy(self, entry: str | Mapping[str, Any]) -> Any:
        """The policy of an entry; `module:Class` may stand in the experiment's folder or the working one."""
        return make_policy(entry, self.base_dirs)

    def slo(self) -> Slo:
        """Limits as the metrics take them."""
        spec = self.experiment.slo
        classes = {k: Slo(**c.model_dump(exclude={"priority"})) for k, c in (spec.classes or {}).items()}
        return Slo(**spec.model_dump(exclude={"classes"}), classes=classes)

    def num_gpus(self, policy: Any) -> int:
        """GPUs that the policy runs on, of all its replicas or pools."""
        return num_gpus(self.experiment, policy)

    def targets(self, slo_classes: Sequence[str]) -> tuple[Target, ...]:
        """What each class asks, as policies see it; a class without limits of its own has the common ones."""
        spec = self.experiment.slo
        return tuple(target_of((spec.classes or {}).get(name, spec)) for name in slo_classes)

    def __hash__(self) -> int:
        return hash(self.base_dirs)


@dataclass(frozen=True)
class Study:
    """A checked experiment, ready to run. `resolved` is what `experiment.yaml` of the results will hold."""

    setting: Setting
    runs: tuple[Run, ...]
    resolved: dict[str, Any]
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Identity of inputs and program: results of equal studies are equal byte for byte."""
        return content_hash(self.resolved)


def target_of(limits: SloTargets) -> Target:
    """Limits in seconds, infinite where there are none."""

    def seconds(value_ms: float | None) -> float:
        return math.inf if value_ms is None else value_ms / 1e3

    return Target(
        ttft_s=seconds(limits.ttft_ms),
        ttft_per_token_s=seconds(limits.ttft_ms_per_token),
        tpot_s=seconds(limits.tpot_ms),
        itl_s=seconds(limits.itl_ms),
        e2el_s=seconds(limits.e2el_ms),
        priority=getattr(limits, "priority", 0),
    )


@lru_cache(maxsize=2)
def _workload(setting: Setting, request_rate: float | None, seed: int) -> Workload:
    e = setting.experiment
    classes = None if e.slo.classes is None else {k: c.model_dump() for k, c in e.slo.classes.items()}
    return build_workload(
        e.workload.model_dump(exclude_none=True),
        seed=seed,
        request_rate=request_rate,
        context_limit=setting.cost().model.max_context,
        base_dirs=setting.base_dirs,
        slo_classes=classes,
    )


def prepare(
    experiment: Mapping[str, Any] | Path | str,
    *,
    overrides: Sequence[tuple[str, str]] = (),
    settings: Mapping[str, Any] | None = None,
    extra: Sequence[Any] = (),
) -> Study:
    """Load, check and expand an experiment: a file, or a mapping as in a notebook.

    `overrides` are options as `load_experiment` takes them, `settings` values by dotted key. `extra` policies,
    entries or objects with `plan(view)`, come after the experiment's own. Raises SimctlError for anything
    that could not run: unknown names, knobs, traces, a model that does not fit, keys without effect.
    """
    overrides = [
        *overrides,
        *(("overrides", f"{key}={json.dumps(value)}") for key, value in (settings or {}).items()),
    ]
    if isinstance(experiment, Mapping):
        loaded, source = parse_experiment(_copy(experiment), overrides)
    else:
        loaded, source = load_experiment(experiment, overrides)
    bases = tuple(dict.fromkeys([source.folder or Path.cwd(), Path.cwd()]))
    setting = Setting(loaded, bases)
    entries = [*(entry.plain() for entry in loaded.policies), *extra]
    made = [_policy(entry, setting, source, index) for index, entry in enumerate(entries)]
    labels = [label for _, label in made]
    if len(set(labels)) < len(labels):
        raise SimctlError(f"two policies are called '{next(x for x in labels if labels.count(x) > 1)}'")
    with _at(
        source,
        "model",
        "model.quantization",
        "model.routing_skew",
        "gpu",
        "profile",
        "kernels.scale",
        "parallel.tp",
        "power_cap_w",
    ):
        cost = setting.cost()
    _check_effects(setting, [policy for policy, _ in made], source)
    gpus = [setting.num_gpus(policy) for policy, _ in made]
    runs = expand(loaded, [(e, label) for e, (_, label) in zip(entries, made, strict=True)], gpus)
    with _at(source, "workload.trace", "workload.window_s", "workload.slo_class", "workload"):
        workload = setting.workload(runs[0].request_rate, runs[0].seed)
    plain_form = {
        **plain(loaded),
        "policies": [_written(e, label) for e, label in zip(entries, labels, strict=True)],
    }
    resolved = resolve(
        plain_form,
        versions={**{name: version(name) for name in VERSIONED}, "python": platform.python_version()},
        profile_sha256=_profile_hash(setting, [policy for policy, _ in made]),
        trace_sha256=workload.sha256,
    )
    profile = {"name": cost.profile.name, "gpu": cost.gpu.name, "sha256": cost.profile_hash}
    return Study(setting, tuple(runs), resolved, {**profile, "provenance": cost.provenance()})


def expand(experiment: Experiment, policies: Sequence[tuple[Any, str]], num_gpus: Sequence[int]) -> list[Run]:
    """Runs in the order policy, rate, replicate. Replicate k has seed + k under every policy and rate, so that
    policies and rates are compared on the same draws. `num_gpus`: of each policy, for rates per GPU."""
    per_gpu = experiment.sweep is not None and experiment.sweep.per_gpu
    runs: list[Run] = []
    for (entry, label), gpus in zip(policies, num_gpus, strict=True):
        for rate in experiment.rates():
            offered = rate * gpus if per_gpu and rate is not None else rate
            for k in range(experiment.num_runs):
                seed = experiment.seed + k
                runs.append(Run(len(runs), entry, label, offered, k, seed, rate if per_gpu else None))
    return runs


def _profile_hash(setting: Setting, policies: Sequence[Any]) -> str:
    """Of the prices on the experiment's GPU, and of all others that pools have."""
    own = setting.cost().profile_hash
    others = {p.cost.profile_hash for policy in policies for p in hardware(setting.experiment, policy)} - {
        own
    }
    return content_hash([own, *sorted(others)]) if others else own


def memory_plans(study: Study) -> list[dict[str, Any]]:
    """Per policy and pool, the bytes behind its KV blocks: budget, weights, activations, runtime, graphs, KV."""
    setting, rows = study.setting, []
    memory = setting.experiment.memory
    for run in {run.label: run for run in reversed(study.runs)}.values():
        policy = setting.policy(run.policy) if isinstance(run.policy, str | Mapping) else run.policy
        for pool in reversed(hardware(setting.experiment, policy)):
            deployment = _deploy(setting, policy, pool)
            tokens, seqs = largest_step(policy, deployment)
            plan = plan_pool(
                policy, pool.cost, deployment, memory.gpu_memory_utilization, memory.num_gpu_blocks
            )
            name = f"{run.label} ({pool.name})" if pool.name else run.label
            rows.append({"policy": name, "max_tokens": tokens, "max_seqs": seqs, "plan": plan})
    return rows[::-1]


def _deploy(setting: Setting, policy: Any, pool: Pool) -> Deployment:
    memory = setting.experiment.memory
    return deploy(
        policy,
        pool.cost,
        gpu_memory_utilization=memory.gpu_memory_utilization,
        num_gpu_blocks=memory.num_gpu_blocks,
        block_size=memory.block_size,
        mechanism=setting.experiment.mechanism,
        targets=setting.targets(tuple(setting.experiment.slo.classes or ("default",))),
        pool=pool.name,
    )


@contextmanager
def _at(source: Source, *keys: str) -> Iterator[None]:
    """Say where in the experiment the key stands that a fault names first: `workload.trace: …`, `Unknown GPU …`."""
    try:
        yield
    except SimctlError as error:
        words = str(error).lower().removeprefix("unknown ").split()
        named = next((key for key in keys if words[0].strip(":") in (key, key.rpartition(".")[2])), None)
        if named is None:
            raise
        raise SimctlError(f"{source.where(tuple(named.split('.')))}: {error}") from None


def _policy(entry: Any, setting: Setting, source: Source, index: int) -> tuple[Any, str]:
    """(policy, label) of an entry or object; faults are told with their line."""
    if isinstance(entry, str | Mapping):
        try:
            policy = setting.policy(entry)
        except SimctlError as error:
            raise SimctlError(f"{source.where(('policies', index))}: {error}") from None
        title = entry if isinstance(entry, str) else str(entry.get("label") or entry["name"])
        return policy, title
    if not callable(getattr(entry, "plan", None)) and not hasattr(entry, "advance"):
        raise SimctlError(
            f"policy {entry!r} is neither a name, a mapping nor an object with a method plan(view)"
        )
    return entry, str(getattr(entry, "label", None) or type(entry).__name__)


def _written(entry: Any, label: str) -> str | dict[str, Any]:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        return dict(entry)
    kind = type(entry)
    return {"name": f"{kind.__module__}:{kind.__qualname__}", "label": label}


def _shares_sms(policy: Any) -> bool:
    return bool(getattr(policy, "lanes", 1) > 1)


def _predicts(policy: Any) -> bool:
    """Policies say so; what plain Python does with its view cannot be known."""
    return bool(getattr(policy, "heeds_estimator", True))


def _mixed_attention(policy: Any, deployment: Deployment) -> str | None:
    """How attention of its steps with chunks and decodes runs: a mode of its own, "" as `kernels.attention` has it;
    None without such steps. What plain Python plans cannot be known."""
    if not getattr(policy, "mixes", True):
        return None
    own = policy.attention(deployment) if is_compiled(policy) else None
    return "" if own is None else str(own.mode)


def _ranks(policy: Any) -> bool:
    return getattr(policy, "wait_order", "fcfs") == "priority" or not is_compiled(policy)


def _is_whole(policy: Any) -> bool:
    return not has_pools(policy)


def _check_effects(setting: Setting, policies: Sequence[Any], source: Source) -> None:
    """Refuse what does not fit or would have no effect on any of the policies."""
    e = setting.experiment
    try:
        check_router(e.router)
    except SimctlError as error:
        raise SimctlError(f"{source.where(('router',))}: {error}") from None
    for name in ("prefill", "decode", "mixed"):
        with _at(source, *(f"pools.{name}.{key}" for key in ("gpu", "profile", "tp", "power_cap_w"))):
            cost_of(e, getattr(e.pools, name, None))
    ranked = [name for name, c in (e.slo.classes or {}).items() if c.priority]
    deployed = {id(p): _deployed(p, setting, source, index) for index, p in enumerate(policies)}
    mode, fused = e.kernels.attention, any(name == "fused_attention" for name in e.kernels.scale)

    def takes_mode(policy: Any) -> bool:
        return _mixed_attention(policy, deployed[id(policy)]) == ""

    def fuses(policy: Any) -> bool:
        own = _mixed_attention(policy, deployed[id(policy)])
        return own is not None and (own or mode) != "serial"

    for key, asked, heeds, who in (
        (("mechanism",), e.mechanism != "green", _shares_sms, "shares the SMs"),
        (("contention",), not e.contention, _shares_sms, "shares the SMs"),
        (("estimator",), e.estimator != "analytic", _predicts, "predicts anything"),
        (("kernels", "attention"), mode != "serial", takes_mode, MIXES),
        (("kernels", "scale", "fused_attention"), fused, fuses, "runs attention in one kernel"),
        (("slo", "classes", *ranked[:1], "priority"), ranked, _ranks, "orders requests by priority"),
        (("pools",), e.pools is not None, has_pools, "splits prefill from decode"),
        (("link",), e.link is not None, has_pools, "splits prefill from decode"),
        (("replicas",), e.replicas > 1, _is_whole, "does all on one replica; say `pools`"),
        (("router",), e.router != "round-robin", _is_whole, "does all on one replica"),
    ):
        if asked and not any(map(heeds, policies)):
            name = ".".join(key)
            raise SimctlError(
                f"{source.where(key)}: `{name}` has no effect, since none of the policies {who}"
            )


def _deployed(policy: Any, setting: Setting, source: Source, index: int) -> Deployment:
    """What a policy gets on the last of its pools; faults of its settings on any of them are told with its line."""
    try:
        for pool in hardware(setting.experiment, policy):
            deployment = _deploy(setting, policy, pool)
            check_settings(policy, deployment)
    except SimctlError as error:
        if not str(error).startswith("policy "):  # the model does not fit: no matter of the policy's line
            raise
        raise SimctlError(f"{source.where(('policies', index))}: {error}") from None
    return deployment


def _copy(value: Any) -> Any:
    """Nested mappings and lists as new dicts and lists: overrides must not reach the caller's data."""
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value

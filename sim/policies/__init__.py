"""Serving policies by name. A new built-in is one file here and one line in BUILT_IN; a preset one in PRESETS."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sim.errors import SimctlError
from sim.policies.base import CompiledPolicy, Knob, Policy, PolicyInfo
from sim.suggest import nearest

BUILT_IN = {
    "static-batch": "sim.policies.static_batch:StaticBatchPolicy",
    "vllm-v0": "sim.policies.vllm_v0:VllmV0Policy",
    "vllm": "sim.policies.vllm:VllmPolicy",
    "sarathi": "sim.policies.sarathi:SarathiPolicy",
    "sglang": "sim.policies.sglang:SglangPolicy",
    "streams": "sim.policies.streams:StreamsPolicy",
    "static-split": "sim.policies.static_split:StaticSplitPolicy",
    "muxwise": "sim.policies.muxwise:MuxWisePolicy",
    "pdmux": "sim.policies.pdmux:PdMuxPolicy",
    "bullet": "sim.policies.bullet:BulletPolicy",
    "nexus": "sim.policies.nexus:NexusPolicy",
    "duetserve": "sim.policies.duetserve:DuetServePolicy",
    "semi-pd": "sim.policies.semi_pd:SemiPdPolicy",
    "distserve": "sim.policies.distserve:DistServePolicy",
    "splitwise": "sim.policies.splitwise:SplitwisePolicy",
    "pod": "sim.policies.pod:PodPolicy",
    "resource-aware": "sim.policies.resource_aware:ResourceAwarePolicy",
    "slo-admission": "sim.policies.slo_admission:SloAdmission",
}
# preset -> (policy, its knobs); sources in the policies' own knobs and in the papers named
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm-a100": ("vllm", {"max_num_batched_tokens": 2048, "max_num_seqs": 256}),
    "vllm-h100": ("vllm", {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}),
    "sarathi-512": ("sarathi", {"token_budget": 512}),
    "sarathi-2048": ("sarathi", {"token_budget": 2048}),
    "sglang-1024": ("sglang", {"chunked_prefill_size": 1024}),
    "sglang-2048": ("sglang", {"chunked_prefill_size": 2048}),
    "semi-pd-oss": ("semi-pd", {"dynamic": False, "prefill_pct": 80, "decode_pct": 100}),
    "fixed-50-50": ("static-split", {"prefill_share": 0.5}),
    "bullet-oss": (
        "bullet",
        {
            **{"partition": False, "scheduler": False, "online_alpha": False, "layer_step": 0},
            **{"max_prefill_tokens": 1664, "decode_stream": "high"},
        },
    ),
}

__all__ = [
    "CompiledPolicy",
    "Knob",
    "Policy",
    "PolicyInfo",
    "list_policies",
    "make_policy",
]


def _load(target: str, wanted: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
        raise SimctlError(f"policy '{wanted}' cannot be loaded from '{target}': {error}") from error


def make_policy(entry: str | Mapping[str, Any], folders: Sequence[Path] = ()) -> Any:
    """A policy from a name, a preset, `module:Class`, an entry point of `simctl.policies`, or a mapping with
    `name`, optional `label` and knobs. A module that is not installed is looked for in `folders`: those of the
    experiment. Raises SimctlError for unknown names, knobs and broken plug-ins."""
    with _also_from(folders):
        return _made(entry)


@contextmanager
def _also_from(folders: Sequence[Path]) -> Iterator[None]:
    """Let imports find modules in these folders, too, after all others."""
    added = [path for path in map(str, folders) if path not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


def _made(entry: str | Mapping[str, Any]) -> Any:
    settings = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name = settings.pop("name", None)
    label = settings.pop("label", None)
    if not isinstance(name, str):
        raise SimctlError("a policy entry needs a `name`, like {name: sarathi, token_budget: 512}")
    base, preset = PRESETS.get(name, (name, {}))
    if base in BUILT_IN:
        made = _load(BUILT_IN[base], name)(label=label or name, **{**preset, **settings})
        return made
    plugins = {point.name: point for point in entry_points(group="simctl.policies")}
    if name in plugins:
        cls = _load(plugins[name].value, name)
    elif ":" in name:
        cls = _load(name, name)
    else:
        known = [*BUILT_IN, *PRESETS, *plugins]
        raise SimctlError(f"unknown policy '{name}'.{nearest(name, known) or ' Known: ' + ', '.join(known)}")
    try:
        policy = cls(**settings)
    except TypeError as error:
        raise SimctlError(f"policy '{name}' does not take these settings: {error}") from error
    if not callable(getattr(policy, "plan", None)):
        raise SimctlError(f"policy '{name}' has no method plan(view)")
    policy.label = label or name.rpartition(":")[2]
    return policy


def list_policies() -> list[PolicyInfo]:
    """Built-in policies and presets, with sources and knobs."""
    infos = []
    for name, target in BUILT_IN.items():
        cls = _load(target, name)
        infos.append(PolicyInfo(name, "", cls.source, cls.mirrors, dict(cls.knobs)))
    for name, (base, knobs) in PRESETS.items():
        cls = _load(BUILT_IN[base], name)
        changed = {key: Knob(value, cls.knobs[key].doc, f"preset {name}") for key, value in knobs.items()}
        infos.append(PolicyInfo(name, base, cls.source, cls.mirrors, {**cls.knobs, **changed}))
    return infos

"""What a policy gets to work with on a GPU: the largest step that it may ask for, and the KV blocks beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.cost.attention_facts import attention_facts
from sim.cost.base import CostModel
from sim.cost.memory import MemoryPlan
from sim.engine.deployment import MECHANISMS, Deployment, Target
from sim.errors import SimctlError
from sim.suggest import nearest

DEFAULT_BLOCK_SIZE = 16


def is_compiled(policy: Any) -> bool:
    """Built-in policies bring their own loop, `advance`; others have `plan(view)`."""
    return callable(getattr(policy, "advance", None))


def largest_step(policy: Any, deployment: Deployment) -> tuple[int, int]:
    """Most tokens and most sequences of one step of the policy."""
    if is_compiled(policy):
        seqs, tokens = policy.max_seqs(deployment), policy.max_tokens(deployment)
    else:
        seqs = int(getattr(policy, "max_num_seqs", 256))
        tokens = int(getattr(policy, "max_num_batched_tokens", 8192))
    return max(tokens, seqs), seqs


def deploy(
    policy: Any,
    cost: CostModel,
    *,
    gpu_memory_utilization: float | None = None,
    num_gpu_blocks: int | None = None,
    block_size: int | None = None,
    mechanism: str = "green",
    targets: tuple[Target, ...] = (Target(),),
    pool: str = "",
) -> Deployment:
    """The replica that a policy gets: its block size, and the KV blocks that fit beside its largest step."""
    knobs: dict[str, Any] = {
        "block_size": block_size or getattr(policy, "block_size", None) or DEFAULT_BLOCK_SIZE
    }
    if gpu_memory_utilization is not None:
        knobs["gpu_memory_utilization"] = gpu_memory_utilization
    if mechanism not in MECHANISMS:
        raise SimctlError(f"unknown mechanism '{mechanism}'.{nearest(mechanism, MECHANISMS)}")
    first = Deployment(
        cost.memory(**knobs).num_blocks,
        knobs["block_size"],
        cost.model.max_context,
        cost.gpu.name,
        cost.gpu.sms,
        cost.model.layers,
        MECHANISMS[mechanism],
        float(cost.gpu.compute_capability),
        targets,
        pool,
        cost.tp,
        knobs["block_size"] * cost.model.kv_bytes_per_token(),
        attention_facts(cost.model, cost.gpu),
    )
    plan = plan_pool(policy, cost, first, gpu_memory_utilization, num_gpu_blocks)
    return replace(first, num_blocks=plan.num_blocks)


def plan_pool(
    policy: Any,
    cost: CostModel,
    deployment: Deployment,
    gpu_memory_utilization: float | None = None,
    num_gpu_blocks: int | None = None,
) -> MemoryPlan:
    """What a GPU's memory holds under the policy: its largest step, the graphs that it captures, and KV blocks."""
    tokens, seqs = largest_step(policy, deployment)
    knobs: dict[str, Any] = {"block_size": deployment.block_size, "num_gpu_blocks": num_gpu_blocks}
    if gpu_memory_utilization is not None:
        knobs["gpu_memory_utilization"] = gpu_memory_utilization
    share = float(getattr(policy, "graph_share", 0.0))
    if share > 0:
        knobs["graph_share"] = share
    # a sampler's peak is profiled at no more than 1024 sequences (vllm:vllm/config/scheduler.py)
    return cost.memory(**knobs, max_tokens=tokens, max_seqs=min(seqs, 1024))

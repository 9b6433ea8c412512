"""What fits into a GPU's memory: weights, a reserve for activations and the runtime, and KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.gpu import GpuSpec
from sim.cost.model import ModelSpec
from sim.errors import SimctlError
from sim.units import GIB

# CUDA context, libraries, allocator slack and captured graphs: about what vLLM's start-up log shows for one GPU
RUNTIME_BYTES = 1 * GIB
# bytes per logit that a sampler holds at once: 16-bit logits, their 32-bit copy and the probabilities
SAMPLER_BYTES_PER_LOGIT = 10


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU by use. `budget_bytes` = gpu_memory_utilization x HBM, as vLLM counts it."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    runtime_bytes: int
    graph_bytes: int
    kv_bytes: int
    block_size: int
    num_blocks: int

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_blocks * self.block_size


def activation_bytes(model: ModelSpec, max_tokens: int, max_seqs: int) -> int:
    """Peak activations of a pass of `max_tokens`: residual, norm, FFN in and out, and the sampler's logits.

    A mixture has a row of each for every expert that a token takes.
    """
    inner = model.ffn_in_width + model.ffn
    if model.experts:
        inner = model.experts_per_token * (inner + 2 * model.hidden) + 3 * model.shared_ffn + model.experts
    widest = inner + 4 * model.hidden
    return max_tokens * widest * model.dtype_bytes + max_seqs * model.vocab * SAMPLER_BYTES_PER_LOGIT


def plan_memory(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    num_gpu_blocks: int | None = None,
    max_tokens: int = 8192,
    max_seqs: int = 256,
    gpus: int = 1,
    graph_share: float = 0.0,
) -> MemoryPlan:
    """KV blocks that fit beside weights and reserve; `num_gpu_blocks` overrides the count (vLLM's override).

    `max_tokens` and `max_seqs` size the largest pass; `model` is the shard of one of `gpus`; `graph_share`: of the
    budget, for graphs that are captured more than once. SimctlError shows the arithmetic when weights and reserve leave
    no room for a block.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise SimctlError(
            f"memory.gpu_memory_utilization must be above 0 and at most 1, not {gpu_memory_utilization}."
        )
    if block_size < 1:
        raise SimctlError(f"memory.block_size must be at least 1 token, not {block_size}.")
    if num_gpu_blocks is not None and num_gpu_blocks < 1:
        raise SimctlError(f"memory.num_gpu_blocks must be at least 1, not {num_gpu_blocks}.")
    where = gpu.name if gpus == 1 else f"{gpus} x {gpu.name} (each holds a shard)"
    budget = int(gpu.hbm_bytes * gpu_memory_utilization)
    weights, activations = model.weight_bytes(), activation_bytes(model, max_tokens, max_seqs)
    graphs = int(graph_share * budget)
    room = budget - weights - activations - RUNTIME_BYTES - graphs
    block_bytes = block_size * model.kv_bytes_per_token()
    if room < block_bytes:
        spare = room + weights + activations - block_bytes
        raise SimctlError(
            f"{model.name} does not fit on {where}: {_gib(gpu.hbm_bytes)} GiB x {gpu_memory_utilization:g} = "
            f"{_gib(budget)} GiB, less {_gib(weights)} GiB of weights, {_gib(activations)} GiB of activations "
            f"({max_tokens} tokens, {max_seqs} sequences) and {_gib(RUNTIME_BYTES)} GiB of runtime"
            f"{f' and {_gib(graphs)} GiB of graphs' if graphs else ''}, leaves "
            f"{_gib(room)} GiB for KV blocks of {block_bytes / 2**20:.2f} MiB."
            f"{_way_out(spare, weights, activations, gpus, gpu_memory_utilization)}"
        )
    blocks = room // block_bytes
    if num_gpu_blocks is not None:
        if num_gpu_blocks * block_bytes > gpu.hbm_bytes - weights:
            raise SimctlError(
                f"memory.num_gpu_blocks = {num_gpu_blocks} does not fit: {num_gpu_blocks} x {block_bytes / 2**20:.2f} "
                f"MiB + {_gib(weights)} GiB of weights exceed the {_gib(gpu.hbm_bytes)} GiB of {gpu.name}."
            )
        blocks = num_gpu_blocks
    return MemoryPlan(
        budget_bytes=budget,
        weight_bytes=weights,
        activation_bytes=activations,
        runtime_bytes=RUNTIME_BYTES,
        graph_bytes=graphs,
        kv_bytes=blocks * block_bytes,
        block_size=block_size,
        num_blocks=blocks,
    )


def _way_out(room: int, weights: int, activations: int, gpus: int, utilization: float) -> str:
    """What would make weights and activations fit: fewer tokens where these are too many, else more GPUs or memory.

    `room`: bytes for both. Activations are taken as those of one GPU however many there are: on the safe side.
    """
    ways = ["a smaller step of the policy"] if weights < room else []
    for more in (2, 4, 8):
        if room > 0 and weights / more + activations <= room:
            ways.append(f"parallel.tp: {gpus * more}")
            break
    ways.append("a larger GPU")
    if utilization < 0.9:
        ways.append("a higher memory.gpu_memory_utilization")
    return f" Give it {', or '.join(ways)}."


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"

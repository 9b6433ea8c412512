"""What policies with pools share: whole prompts in one step, blocks by role, and KV counted in tokens of both sides."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.engine.deployment import Deployment
from sim.policies.base import CompiledPolicy, Knob
from sim.workload.workload import Workload

LONGEST_PROMPT = Knob(
    16384,
    "longest prompt that is taken, since a prompt is computed in one step",
    "chosen here: the Azure traces stay below",
    minimum=1,
)


class PooledPolicy(CompiledPolicy):
    """Base of the policies whose replicas belong to pools; they have the knob `max_prompt_tokens`."""

    pools: ClassVar[tuple[str, ...]]

    @property
    def block_size(self) -> int:
        """Both artefacts' default."""
        return 16

    def longest_prompt(self, deployment: Deployment) -> int:
        """Most tokens of a prompt."""
        return min(int(self["max_prompt_tokens"]), deployment.max_context)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """A prefill replica holds the prompt only."""
        if deployment.pool != "prefill":
            return super().required_blocks(workload, deployment)
        return np.asarray(-(-workload.prompt_tokens.astype(np.int64) // deployment.block_size), np.int64)

    def refusals(self, workload: Workload, deployment: Deployment) -> dict[int, str]:
        """Prompts longer than a step may be."""
        most = self.longest_prompt(deployment)
        rows = np.flatnonzero(workload.prompt_tokens > most)
        return {int(i): f"a prompt of {workload.prompt_tokens[i]} tokens is longer than {most}" for i in rows}

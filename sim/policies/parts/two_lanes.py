"""What the two-lane policies share: admitting whole prompts, making room for a decode step, launching both lanes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.engine.cohort import blocks_now, decode_need, needs_block
from sim.engine.deployment import Deployment
from sim.engine.lanes import lane_idle
from sim.engine.layout import (
    BLOCK,
    COHORT,
    DECODE_LANE,
    FREE,
    IN_CHUNKS,
    LAYERS_DONE,
    MODEL_LAYERS,
    N_CHUNKS,
    N_READY,
    N_RUN,
    PREFILL,
    PREFILL_LANE,
    RUN_TAIL,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk, add_victim
from sim.engine.plans import clear_lanes as clear_lanes
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.workload.workload import Workload


@jit
def decodable(r: Any) -> int:
    """Requests that decode or can from the next step on."""
    return int(r.iv[COHORT] + r.iv[N_READY])


@jit
def layers_left(r: Any) -> int:
    """Layers that the open prefill batch has yet to run; all of them for a new one."""
    return int(r.iv[MODEL_LAYERS] - r.iv[LAYERS_DONE])


@jit
def make_room(q: Any, r: Any, a: Any) -> int:
    """Victims, youngest first, so that a decode step fits; returns the blocks left beside it."""
    free = r.iv[FREE] - decode_need(q, r)
    i = r.iv[RUN_TAIL]
    while free < 0 and i >= 0:
        if q.phase[i] != PREFILL:
            add_victim(a, i)
            # a block that it needed for the step is not needed any more either
            free += blocks_now(q, r, i) + needs_block(q, r, i)
        i = q.prev[i]
    return int(free)


@jit
def admit_prompts(q: Any, r: Any, a: Any, most_tokens: int, most_seqs: int, spare: int, free: int) -> None:
    """Plan whole prompts first come first served, up to `most_tokens`; one longer prompt runs alone.

    Of `free` blocks `spare` stay free.
    """
    tokens, running = 0, r.iv[N_RUN]
    i = r.iv[WAIT_HEAD]
    while i >= 0 and running < most_seqs:
        size = q.target[i]
        need = -(-size // r.iv[BLOCK])
        if tokens > 0 and tokens + size > most_tokens:
            break
        if free - need < spare:
            break
        add_chunk(a, i, size, size)
        free -= need
        tokens += size
        running += 1
        i = q.next[i]


@jit
def may_prefill(r: Any) -> bool:
    """Can the prefill lane take a launch now?"""
    return lane_idle(r, PREFILL_LANE)


@jit
def may_decode(r: Any) -> bool:
    """Can the decode lane take a launch now?"""
    return lane_idle(r, DECODE_LANE)


@jit
def has_prefill(r: Any, a: Any) -> bool:
    """Is a prefill batch open or planned?"""
    return bool(r.iv[IN_CHUNKS] > 0 or a.iv[N_CHUNKS] > 0)


class WholePrompts(CompiledPolicy):
    """Base of the two-lane policies that admit whole prompts, first come first served (`admit_prompts`)."""

    lanes = 2
    admission: ClassVar[dict[str, Knob]] = {
        "max_prefill_tokens": Knob(
            8192, "prompt tokens of a prefill batch", "choice; sglang's chunk", minimum=1
        ),
        "max_prompt_tokens": Knob(
            32768, "longest pass; longer requests are refused", "choice; keeps price tables small", minimum=1
        ),
        "max_num_seqs": Knob(256, "most running requests", "choice; vLLM's default", minimum=1),
        "watermark": Knob(
            0.01, "share of the blocks kept free at admission", "vLLM v0's watermark", minimum=0, maximum=1
        ),
    }

    def limits(self, deployment: Deployment) -> list[int]:
        """What `admit_prompts` takes: tokens of a batch, running requests, blocks kept free."""
        return [int(self["max_prefill_tokens"]), self.max_seqs(deployment), self._spare(deployment)]

    def _spare(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def max_tokens(self, deployment: Deployment) -> int:
        """A batch, or one prompt that is longer."""
        return max(int(self["max_prefill_tokens"]), self._longest(deployment))

    def _longest(self, deployment: Deployment) -> int:
        return min(int(self["max_prompt_tokens"]), deployment.max_context)

    def refusals(self, workload: Workload, deployment: Deployment) -> dict[int, str]:
        """Requests that cannot pass through at once: an evicted one computes its prompt and its output again."""
        most = self._longest(deployment)
        rows = np.flatnonzero(workload.prompt_tokens.astype(np.int64) + workload.output_tokens - 1 > most)
        return {
            int(
                i
            ): f"{workload.prompt_tokens[i]} + {workload.output_tokens[i]} tokens are more than one pass takes: "
            f"max_prompt_tokens is {most}"
            for i in rows
        }

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark comes on top at admission."""
        return super().required_blocks(workload, deployment) + self._spare(deployment)

"""Static batching: a batch is formed, its prompts run, and nobody joins before the last of it has finished.

The do-nothing baseline: request-level batching as FasterTransformer behind Triton does it, the system that Orca
(OSDI'22, section 2) compares itself with. KV is reserved for prompt and `max_new_tokens` at admission, so that nothing
is ever evicted. `continuous` is Orca's own iteration-level scheduling (section 4.2, Algorithm 1): whole prompts join
the running batch, in one pass with its decodes, as soon as a slot and its reservation are free. Left open there and
chosen here: prompts run in passes of at most `max_prefill_tokens`; a request is answered when it is finished, and
neither shorter prompts nor finished requests are padded, which flatters the baseline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import (
    BLOCK,
    DECODE_ALL,
    MANY,
    N_CHUNKS,
    N_RUN,
    REPEAT,
    RUN_HEAD,
    TOTAL,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk, clear_plan
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.workload.workload import Workload

BATCH, TOKENS, CONTINUOUS = 0, 1, 2
TO_START = 0  # policy_i: requests of the batch whose prompts have not run


@jit
def _reservation(q: Any, r: Any, i: int) -> int:
    """Blocks for everything that the request may compute; the last token's KV is never written."""
    return -(-(q.prompt[i] + q.max_new[i] - 1) // r.iv[BLOCK])


@jit
def _joiners(q: Any, r: Any, most: int) -> int:
    """How many of the queue's first requests find a slot and their whole reservation free."""
    running, free = r.iv[N_RUN], r.iv[TOTAL]
    if r.iv[WAIT_HEAD] < 0 or running >= most:
        return 0
    i = r.iv[RUN_HEAD]
    while i >= 0:
        free -= _reservation(q, r, i)
        i = q.next[i]
    count = 0
    i = r.iv[WAIT_HEAD]
    while i >= 0 and running + count < most:
        free -= _reservation(q, r, i)
        if free < 0:
            break
        count += 1
        i = q.next[i]
    return count


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """Prompts of the batch first; then decodes to its end."""
    clear_plan(a)
    state = r.policy_i
    if ki[CONTINUOUS] == 1 or (r.iv[N_RUN] == 0 and state[TO_START] == 0):
        state[TO_START] = _joiners(q, r, ki[BATCH])
    tokens = 0
    i = r.iv[WAIT_HEAD]
    while state[TO_START] > 0:
        size = q.target[i]
        if tokens > 0 and tokens + size > ki[TOKENS]:
            break
        add_chunk(a, i, size, size)
        tokens += size
        state[TO_START] -= 1
        i = q.next[i]
    if a.iv[N_CHUNKS] > 0:
        a.iv[DECODE_ALL] = ki[CONTINUOUS]
    else:
        a.iv[REPEAT] = MANY


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class StaticBatchPolicy(CompiledPolicy):
    """Request-level batching, or Orca's iteration-level one."""

    name = "static-batch"
    source = "Orca, OSDI'22, sections 2 and 4.2"
    mirrors = "FasterTransformer behind Triton; Orca with `continuous`"
    knobs = {  # noqa: RUF012
        "max_batch_size": Knob(32, "most requests of a batch", "choice", minimum=1),
        "max_prefill_tokens": Knob(
            16384, "prompt tokens of a pass; one longer prompt runs alone", "choice", minimum=1
        ),
        "continuous": Knob(
            False, "whole prompts join the running batch when a slot is free", "Orca, OSDI'22, Algorithm 1"
        ),
    }
    advance = advance

    def max_seqs(self, deployment: Deployment) -> int:
        """`max_batch_size`."""
        return int(self["max_batch_size"])

    def max_tokens(self, deployment: Deployment) -> int:
        """A pass of prompts, or one prompt that is longer, and the decodes aboard."""
        aboard = self.max_seqs(deployment) if self["continuous"] else 0
        return max(int(self["max_prefill_tokens"]), deployment.max_context) + aboard

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Batch, tokens of a pass, who may join."""
        return [self.max_seqs(deployment), int(self["max_prefill_tokens"]), int(self["continuous"])], []

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The whole reservation."""
        tokens = workload.prompt_tokens.astype(np.int64) + workload.max_new_tokens - 1
        return np.asarray(-(-tokens // deployment.block_size), np.int64)

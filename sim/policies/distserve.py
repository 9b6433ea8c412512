"""DistServe: prompts and tokens on separate GPUs, first come first served on both, KV pulled when there is room.

arXiv:2401.09670 section 4.3 and its artefact (LLMServe/DistServe 8024143: distserve/context_stage_scheduler.py,
decoding_stage_scheduler.py). A central controller sends a request to the prefill replica with the fewest queued or
running prompts and, when its first token is made, to the decode replica with the fewest requests. A prefill batch takes
whole prompts from the head of the queue up to a number of tokens; a longer prompt runs alone, as the paper has it. KV
stays on the prefill GPU until the decode replica pulls it: while the blocks of what it has pulled and not yet begun are
under a share of its pool. When a decode step lacks blocks, the last request of the batch is swapped to the host, and
the swapped come back first.

Chosen here: a decode step does not wait for pulls (the artefact's loop awaits each, the copy engines need not); when
the host's space is full a victim recomputes, in chunks of the prefill limit; a swapped request that does not fit while
nothing runs lets one whose KV is here pass, where the artefact would stand still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.cost.gpu import load_gpu
from sim.engine.cohort import blocks_now, decode_need, needs_block
from sim.engine.deployment import Deployment
from sim.engine.dispatch import Machine
from sim.engine.lane import begin
from sim.engine.layout import (
    BLOCK,
    COHORT,
    DECODE_ALL,
    FREE,
    MANY,
    N_CHUNKS,
    N_PARTIAL,
    N_PREEMPT,
    N_READY,
    ON_HOST,
    REPEAT,
    RUN_TAIL,
    SWAP,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk, add_victim
from sim.engine.pooled import add_join, blocks_of, clear_pooled, execute_pooled, has_kv
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.distserve_controller import Controller
from sim.policies.parts.pools import LONGEST_PROMPT, PooledPolicy
from sim.units import GIB

DECODES, TOKENS, SEQS, HOST_BLOCKS = 0, 1, 2, 3
COPY_S = 0
ARTEFACT = "DistServe:evaluation/2-benchmark-serving/2-start-api-server.py"


@jit
def _prefill(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Whole prompts in order, while they and what waits to be pulled fit."""
    a.iv[DECODE_ALL] = 0
    tokens, free = 0, r.iv[FREE]
    i = r.iv[WAIT_HEAD]
    while i >= 0 and a.iv[N_CHUNKS] < ki[SEQS]:
        need = blocks_of(r, q.target[i])
        if (tokens > 0 and tokens + q.target[i] > ki[TOKENS]) or need > free:
            break
        add_chunk(a, i, q.target[i], q.target[i])
        tokens += q.target[i]
        free -= need
        i = q.next[i]


@jit
def _make_room(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Evict from the end of the batch until a decode step has its blocks: to the host if that has room for all."""
    free, need, held = r.iv[FREE], decode_need(q, r), 0
    i = r.iv[RUN_TAIL]
    while need > free and i >= 0:
        add_victim(a, i)
        blocks = blocks_now(q, r, i)
        free += blocks
        held += blocks
        need -= needs_block(q, r, i)
        i = q.prev[i]
    a.iv[SWAP] = 1 if r.iv[ON_HOST] + held <= ki[HOST_BLOCKS] else 0


@jit
def _let_pass(q: Any, r: Any, a: Any) -> None:
    """Nothing runs and the head of the queue does not fit: the first one whose KV is on this GPU may go."""
    i = r.iv[WAIT_HEAD]
    while i >= 0 and q.blocks[i] == 0:
        i = q.next[i]
    if i >= 0:
        add_join(a, i)


@jit
def _fill(q: Any, r: Any, a: Any, ki: Any) -> None:
    """Take waiting requests into the batch in order; one that must recompute gets a step of its own."""
    running = r.iv[COHORT] + r.iv[N_READY]
    free = r.iv[FREE] - decode_need(q, r)
    i = r.iv[WAIT_HEAD]
    while i >= 0 and running < ki[SEQS]:
        need = blocks_of(r, q.target[i]) if q.blocks[i] == 0 else 0
        if has_kv(q, i) and q.computed[i] % r.iv[BLOCK] == 0:
            need += 1  # for its next token
        if need > free:
            if running == 0:
                _let_pass(q, r, a)
            return
        if not has_kv(q, i):
            a.iv[DECODE_ALL] = 0
            add_chunk(a, i, min(q.target[i], ki[TOKENS]), q.target[i])
            return
        add_join(a, i)
        running += 1
        free -= need
        i = q.next[i]


@jit
def _decode(q: Any, r: Any, a: Any, ki: Any) -> None:
    if r.iv[N_PARTIAL] > 0:
        i = r.partial[0]
        a.iv[DECODE_ALL] = 0
        add_chunk(a, i, min(q.target[i] - q.computed[i], ki[TOKENS]), q.target[i])
        return
    _make_room(q, r, a, ki)
    if a.iv[N_PREEMPT] == 0:
        _fill(q, r, a, ki)
        # what waits needs blocks or a place in the batch, and gets neither before a member finishes
        a.iv[REPEAT] = MANY
    elif a.iv[N_PREEMPT] == r.iv[COHORT] + r.iv[N_READY]:
        _let_pass(q, r, a)


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One scheduling step of a prefill or of a decode replica."""
    clear_pooled(a)
    if ki[DECODES] == 1:
        _decode(q, r, a, ki)
    else:
        _prefill(q, r, a, ki)


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute_pooled(q, r, a, p, kf[COPY_S], look_ahead):
            return


class DistServePolicy(PooledPolicy):
    """DistServe: disaggregated prefill and decode, KV pulled."""

    name = "distserve"
    source = "DistServe, arXiv:2401.09670 section 4.3"
    mirrors = "DistServe 8024143 (OSDI'24 artefact)"
    pools = ("prefill", "decode")
    advance = advance
    knobs = {  # noqa: RUF012
        "max_prefill_tokens": Knob(
            8192, "tokens of a prefill batch; a longer prompt runs alone", ARTEFACT, 1
        ),
        "max_prefill_seqs": Knob(128, "prompts of a prefill batch", ARTEFACT, 1),
        "max_decode_seqs": Knob(1024, "requests of a decode batch", ARTEFACT, 1),
        "max_prompt_tokens": LONGEST_PROMPT,
        "waiting_block_threshold": Knob(
            0.05,
            "share of a decode replica's blocks beyond which those pulled and not yet begun stop the pulling",
            "DistServe:distserve/config.py waiting_block_prop_threshold",
            minimum=0,
            maximum=1,
        ),
        "pressure": Knob(
            "swap",
            "what the last request does when decode blocks are short: swap or recompute",
            "DistServe:distserve/decoding_stage_scheduler.py",
            choices=("swap", "recompute"),
        ),
        "swap_space_gib": Knob(16.0, "memory of the host for swapped KV, a GPU", ARTEFACT, 0),
        "swap_gb_s": Knob(
            None, "rate of swapping in one direction; default PCIe's of the GPU table", "GPU table", 1
        ),
    }

    def max_seqs(self, deployment: Deployment) -> int:
        """Most prompts or decodes in a step."""
        return int(self["max_decode_seqs" if deployment.pool == "decode" else "max_prefill_seqs"])

    def max_tokens(self, deployment: Deployment) -> int:
        """A prefill batch, or the longest prompt alone."""
        if deployment.pool == "decode":
            return int(self["max_prefill_tokens"])
        return max(int(self["max_prefill_tokens"]), self.longest_prompt(deployment))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Role, limits of a batch, blocks on the host; seconds to copy a block."""
        rate = self["swap_gb_s"] or load_gpu(deployment.gpu).pcie_gb_s
        space = self["swap_space_gib"] * GIB if self["pressure"] == "swap" else 0
        return [
            int(deployment.pool == "decode"),
            int(self["max_prefill_tokens"]),
            self.max_seqs(deployment),
            int(space // deployment.block_bytes),
        ], [deployment.block_bytes / (rate * 1e9)]

    def dispatcher(self, machines: Sequence[Machine], q: Any, link: Any) -> Controller:
        """The central controller of a run."""
        return Controller(machines, q, self["waiting_block_threshold"], link.overlap == "layer")

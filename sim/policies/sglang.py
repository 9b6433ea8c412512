"""SGLang: prefill first. Whenever a prompt can be admitted it runs alone; decodes wait, unless `mixed_chunk`.

Mirrors sglang 0.4.6.post5 (srt/managers/scheduler.py get_next_batch_to_run, schedule_policy.py PrefillAdder,
schedule_batch.py retract_decode): one chunked request at a time, admission that reserves new tokens by an adaptive
ratio, a full flag that holds until a decode step has seen a request leave, retraction of those with the fewest
generated tokens. Where SGLang would abort for want of memory, a chunk is cut to what is free, and in the last
resort the chunked request is evicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.cohort import blocks_now, decode_need, generated_now, needs_block
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import (
    BLOCK,
    COHORT,
    DECODE_ALL,
    FINISHED_COUNT,
    FREE,
    GRAPH_LAUNCHES,
    GUARD,
    MANY,
    N_CHUNKS,
    N_PARTIAL,
    N_READY,
    N_RUN,
    NOW,
    PREFILL,
    REPEAT,
    RUN_HEAD,
    STEP_START,
    TO_BACK,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk, add_victim, clear_plan, is_victim
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.workload.workload import Workload

# ki and kf
CHUNK, MAX_PREFILL, SEQS, MIXED, CLIP = 0, 1, 2, 3, 4
RATIO_START, RATIO_LEAST, RATIO_DECAY, RETRACT_STEPS = 0, 1, 2, 3
# policy_i and policy_f
FULL, SEEN_FINISHED, LAST_WAS_PREFILL, LAST_HAD_CHUNKED, DECAY_FROM, FINISHED_BEFORE = 0, 1, 2, 3, 4, 5
RATIO_BASE, STARTED = 0, 1


@jit
def _ratio(r: Any, kf: Any) -> float:
    """new_token_ratio: falls with each decode step since it was last set."""
    if r.policy_f[STARTED] == 0.0:
        r.policy_f[STARTED] = 1.0
        r.policy_f[RATIO_BASE] = kf[RATIO_START]
        r.policy_i[DECAY_FROM] = r.iv[GRAPH_LAUNCHES]
    steps = r.iv[GRAPH_LAUNCHES] - r.policy_i[DECAY_FROM]
    ratio: float = r.policy_f[RATIO_BASE] - kf[RATIO_DECAY] * steps
    return max(ratio, kf[RATIO_LEAST])


@jit
def _set_ratio(r: Any, ratio: float) -> None:
    r.policy_f[RATIO_BASE] = ratio
    r.policy_i[DECAY_FROM] = r.iv[GRAPH_LAUNCHES]


@jit
def _reserved(q: Any, r: Any, clip: int, ratio: float) -> float:
    """New tokens that the running decodes are expected to take."""
    tokens = 0.0
    i = r.iv[RUN_HEAD]
    while i >= 0:
        if q.phase[i] != PREFILL:
            tokens += min(q.max_new[i] - generated_now(q, r, i), clip) * ratio
        i = q.next[i]
    return tokens


@jit
def _plan_prefill(q: Any, r: Any, a: Any, ki: Any, ratio: float) -> None:
    """get_new_batch_prefill: the chunked request, then the queue while memory and budgets last."""
    iv = r.iv
    decodes = iv[COHORT] + iv[N_READY]
    page, mixed, current = iv[BLOCK], 0, iv[FREE] * iv[BLOCK]
    if ki[MIXED] == 1:
        mixed = decodes
        current -= decode_need(q, r) * page
    total = current - _reserved(q, r, ki[CLIP], ratio)
    inputs, chunk = ki[MAX_PREFILL] - mixed, ki[CHUNK] - mixed
    if iv[N_PARTIAL] > 0:
        i = r.partial[0]
        left = q.target[i] - q.computed[i]
        tokens = min(left, chunk, current + q.blocks[i] * page - q.computed[i])
        if tokens <= 0:
            return
        add_chunk(a, i, tokens, q.computed[i] + tokens)
        paged = (-(-(q.computed[i] + tokens) // page) - q.blocks[i]) * page
        total -= paged + (min(q.max_new[i], ki[CLIP]) if tokens == left else 0)
        current -= paged
        inputs -= tokens
        chunk -= tokens
    i = iv[WAIT_HEAD]
    while i >= 0:
        if decodes + a.iv[N_CHUNKS] >= ki[SEQS]:
            r.policy_i[FULL] = 1
            return
        tokens = q.target[i]
        if tokens + min(q.max_new[i], ki[CLIP]) >= total:
            r.policy_i[FULL] = 1
            return
        whole = tokens <= chunk
        if (tokens > inputs and a.iv[N_CHUNKS] > 0) or (not whole and chunk < page):
            return
        tokens = tokens if whole else chunk // page * page
        add_chunk(a, i, tokens, tokens)
        paged = -(-tokens // page) * page
        total -= paged + (min(q.max_new[i], ki[CLIP]) if whole else 0)
        current -= paged
        inputs -= tokens
        chunk -= tokens
        if total <= 0 or current <= 0:
            r.policy_i[FULL] = 1
            return
        if inputs <= 0 or chunk <= 0 or not whole:
            return
        i = q.next[i]


@jit
def _worse(q: Any, r: Any, i: int, j: int) -> bool:
    """True if i is retracted before j: fewer generated tokens, then the longer prompt, then the later row."""
    gi, gj = generated_now(q, r, i), generated_now(q, r, j)
    if gi != gj:
        return bool(gi < gj)
    if q.prompt[i] != q.prompt[j]:
        return bool(q.prompt[i] > q.prompt[j])
    return i > j


@jit
def _retract(q: Any, r: Any, a: Any, kf: Any) -> None:
    """Evict until `retract_decode_steps` tokens, or a page, a remaining request are free; reset the ratio."""
    iv = r.iv
    left = iv[COHORT] + iv[N_READY]
    available = iv[FREE] * iv[BLOCK]
    each = max(kf[RETRACT_STEPS], float(iv[BLOCK]))
    first = True
    while left > 1 and (first or available < left * each):
        first = False
        worst = -1
        i = iv[RUN_HEAD]
        while i >= 0:
            if q.phase[i] != PREFILL and not is_victim(a, i) and (worst < 0 or _worse(q, r, i, worst)):
                worst = i
            i = q.next[i]
        add_victim(a, worst)
        available += blocks_now(q, r, worst) * iv[BLOCK]
        left -= 1
    made, asked, need = 0, 0, 0
    i = iv[RUN_HEAD]
    while i >= 0:
        if q.phase[i] != PREFILL and not is_victim(a, i):
            made += generated_now(q, r, i)
            asked += q.max_new[i]
            need += needs_block(q, r, i)
        i = q.next[i]
    if need * iv[BLOCK] > available and iv[N_PARTIAL] > 0:
        add_victim(a, r.partial[0])  # a last decode beside a chunked prompt that has taken everything
    _set_ratio(r, min(1.0, (made + kf[RETRACT_STEPS] * left) / asked))
    r.policy_i[DECAY_FROM] += 1  # this round's decode step does not lower it


@jit
def plan(q: Any, r: Any, a: Any, ki: Any, kf: Any) -> None:
    """One round of get_next_batch_to_run."""
    iv, pi = r.iv, r.policy_i
    clear_plan(a)
    a.iv[TO_BACK] = 1
    decodes = iv[COHORT] + iv[N_READY]
    if pi[LAST_WAS_PREFILL] == 1:
        at_prefill = iv[FINISHED_COUNT] - pi[FINISHED_BEFORE]
        if pi[LAST_HAD_CHUNKED] == 1 or at_prefill > 0:
            pi[FULL] = 0  # merging the last prefill batch shrank it
        pi[SEEN_FINISHED] += at_prefill
    if iv[N_RUN] == 0:
        if pi[FULL] == 1 or r.fv[NOW] > r.fv[STEP_START]:
            _set_ratio(r, kf[RATIO_START])  # a round without a batch: the server counts as idle
        pi[FULL] = 0
    ratio = _ratio(r, kf)
    may_prefill = iv[N_PARTIAL] > 0 or (pi[FULL] == 0 and iv[WAIT_HEAD] >= 0)
    if may_prefill and decodes >= ki[SEQS]:
        pi[FULL] = 1
        may_prefill = False
    if may_prefill:
        _plan_prefill(q, r, a, ki, ratio)
    if a.iv[N_CHUNKS] > 0:
        a.iv[DECODE_ALL] = ki[MIXED]
        if ki[MIXED] == 1:
            # the running batch is filtered on its way into the mixed one
            pi[SEEN_FINISHED] = iv[FINISHED_COUNT]
        last = a.iv[N_CHUNKS] - 1
        pi[LAST_WAS_PREFILL] = 1
        pi[FINISHED_BEFORE] = iv[FINISHED_COUNT]
        i = a.chunk_id[last]
        pi[LAST_HAD_CHUNKED] = 1 if q.computed[i] + a.chunk_tokens[last] < q.target[i] else 0
        return
    pi[LAST_WAS_PREFILL] = 0
    left = iv[FINISHED_COUNT] > pi[SEEN_FINISHED]
    pi[SEEN_FINISHED] = iv[FINISHED_COUNT]
    if iv[FREE] * iv[BLOCK] < decodes * iv[BLOCK]:
        _retract(q, r, a, kf)
        left = True
    if left:
        pi[FULL] = 0  # only after this round has been refused its prefill
    elif iv[N_PARTIAL] == 0 and (pi[FULL] == 1 or iv[WAIT_HEAD] < 0):
        a.iv[REPEAT] = MANY
        if iv[BLOCK] > 1:
            a.iv[GUARD] = decodes  # a free page for each, needed or not


@jit
def advance(q: Any, r: Any, a: Any, p: Any, ki: Any, kf: Any, limit: float, look_ahead: float) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class SglangPolicy(CompiledPolicy):
    """SGLang's default scheduler."""

    name = "sglang"
    source = "sglang 0.4.6.post5: srt/managers/{scheduler,schedule_policy,schedule_batch}.py"
    mirrors = "SGLang 0.4.6.post5"
    knobs = {  # noqa: RUF012
        "chunked_prefill_size": Knob(
            8192, "most prompt tokens of a prefill batch", "sglang server_args.py", minimum=1
        ),
        "mixed_chunk": Knob(
            False, "let decodes ride in prefill batches", "sglang server_args.py (enable_mixed_chunk)"
        ),
        "max_prefill_tokens": Knob(
            16384, "input tokens of a prefill batch", "sglang server_args.py", minimum=1
        ),
        "max_running_requests": Knob(
            None,
            "most running requests; default pool / context x 512, within 2048 and 4096",
            "sglang tp_worker / model_runner",
            minimum=1,
        ),
        "schedule_conservativeness": Knob(
            1.0, "scales the new-token ratio", "sglang server_args.py", minimum=0
        ),
        "init_new_token_ratio": Knob(0.7, "ratio at start", "sglang global_config.py", minimum=0),
        "min_new_token_ratio_factor": Knob(
            0.14, "least ratio, as a share of the start", "sglang global_config.py", minimum=0
        ),
        "new_token_ratio_decay_steps": Knob(
            600, "decode steps from start to least", "sglang global_config.py", minimum=1
        ),
        "retract_decode_steps": Knob(
            20, "tokens a request kept free after a retraction", "sglang global_config.py", minimum=1
        ),
        "clip_max_new_tokens": Knob(
            4096, "most new tokens that admission assumes", "sglang schedule_policy.py", minimum=1
        ),
        "page_size": Knob(1, "tokens per KV page", "sglang server_args.py", minimum=1),
    }
    advance = advance

    @property
    def mixes(self) -> bool:
        """Decodes ride along only if asked to."""
        return bool(self["mixed_chunk"])

    @property
    def block_size(self) -> int | None:
        """SGLang counts its pool in pages."""
        return int(self["page_size"])

    def max_seqs(self, deployment: Deployment) -> int:
        """`max_running_requests`, or SGLang's default for this pool."""
        if self["max_running_requests"]:
            return int(self["max_running_requests"])
        pool = deployment.num_blocks * deployment.block_size
        return max(2048, min(4096, int(pool / deployment.max_context * 512)))

    def max_tokens(self, deployment: Deployment) -> int:
        """A chunk, or all decodes."""
        return max(int(self["chunked_prefill_size"]), self.max_seqs(deployment))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Budgets and limits; the ratio's start, least and fall per decode step."""
        start = min(1.0, self["init_new_token_ratio"] * self["schedule_conservativeness"])
        least = min(1.0, start * self["min_new_token_ratio_factor"])
        integers = [
            int(self["chunked_prefill_size"]),
            int(self["max_prefill_tokens"]),
            self.max_seqs(deployment),
            int(self["mixed_chunk"]),
            int(self["clip_max_new_tokens"]),
        ]
        decay = (start - least) / self["new_token_ratio_decay_steps"]
        return integers, [start, least, decay, float(self["retract_decode_steps"])]

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """Admission wants more than prompt, what a retraction would recompute, and the clipped new tokens."""
        clipped = np.minimum(workload.max_new_tokens, self["clip_max_new_tokens"]).astype(np.int64)
        tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens - 1 + clipped + 1
        return np.asarray(-(-tokens // deployment.block_size), np.int64)

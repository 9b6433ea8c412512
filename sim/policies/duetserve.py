"""DuetServe: chunked mixed batches, split over the SMs while a mixed pass would take longer than the TBT target.

arXiv:2511.04791. Every iteration forms an ordinary chunked batch (decodes first, prompts up to the token budget). If
its predicted time on all SMs exceeds the target tau, prefill and decode run side by side on S_p = S - S_d and S_d SMs,
with k decode steps launched back to back without the host: (S_d, k) maximises the tokens per second
(k T_dec + T_pre) / max(k t_d(S_d), t_p(S_p)) subject to t_d(S_d) <= tau. Both sides join before the next iteration;
who is done within the k steps stays in the batch to their end.

Predictions come from the policy's belief; the paper's roofline has profiled compute and bandwidth for each number of
SMs and no term for contention. Left open there and chosen here: prompts first come first served with blocks for their
whole length, the bound on k, a mixed batch where no split keeps the target, t_d as GPU time (the host is out of the
loop of k steps) and t_p with the host's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.pairs import pair_factor
from sim.cost.step import decode_pass_s
from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import (
    BLOCK,
    CHAIN_CAP,
    D_LAUNCH,
    D_PART,
    D_STEPS,
    FREE,
    MODEL_LAYERS,
    N_CHUNKS,
    N_PREEMPT,
    N_READY,
    P_LAYERS,
    P_MIXED,
    P_PART,
    REASON,
    STEP,
    WHOLE_GPU,
)
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.chunks import chunk_tokens, fill_chunks
from sim.policies.parts.predict import next_batch, next_context, pass_s, prompts_attention_s
from sim.policies.parts.splits import decode_sizes, split_parts
from sim.policies.parts.targets import target_s
from sim.policies.parts.two_lanes import clear_lanes, decodable, make_room, may_decode, may_prefill
from sim.workload.workload import Workload

TOKENS, SEQS, SPARE, LOOK_AHEAD, CONTENTION, SPLITS, PARTS = 0, 1, 2, 3, 4, 5, 6
TAU = 0
PLAIN, SPLIT, NO_SPLIT = 0, 1, 2  # why the pass is as it is, for the step log


@jit
def steps_that_fit(q: Any, r: Any, free: int, most: int) -> int:
    """Decode steps, up to `most`, for whose new blocks after the first step `free` blocks are enough."""
    iv = r.iv
    for k in range(1, most):
        free -= r.block_phase[(iv[STEP] + k) % iv[BLOCK]]
        for n in range(iv[N_READY]):
            i = r.ready[n]
            if (q.computed[i] + k) % iv[BLOCK] == 0:
                free -= 1
        if free < 0:
            return k
    return most


@jit
def choose(
    q: Any, a: Any, b: Any, y: Any, ki: Any, tau: float, d: int, context: int, most: int
) -> tuple[int, int]:
    """(split, k) of the most tokens per second with a decode step of d requests within `tau`; split -1 if none."""
    n, tokens, history = a.iv[N_CHUNKS], 0, 0
    for c in range(n):
        tokens += a.chunk_tokens[c]
        history += q.computed[a.chunk_id[c]]
    best, split, steps = 0.0, -1, 1
    for s in range(ki[SPLITS]):
        p_part, d_part = ki[PARTS + s], ki[PARTS + ki[SPLITS] + s]
        decode_s, slow_p = decode_pass_s(b, d_part, d, context), 1.0
        if ki[CONTENTION] == 1:
            config = y.config[p_part * len(y.sms) + d_part]
            decode_s *= pair_factor(y, y.factor_decode, config, tokens, history // n, d, context // d)
            slow_p = pair_factor(y, y.factor_prefill, config, tokens, history // n, d, context // d)
        if decode_s > tau:
            continue
        attention_s = prompts_attention_s(q, b, p_part, a.chunk_id, a.chunk_tokens, n)
        prefill_s = pass_s(b, p_part, attention_s, tokens, n, 0, 0) * slow_p
        # tokens per second rise with k until decode is the longer side, and fall from there on
        first = min(max(1, int(prefill_s / decode_s)), most)
        for k in range(first, min(first + 1, most) + 1):
            rate = (k * d + tokens) / max(k * decode_s, prefill_s)
            if rate > best:
                best, split, steps = rate, s, k
    return split, steps


@jit
def plan(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any) -> None:
    """One chunked batch when both sides are idle: mixed on all SMs, or split if that would be too slow."""
    clear_lanes(a)
    if not (may_prefill(r) and may_decode(r)):
        return
    free, d = r.iv[FREE], decodable(r)
    if d > 0:
        free = make_room(q, r, a)
        d = next_batch(r, a)
    free = fill_chunks(q, r, a, ki[TOKENS] - d, ki[SEQS], ki[SPARE], free)
    n = a.iv[N_CHUNKS]
    if n > 0:
        a.iv[P_LAYERS] = r.iv[MODEL_LAYERS]
    if d == 0 or n == 0:
        a.iv[D_LAUNCH] = min(d, 1)
        return
    context = next_context(q, r, a)
    attention_s = prompts_attention_s(q, b, WHOLE_GPU, a.chunk_id, a.chunk_tokens, n)
    if pass_s(b, WHOLE_GPU, attention_s, chunk_tokens(a), n, d, context) > kf[TAU]:
        most = 1
        if a.iv[N_PREEMPT] == 0:
            most = steps_that_fit(q, r, free, ki[LOOK_AHEAD])
        split, steps = choose(q, a, b, y, ki, kf[TAU], d, context, most)
        a.iv[REASON] = SPLIT if split >= 0 else NO_SPLIT
        if split >= 0:
            a.iv[P_PART] = ki[PARTS + split]
            a.iv[D_LAUNCH] = 1
            a.iv[D_PART] = ki[PARTS + ki[SPLITS] + split]
            a.iv[D_STEPS] = steps
            return
    a.iv[P_MIXED] = 1


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, b, y, ki, kf)
        if not execute_lanes(q, r, a, p, x):
            return


class DuetServePolicy(CompiledPolicy):
    """Chunked batches that are split over the SMs where a mixed pass would miss the TBT target."""

    name = "duetserve"
    source = "DuetServe, arXiv:2511.04791"
    mirrors = "the paper's description; its code was not read"
    lanes = 2
    predicts = True
    mixes = True
    knobs = {  # noqa: RUF012
        "token_budget": Knob(8192, "tokens of a step", "choice; vLLM's default on these GPUs", minimum=1),
        "max_num_seqs": Knob(256, "most running requests", "choice; vLLM's default", minimum=1),
        "watermark": Knob(
            0.01,
            "share of the blocks kept free at admission",
            "choice; Sarathi-Serve's",
            minimum=0,
            maximum=1,
        ),
        "tbt_ms": Knob(
            None,
            "target of a step (tau), ms; default: the experiment's itl_ms, else tpot_ms, else 100",
            "choice; the paper's value was not seen",
            minimum=1,
        ),
        "max_lookahead": Knob(
            16, "most decode steps beside one prefill (k)", "choice", minimum=1, maximum=CHAIN_CAP
        ),
        "contention_aware": Knob(
            False, "predictions include the slowdown of each side by the other", "the paper has no such term"
        ),
        "splits": Knob(
            16, "most splits that are tried, evenly over what the mechanism makes", "choice", minimum=1
        ),
    }
    advance = advance

    def max_tokens(self, deployment: Deployment) -> int:
        """Budget; decodes are never dropped by it, so it grows with the running requests."""
        return max(int(self["token_budget"]), self.max_seqs(deployment))

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """Every split; a mixed pass has all SMs."""
        return [
            (deployment.sms - size, size)
            for size in decode_sizes(deployment, int(self["splits"]), self.label)
        ]

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Limits, the splits' price partitions, and tau."""
        decode = decode_sizes(deployment, int(self["splits"]), self.label)
        tau = target_s(self["tbt_ms"], deployment, ("itl_s", "tpot_s"), 0.1)
        return [
            int(self["token_budget"]),
            self.max_seqs(deployment),
            self._spare(deployment),
            int(self["max_lookahead"]),
            int(self["contention_aware"]),
            len(decode),
            *split_parts(deployment, decode, self.price_partitions(deployment)),
        ], [tau]

    def _spare(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark comes on top at admission."""
        return super().required_blocks(workload, deployment) + self._spare(deployment)

"""MuxWise: decode gets the fewest SMs that keep its TBT SLO beside prefill, which runs on in groups of layers.

MuxWise (first Drift), ASPLOS 2026. At each end of a decode step the dispatcher predicts the next step on every split:
solo time T_D of the partition times the largest slowdown of the contention grid's cell, decode only. The smallest
decode set within the SLO wins, prefill has the rest, and N_PL = ceil(T_d N_T / T_P) of the N_T layers are launched
beside the step, T_P being prefill's solo pass on its set. Decode is launched first. A finished pass is noticed at the
next end of a decode step and joins at once. Optionally a waiting prompt preempts the pass at a boundary of layers, once
and not recursively, if the pass still keeps its TTFT SLO.

Predictions come from the tables that the policy believes in, per partition. Left open by the paper and chosen here:
the cell is that of the believed slowdown tables (finer than its powers of four); with no split that keeps the SLO
decode gets the largest; layers granted at a step's end wait behind those still in flight, and a later grant replaces
them; prompts are admitted whole, first come first served; the prompt that may preempt is the oldest waiting, if it is
done sooner than what is left of the pass; the memory of decode graphs for each partition is a share of what the engine
may use, and that of the green contexts (4 MB a group) part of the runtime's.
"""

from __future__ import annotations

import math
from typing import Any

from sim.cost.pairs import worst_factor
from sim.cost.step import decode_pass_s, overhang_s, step_s
from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import (
    BLOCK,
    FREE,
    IN_CHUNKS,
    MODEL_LAYERS,
    N_CHUNKS,
    N_PREEMPT,
    N_RUN,
    NOW,
    OVERHANG,
    P_DELAY_NS,
    P_LAYERS,
    P_PART,
    P_POLL,
    PARK,
    PARKED,
    REASON,
    UNPOLLED,
    WAIT_HEAD,
)
from sim.engine.plans import add_chunk
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.groups import (
    GRANTED,
    GROUP,
    N_SPLITS,
    GroupedPolicy,
    all_decode,
    all_prefill,
    decode_part,
    enter_group,
    launch_layers,
    launch_step,
    prefill_part,
)
from sim.policies.parts.predict import next_batch, next_context, pass_s, prompts_attention_s
from sim.policies.parts.targets import target_s
from sim.policies.parts.two_lanes import (
    WholePrompts,
    admit_prompts,
    clear_lanes,
    decodable,
    has_prefill,
    layers_left,
    make_room,
    may_decode,
    may_prefill,
)

TOKENS, SEQS, SPARE = 0, 1, 2  # ki; then those of the groups
# kf; from TTFT on the limits of each SLO class: seconds, and seconds a prompt token
TBT_S, OVERHEAD, LAUNCH_NS, GUARD, PREEMPT, TTFT = 0, 1, 2, 3, 4, 5
ALONE, KEPT, MISSED = 1, 2, 3  # reasons: a phase has nothing to do; some split keeps the SLO, or none
STEP_SMS, LEAST_SMS = 16, 32  # of prefill's sets, by the axis of the paper's Fig. 11


@jit
def batch_s(q: Any, r: Any, a: Any, b: Any, part: int, planned: bool) -> float:
    """T_P: solo seconds of the plan's chunks, or of the open batch, on a partition."""
    tokens, n = 0, a.iv[N_CHUNKS] if planned else r.iv[IN_CHUNKS]
    if planned:
        for c in range(n):
            tokens += a.chunk_tokens[c]
        return pass_s(
            b, part, prompts_attention_s(q, b, part, a.chunk_id, a.chunk_tokens, n), tokens, n, 0, 0
        )
    for c in range(n):
        tokens += r.chunk_tokens[c]
    return pass_s(b, part, prompts_attention_s(q, b, part, r.chunk_id, r.chunk_tokens, n), tokens, n, 0, 0)


@jit
def guard(q: Any, r: Any, a: Any, y: Any, config: int, planned: bool, batch: int, context: int) -> float:
    """The largest believed slowdown of the decode step in the cell of this prefill and this step."""
    tokens, keys, n = 0, 0, a.iv[N_CHUNKS] if planned else r.iv[IN_CHUNKS]
    for c in range(n):
        tokens += a.chunk_tokens[c] if planned else r.chunk_tokens[c]
        keys += q.computed[a.chunk_id[c] if planned else r.chunk_id[c]]
    return worst_factor(y, y.factor_decode, config, tokens, keys // max(1, n), batch, context // batch)


@jit
def choose_group(
    q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any, planned: bool
) -> tuple[int, float]:
    """The split of the smallest decode set that keeps the SLO, or the last one, and T_d, its step's seconds."""
    batch, context = next_batch(r, a), next_context(q, r, a)
    step, group = 0.0, 0
    while group < ki[N_SPLITS]:
        group += 1
        part = decode_part(ki, group)
        gpu_s = decode_pass_s(b, part, batch, context) + overhang_s(b, part, batch, r.iv[OVERHANG])
        if kf[GUARD] > 0.0:
            config = y.config[prefill_part(ki, group) * len(y.sms) + part]
            gpu_s *= guard(q, r, a, y, config, planned, batch, context)
        step = step_s(b, gpu_s, b.host_graph_s[batch], b.gap_graph_s[batch], 0)
        if step <= kf[TBT_S]:
            a.iv[REASON] = KEPT
            return group, step
    a.iv[REASON] = MISSED
    return group, step


@jit
def preempt_pass(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any, free: int) -> None:
    """Park the open pass for the oldest waiting prompt, if that is done sooner and the pass keeps its TTFT limits."""
    iv, i = r.iv, r.iv[WAIT_HEAD]
    if i < 0 or iv[PARKED] > 0 or iv[N_RUN] >= ki[SEQS]:
        return
    if free - (-(-q.target[i] // iv[BLOCK])) < ki[SPARE]:
        return
    part = prefill_part(ki, r.policy_i[GROUP])
    add_chunk(a, i, q.target[i], q.target[i])
    first = batch_s(q, r, a, b, part, True)
    left = batch_s(q, r, a, b, part, False) * layers_left(r) / iv[MODEL_LAYERS]
    kept = first < left
    for c in range(iv[IN_CHUNKS]):
        n = r.chunk_id[c]
        at = TTFT + 2 * q.slo_class[n]
        limit = min(kf[at], kf[at + 1] * q.prompt[n])
        # who has had its first token waits for no TTFT any more
        if q.generated[n] == 0 and r.fv[NOW] + first + left > q.arrival_s[n] + limit:
            kept = False
    if kept:
        a.iv[PARK] = 1
    else:
        a.iv[N_CHUNKS] = 0


@jit
def grant(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any, layers: int) -> None:
    """Prefill runs so many layers of the plan's chunks, or of the open batch; launching them one by one costs."""
    planned = a.iv[N_CHUNKS] > 0
    launch_layers(r, a, ki, layers, r.iv[MODEL_LAYERS] if planned else layers_left(r))
    whole = batch_s(q, r, a, b, a.iv[P_PART], planned)
    a.iv[P_DELAY_NS] += int(1e9 * kf[OVERHEAD] * whole * a.iv[P_LAYERS] / r.iv[MODEL_LAYERS])


@jit
def dispatch(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any) -> None:
    """The decode lane is free: choose the group, launch the step and then prefill's layers beside it."""
    free, idle = r.iv[FREE], may_prefill(r)
    if decodable(r) > 0:
        free = make_room(q, r, a)
    batch = decodable(r) - a.iv[N_PREEMPT]
    if idle and a.iv[N_PREEMPT] == 0:
        if r.iv[IN_CHUNKS] == 0:
            admit_prompts(q, r, a, ki[TOKENS], ki[SEQS], ki[SPARE], free)
        elif kf[PREEMPT] > 0.0:
            preempt_pass(q, r, a, b, ki, kf, free)
    planned, prefill = a.iv[N_CHUNKS] > 0, has_prefill(r, a)
    group, step, layers = all_decode(ki), 0.0, r.iv[MODEL_LAYERS]
    a.iv[REASON] = ALONE
    if batch > 0 and prefill:
        group, step = choose_group(q, r, a, b, y, ki, kf, planned)
        whole = batch_s(q, r, a, b, prefill_part(ki, group), planned)
        fits = step * layers / whole
        layers = int(fits) + (1 if int(fits) < fits else 0)
    elif prefill:
        group = all_prefill(ki)
    if not idle and r.policy_i[GROUP] != group:
        # both streams have to be done before the group changes
        r.policy_i[GRANTED] = 0
        return
    enter_group(r, a, ki, group)
    if batch > 0:
        launch_step(r, a, ki)
    if idle and prefill:
        grant(q, r, a, b, ki, kf, layers)
        if batch > 0:
            a.iv[P_DELAY_NS] += int(kf[LAUNCH_NS])
    else:
        r.policy_i[GRANTED] = layers


@jit
def plan(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any) -> None:
    """At the end of a decode step dispatch; during it prefill goes on with what it was granted."""
    clear_lanes(a)
    a.iv[P_POLL] = 1
    if may_decode(r):
        dispatch(q, r, a, b, y, ki, kf)
    elif may_prefill(r) and r.iv[IN_CHUNKS] > 0 and r.iv[UNPOLLED] == 0 and r.policy_i[GRANTED] > 0:
        if kf[PREEMPT] > 0.0:
            preempt_pass(q, r, a, b, ki, kf, r.iv[FREE])
        grant(q, r, a, b, ki, kf, r.policy_i[GRANTED])


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, b, y, ki, kf)
        if not execute_lanes(q, r, a, p, x):
            return


class MuxWisePolicy(GroupedPolicy):
    """Decode gets what its SLO needs and prefill the rest, by a solo predictor and a contention guard."""

    name = "muxwise"
    predicts = True
    source = "MuxWise (Drift), ASPLOS 2026, arXiv:2504.14489"
    split_reasons = (
        "granted with an earlier step",
        "one phase alone",
        "fewest SMs within the SLO",
        "no split within the SLO",
    )
    mirrors = "the paper on SGLang 0.4.10.post2; its public artefact has no predictor or SLO code"
    knobs = {  # noqa: RUF012
        "tbt_slo_ms": Knob(
            None,
            "longest decode step; default: the experiment's ITL limit, else TPOT, else 50",
            "paper: 50 ms for 8B, 100 ms for 70B",
            minimum=0,
        ),
        "guard": Knob(True, "multiply T_D by the largest slowdown of its cell", "paper, contention guard"),
        "preempt": Knob(False, "a waiting prompt may preempt the pass once", "paper, optional"),
        "ttft_slo_ms": Knob(
            None,
            "what the preempted pass must keep; default: the limits of each request's class",
            "paper: P1 keeps its TTFT SLO",
            minimum=0,
        ),
        "prefill_overhead": Knob(
            0.015, "share that launching by layers adds to prefill", "paper: at most 1.5 %", minimum=0
        ),
        "decode_launch_ms": Knob(
            0.5, "prefill is launched so long after decode, unless it runs", "paper: below 0.5 ms", minimum=0
        ),
        "graph_memory": Knob(
            0.062,
            "share of the engine's memory that decode graphs for each partition take",
            "paper: +6.2 %; of what: choice",
            minimum=0,
            maximum=0.9,
        ),
        "sync_us": Knob(50.0, "host time on each lane at a change of group", "choice; paper: us", minimum=0),
        **WholePrompts.admission,
        "max_prefill_tokens": Knob(16384, "prompt tokens of a prefill batch", "SGLang 0.4.10", minimum=1),
    }
    advance = advance

    @property
    def graph_share(self) -> float:
        """Share of the memory that captured graphs take."""
        return float(self["graph_memory"])

    def splits(self, deployment: Deployment) -> list[tuple[int, int]]:
        """Prefill in steps of 16 SMs down to 32: decode 12, 28, ..., 76 on an A100 and 20, 36, ..., 100 on an H100."""
        total, mechanism = deployment.sms, deployment.mechanism
        least = min(mechanism.sizes(total, deployment.compute_capability))
        prefill = range((total - least) // STEP_SMS * STEP_SMS, LEAST_SMS - 1, -STEP_SMS)
        return [(sms, total - sms) for sms in prefill]

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Groups; SLOs, overheads and switches."""
        tbt_s = target_s(self["tbt_slo_ms"], deployment, ("itl_s", "tpot_s"), 0.05)
        limits = [(target.ttft_s, target.ttft_per_token_s) for target in deployment.targets]
        if self["ttft_slo_ms"] is not None:
            limits = [(self["ttft_slo_ms"] / 1e3, math.inf) for _ in limits]
        return self.group_parameters(deployment, self["sync_us"]), [
            tbt_s,
            float(self["prefill_overhead"]),
            1e6 * self["decode_launch_ms"],
            float(self["guard"]),
            float(self["preempt"]),
            *(limit for pair in limits for limit in pair),
        ]

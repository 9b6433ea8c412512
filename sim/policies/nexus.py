"""Nexus: prefill and decode side by side; a cost model moves SMs between them at every launch.

arXiv:2507.06608 (vLLM 0.8.1, green contexts made beforehand). While less than 70 % of the KV pool is used prefill is
favoured: least T_p with T_d <= 1.1 T_d(all SMs); above it decode: least T_d with T_p <= 1.3 T_p(all SMs). The search
starts from the split in force, takes SMs from the favoured side until the constraint holds, then gives it all that
the constraint allows. A change counts if it moves more than delta of the SMs; each side adopts it at its next launch
(sets overlap, or leave SMs free, until then). Prompts go by ascending remaining tokens - gamma x age, decodes all.

T_p and T_d are read from the policy's belief, where the paper has compute saturating in SMs and bandwidth. Decode
attention gets the bandwidth B (P m_d / (m_d + m_1) + (1 - P) m_d / (m_d + m_2)) beside a prefill: m_d, m_1, m_2 are the
bytes of decode attention, prefill attention and weights, P is attention's share of the prefill's time. The printed
equations were not seen: the bytes are taken as seconds of the whole GPU's bandwidth, and T_d(all SMs) has the same
bandwidth. Left open and chosen here: delta, gamma's unit (tokens per second of age), blocks for a prompt's whole
length at admission, all SMs for a side that is alone, the granule of the mechanism instead of 1 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.step import decode_attention_s, decode_index, dense_s, head_s
from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import (
    D_LAUNCH,
    D_PART,
    FREE,
    IN_CHUNKS,
    MODEL_LAYERS,
    N_CHUNKS,
    P_LAYERS,
    P_PART,
    REASON,
    TOTAL,
    WHOLE_GPU,
)
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.predict import next_batch, next_context, pass_s, prompts_attention_s
from sim.policies.parts.shortest import fill_shortest
from sim.policies.parts.splits import decode_sizes, split_parts
from sim.policies.parts.two_lanes import (
    clear_lanes,
    decodable,
    has_prefill,
    make_room,
    may_decode,
    may_prefill,
)
from sim.workload.workload import Workload

TOKENS, SEQS, SPARE, EXPAND, SHARING, SPLITS, PARTS = 0, 1, 2, 3, 4, 5, 6
KV_SWITCH, DECODE_SLACK, PREFILL_SLACK, DELTA, BY_LENGTH, GAMMA = 0, 1, 2, 3, 4, 5
SPLIT = 0  # policy_i: 1 + the split in force, 0 before the first
ALONE, PREFILL_FIRST, DECODE_FIRST = 0, 1, 2  # why the SMs are split as they are, for the step log


@jit
def attention_floor_s(q: Any, b: Any, ids: Any, tokens: Any, n: int, d: int, context: int) -> float:
    """Seconds of decode attention at the bandwidth that the prefill of n chunks leaves it."""
    # a token's KV moves in the seconds that decode attention takes for it, the weights in a pass of one token
    token_s = b.dec_b[decode_index(b, WHOLE_GPU, d, context)]
    total, keys = 0, 0
    for c in range(n):
        total += tokens[c]
        keys += tokens[c] + q.computed[ids[c]]
    own, weights = token_s * context, dense_s(b, WHOLE_GPU, 1, True)
    if own <= 0.0:
        return 0.0
    attention = prompts_attention_s(q, b, WHOLE_GPU, ids, tokens, n)
    in_attention = attention / (attention + dense_s(b, WHOLE_GPU, total, False))
    share = in_attention * own / (own + token_s * keys) + (1.0 - in_attention) * own / (own + weights)
    return float(decode_attention_s(b, WHOLE_GPU, d, context) / share)


@jit
def decode_s(b: Any, part: int, d: int, context: int, floor_s: float) -> float:
    """T_d: seconds of a decode step whose attention takes at least `floor_s`."""
    attention = max(decode_attention_s(b, part, d, context), floor_s)
    return float(dense_s(b, part, d, True) + head_s(b, part, d) + attention)


@jit
def prefill_s(q: Any, b: Any, part: int, ids: Any, tokens: Any, n: int) -> float:
    """T_p: seconds of a pass of n chunks."""
    total = 0
    for c in range(n):
        total += tokens[c]
    return pass_s(b, part, prompts_attention_s(q, b, part, ids, tokens, n), total, n, 0, 0)


@jit
def find_split(
    q: Any, b: Any, ki: Any, kf: Any, s: int, full: bool, d: int, context: int, ids: Any, tokens: Any, n: int
) -> int:
    """The favoured side's best split within the slack of the other, from split s on. Later ones favour decode."""
    last, decode = ki[SPLITS] - 1, PARTS + ki[SPLITS]
    if full:
        limit = kf[PREFILL_SLACK] * prefill_s(q, b, WHOLE_GPU, ids, tokens, n)
        while s > 0 and prefill_s(q, b, ki[PARTS + s], ids, tokens, n) > limit:
            s -= 1
        while s < last and prefill_s(q, b, ki[PARTS + s + 1], ids, tokens, n) <= limit:
            s += 1
        return s
    floor_s = attention_floor_s(q, b, ids, tokens, n, d, context) if ki[SHARING] == 1 else 0.0
    limit = kf[DECODE_SLACK] * decode_s(b, WHOLE_GPU, d, context, floor_s)
    while s < last and decode_s(b, ki[decode + s], d, context, floor_s) > limit:
        s += 1
    while s > 0 and decode_s(b, ki[decode + s - 1], d, context, floor_s) <= limit:
        s -= 1
    return s


@jit
def adopt_split(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any) -> int:
    """The split to be in force now: the one found, if it moves more than delta of the SMs."""
    full = r.iv[TOTAL] - r.iv[FREE] > kf[KV_SWITCH] * r.iv[TOTAL]
    a.iv[REASON] = DECODE_FIRST if full else PREFILL_FIRST
    d, context = next_batch(r, a), next_context(q, r, a)
    held = r.policy_i[SPLIT] - 1
    start = held if held >= 0 else ki[SPLITS] // 2
    if r.iv[IN_CHUNKS] > 0:
        s = find_split(q, b, ki, kf, start, full, d, context, r.chunk_id, r.chunk_tokens, r.iv[IN_CHUNKS])
    else:
        s = find_split(q, b, ki, kf, start, full, d, context, a.chunk_id, a.chunk_tokens, a.iv[N_CHUNKS])
    sms, at = r.policy_sms, PARTS + ki[SPLITS]
    if held < 0 or abs(sms[ki[at + s]] - sms[ki[at + held]]) > kf[DELTA]:
        r.policy_i[SPLIT] = s + 1
        return s
    return int(held)


@jit
def plan(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any) -> None:
    """Launch whatever is idle on its side of the split; on all SMs if the other side has nothing to do."""
    clear_lanes(a)
    free, d = r.iv[FREE], decodable(r)
    if may_decode(r) and d > 0:
        free = make_room(q, r, a)
        d = next_batch(r, a)
        a.iv[D_LAUNCH] = min(d, 1)
    if may_prefill(r) and r.iv[IN_CHUNKS] == 0:
        weights = kf[BY_LENGTH], kf[GAMMA]
        fill_shortest(q, r, a, weights, ki[TOKENS], ki[SEQS], ki[SPARE], free)
    prefill = has_prefill(r, a)
    p_part, d_part = WHOLE_GPU, WHOLE_GPU
    if (d > 0 and prefill) or ki[EXPAND] == 0:
        s = max(0, r.policy_i[SPLIT] - 1)
        if d > 0 and prefill:
            s = adopt_split(q, r, a, b, ki, kf)
        p_part, d_part = ki[PARTS + s], ki[PARTS + ki[SPLITS] + s]
    if may_prefill(r) and prefill:
        a.iv[P_LAYERS] = r.iv[MODEL_LAYERS]
        a.iv[P_PART] = p_part
    a.iv[D_PART] = d_part


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, b, ki, kf)
        if not execute_lanes(q, r, a, p, x):
            return


class NexusPolicy(CompiledPolicy):
    """SMs move between prefill and decode by a cost model; shortest prompts first."""

    name = "nexus"
    source = "Nexus, arXiv:2507.06608"
    mirrors = "the paper's description; its code was not read"
    lanes = 2
    predicts = True
    knobs = {  # noqa: RUF012
        "token_budget": Knob(
            2048, "prompt tokens of a prefill batch", "choice; vLLM 0.8.1's default", minimum=1
        ),
        "max_num_seqs": Knob(256, "most running requests", "choice; vLLM's default", minimum=1),
        "watermark": Knob(
            0.01, "share of the blocks kept free at admission", "choice; vLLM v0's", minimum=0, maximum=1
        ),
        "kv_switch": Knob(
            0.7,
            "share of the KV pool above which decode is favoured",
            "arXiv:2507.06608",
            minimum=0,
            maximum=1,
        ),
        "decode_slack": Knob(
            1.1, "T_d / T_d(all SMs) allowed while prefill is favoured", "arXiv:2507.06608", minimum=1
        ),
        "prefill_slack": Knob(
            1.3, "T_p / T_p(all SMs) allowed while decode is favoured", "arXiv:2507.06608", minimum=1
        ),
        "delta": Knob(
            0.05,
            "share of the SMs by which a change must exceed the split in force",
            "choice",
            minimum=0,
            maximum=1,
        ),
        "prefill_order": Knob(
            "spf",
            "shortest prompt first, aged; or first come first served",
            "arXiv:2507.06608",
            choices=("spf", "fcfs"),
        ),
        "gamma": Knob(
            15.0, "tokens that a second of waiting counts for", "arXiv:2507.06608; unit: choice", minimum=0
        ),
        "bandwidth_sharing": Knob(
            True, "decode attention is expected to share the bandwidth with prefill", "arXiv:2507.06608"
        ),
        "expand_when_idle": Knob(True, "a side alone takes all SMs from its next launch", "choice"),
        "splits": Knob(
            16, "most splits that are tried, evenly over what the mechanism makes", "choice", minimum=1
        ),
    }
    advance = advance

    def max_tokens(self, deployment: Deployment) -> int:
        """A prefill batch or a decode step."""
        return max(int(self["token_budget"]), self.max_seqs(deployment))

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """Any two sets of the splits meet while a change is under way, and either meets all SMs after an expansion."""
        total, decode = deployment.sms, decode_sizes(deployment, int(self["splits"]), self.label)
        wide = [total] if self["expand_when_idle"] else []
        prefill = [*(total - size for size in decode), *wide]
        pairs = [(p, d) for p in prefill for d in [*decode, *wide]]
        return [pair for pair in pairs if pair != (total, total)]

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Limits and the splits' price partitions; slacks, hysteresis in SMs, and the weights of the queue's order."""
        decode = decode_sizes(deployment, int(self["splits"]), self.label)
        shortest = self["prefill_order"] == "spf"
        return [
            int(self["token_budget"]),
            self.max_seqs(deployment),
            self._spare(deployment),
            int(self["expand_when_idle"]),
            int(self["bandwidth_sharing"]),
            len(decode),
            *split_parts(deployment, decode, self.price_partitions(deployment)),
        ], [
            float(self["kv_switch"]),
            float(self["decode_slack"]),
            float(self["prefill_slack"]),
            float(self["delta"]) * deployment.sms,
            1.0 if shortest else 0.0,
            float(self["gamma"]) if shortest else 1.0,
        ]

    def _spare(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark comes on top at admission."""
        return super().required_blocks(workload, deployment) + self._spare(deployment)

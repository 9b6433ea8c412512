"""A scheduler that sees resources, not token counts: it picks chunks from a table of combinations that it has verified.

Not a published system but a claim put to work: that CTAs, shared memory, arithmetic intensity and bytes read, with a
small table of combinations of known latency, are enough to schedule fused attention. Batches are Sarathi's with one
chunk (`sim.policies.pod`); what differs is how long the chunk is:

- candidates are chunks whose CTAs fill whole shares of the GPU's slots (a quarter of a wave, a half, one, two, ...), so
  that none leaves a few CTAs past a wave; those whose CTA does not fit on an SM beside one of decode are left out, and
  those that would read memory faster than they compute (`least_intensity`) unless nothing else is left of a prompt;
- a combination is (candidate, octave of the keys it reads, octave of decode's CTAs, half octave of decode's bytes). Its
  latency is the longest that was observed, falling slowly while shorter ones are: a verified one counts as it is, one
  that was never run by the believed price with `unverified_margin` on top;
- the longest candidate within the TBT target runs. If none is, the prompt waits, for at most `max_skips` steps.
"""

from __future__ import annotations

from typing import Any

from sim.cost.attention import MODES, AttentionMode
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import LAST_END, N_CHUNKS, N_PREEMPT, NOW, REPEAT
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.combinations import COMBINATIONS, candidates, combination
from sim.policies.parts.predict import next_batch, next_context
from sim.policies.parts.targets import target_s
from sim.policies.pod import cut_chunks, step_with_s
from sim.policies.sarathi import SarathiPolicy
from sim.policies.sarathi import plan as sarathi_plan

# behind Sarathi's integers
MAX_SKIPS, KV_HEADS, SLOTS, N_CANDIDATES, CANDIDATES = 4, 5, 6, 7, 8
TBT_S, MARGIN, LEAST_INTENSITY, INTENSITY_SCALE = 0, 1, 2, 3
# the policy's own state: the combination that runs (-1: none), steps for which a prompt has waited, start of the step
RUNNING, SKIPPED = 0, 1
STARTED, TABLE = 0, 1
SINK = 1.0 / 8.0  # share by which a combination's latency falls towards a shorter observation
CLAIM = "claim on resource-aware scheduling in a survey of POD-Attention; choice of this project"


@jit
def _observe(r: Any) -> None:
    """Enter how long the step that has just ended took."""
    at = r.policy_i[RUNNING]
    taken = r.fv[LAST_END] - r.policy_f[STARTED]
    r.policy_i[RUNNING] = -1
    if at < 0 or taken <= 0.0:
        return
    known = r.policy_f[TABLE + at]
    r.policy_f[TABLE + at] = taken if taken > known else known + (taken - known) * SINK


@jit
def _choose(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any, batch: int, context: int) -> int:
    """Tokens of the longest candidate within the target, and note its combination; 0 if there is none."""
    i, wanted = a.chunk_id[0], a.chunk_tokens[0]
    history = q.computed[i]
    for n in range(ki[N_CANDIDATES] - 1, -1, -1):
        tokens = ki[CANDIDATES + n]
        if tokens >= wanted:
            # the rest of a prompt counts as the candidate that it needs
            if n > 0 and ki[CANDIDATES + n - 1] >= wanted:
                continue
            tokens = wanted
        keys = tokens + history
        pairs = tokens * history + tokens * (tokens + 1) // 2
        if tokens < wanted and pairs * kf[INTENSITY_SCALE] < kf[LEAST_INTENSITY] * keys:
            continue
        at = combination(n, keys, batch * ki[KV_HEADS], ki[SLOTS], context)
        latency_s = r.policy_f[TABLE + at]
        if latency_s == 0.0:
            latency_s = step_with_s(q, r, b, a, tokens, batch, context) * (1.0 + kf[MARGIN])
        if latency_s <= kf[TBT_S]:
            r.policy_i[RUNNING] = at
            return tokens
    return 0


@jit
def plan(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any) -> None:
    """Sarathi's step with the chunk that the table allows."""
    _observe(r)
    sarathi_plan(q, r, a, ki, kf)
    if a.iv[N_CHUNKS] == 0:
        return
    a.iv[REPEAT] = 1
    batch = next_batch(r, a)
    if batch <= 0 or a.iv[N_PREEMPT] > 0:
        return
    tokens = _choose(q, r, a, b, ki, kf, batch, next_context(q, r, a))
    if tokens == 0 and r.policy_i[SKIPPED] >= ki[MAX_SKIPS]:
        tokens = ki[CANDIDATES]
    r.policy_i[SKIPPED] = r.policy_i[SKIPPED] + 1 if tokens == 0 else 0
    r.policy_f[STARTED] = r.fv[NOW]
    cut_chunks(a, tokens)


@jit
def advance(
    q: Any, r: Any, a: Any, p: Any, b: Any, ki: Any, kf: Any, limit: float, look_ahead: float
) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, b, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class ResourceAwarePolicy(SarathiPolicy):
    """Chunks by resource traits and verified latencies."""

    name = "resource-aware"
    source = CLAIM
    mirrors = "no system"
    predicts = True
    state_slots = TABLE + COMBINATIONS
    knobs = {  # noqa: RUF012
        **{name: knob for name, knob in SarathiPolicy.knobs.items() if name != "one_prefill"},
        "token_budget": Knob(2048, "most tokens of a step", CLAIM, minimum=1),
        "tbt_slo_ms": Knob(
            None,
            "most that a step may take; default: the experiment's ITL, else TPOT, else 50",
            CLAIM,
            minimum=1,
        ),
        "unverified_margin": Knob(
            0.2, "added to the price of a combination that was never run", CLAIM, minimum=0
        ),
        "max_skips": Knob(8, "steps in a row that a prompt waits if no combination fits", CLAIM, minimum=0),
        "least_intensity": Knob(
            0.5,
            "least FLOP per byte of a chunk, against the GPU's peak FLOP/s over its bandwidth",
            CLAIM,
            minimum=0,
        ),
        "attention": Knob("pod", "how attention of mixed steps runs", CLAIM, choices=MODES),
    }
    advance = advance  # type: ignore[assignment]  # it takes believed prices, too

    def attention(self, deployment: Deployment) -> AttentionMode:
        """The mode that the knob names."""
        return AttentionMode(self["attention"])

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Sarathi's integers, limits, traits and candidates; target, margin, and what makes an intensity."""
        facts, d = deployment.attention, deployment
        sizes = candidates(facts, d.sms, int(self["token_budget"]))
        integers = [
            int(self["token_budget"]),
            self.max_seqs(d),
            self._watermark_blocks(d),
            1,
            int(self["max_skips"]),
            facts.kv_heads,
            2 * d.sms,
            len(sizes),
            *sizes,
        ]
        return integers, [
            target_s(self["tbt_slo_ms"], d, ("itl_s", "tpot_s"), 0.05),
            float(self["unverified_margin"]),
            float(self["least_intensity"]) * facts.balance,
            facts.flops_per_pair / facts.key_bytes,
        ]

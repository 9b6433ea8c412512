"""SGLang's PD multiplexing (`--enable-pdmux`): the split follows the decode batch by a table, without an SLO.

Mirrors sgl-project/sglang: `srt/multiplex/pdmux_context.py` (groups, `divide_sm`) and the loop `event_loop_pdmux`. One
round of the loop launches one decode step and one slice of prefill, max(1, `split_forward_token_budget` // tokens)
layers, and waits for decode alone; slices queue up on prefill's stream. When a prefill batch is admitted, when it is
found done (by an event, at the end of a round), and when the running batch has emptied, both streams are synchronised
and the group is chosen; in between it stays, however the batch grows. Group of a batch of n beside prefill:
clamp(n (G - 2) // `decode_bs_divisor`, 1, G - 2), or the last row of `manual_divisions` whose threshold is at most n.
Prompts are never chunked, and the scheduler does not overlap with the GPU (`overlap_schedule`).

Where SGLang would fail on thresholds that leave a small batch without a row, the knob is refused; compute capability
10, which it rejects, gets Hopper's granule, as an open pull request has it.
"""

from __future__ import annotations

from typing import Any

from sim.cost.step import decode_pass_s
from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.engine.layout import (
    D_DELAY_NS,
    FREE,
    IN_CHUNKS,
    IN_TOKENS,
    MODEL_LAYERS,
    N_CHUNKS,
    N_PREEMPT,
    P_POLL,
    UNPOLLED,
)
from sim.errors import SimctlError
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.groups import (
    GRANTED,
    GROUP,
    N_SPLITS,
    SPLITS,
    GroupedPolicy,
    all_decode,
    all_prefill,
    decode_part,
    enter_group,
    launch_layers,
    launch_step,
)
from sim.policies.parts.predict import next_batch, next_context
from sim.policies.parts.two_lanes import (
    WholePrompts,
    admit_prompts,
    clear_lanes,
    decodable,
    layers_left,
    make_room,
    may_decode,
    may_prefill,
)

TOKENS, SEQS, SPARE = 0, 1, 2  # ki; then those of the groups, and behind them:
DIVISOR, BUDGET, SERIAL, THRESHOLDS = 0, 1, 2, 3
GRANULES = {6: (1, 1), 7: (2, 2), 8: (4, 2), 9: (8, 8), 10: (8, 8)}
LEAST_DECODE_SMS = 16


@jit
def choose_group(ki: Any, own: int, batch: int) -> int:
    """The split for a running batch beside a new prefill batch; `own`: where this policy's integers begin."""
    last = ki[N_SPLITS]
    if ki[own + DIVISOR] > 0:
        return int(min(max(batch * last // ki[own + DIVISOR], 1), last))
    group = 1
    for n in range(last):
        if ki[own + THRESHOLDS + n] <= batch:
            group = n + 1
    return group


@jit
def launch_round(q: Any, r: Any, a: Any, b: Any, ki: Any, own: int) -> None:
    """A decode step, and a slice of prefill on its stream, which may be busy with earlier ones."""
    layers = r.iv[MODEL_LAYERS]
    if decodable(r) - a.iv[N_PREEMPT] > 0:
        launch_step(r, a, ki)
        if ki[own + SERIAL] == 1:
            # the host works between two steps instead of during them
            batch = next_batch(r, a)
            part = decode_part(ki, r.policy_i[GROUP])
            gpu_s = decode_pass_s(b, part, batch, next_context(q, r, a))
            a.iv[D_DELAY_NS] += int(1e9 * min(gpu_s, b.host_graph_s[batch]))
        tokens = r.iv[IN_TOKENS]
        for c in range(a.iv[N_CHUNKS]):
            tokens += a.chunk_tokens[c]
        layers = max(1, ki[own + BUDGET] // max(1, tokens))
    if r.iv[IN_CHUNKS] + a.iv[N_CHUNKS] > 0:
        granted = r.policy_i[GRANTED] + layers
        if may_prefill(r):
            launch_layers(r, a, ki, granted, layers_left(r))
        else:
            r.policy_i[GRANTED] = granted


@jit
def plan(q: Any, r: Any, a: Any, b: Any, ki: Any) -> None:
    """At the end of a decode step the next round; during it prefill goes on with the slices in its queue."""
    clear_lanes(a)
    a.iv[P_POLL] = 1
    own = SPLITS + 2 * ki[N_SPLITS]
    if not may_decode(r):
        if may_prefill(r) and r.iv[IN_CHUNKS] > 0 and r.iv[UNPOLLED] == 0 and r.policy_i[GRANTED] > 0:
            launch_layers(r, a, ki, r.policy_i[GRANTED], layers_left(r))
        return
    free = r.iv[FREE]
    if decodable(r) > 0:
        free = make_room(q, r, a)
    batch = decodable(r) - a.iv[N_PREEMPT]
    if r.iv[IN_CHUNKS] == 0:
        if a.iv[N_PREEMPT] == 0:
            admit_prompts(q, r, a, ki[TOKENS], ki[SEQS], ki[SPARE], free)
        group = all_decode(ki) if a.iv[N_CHUNKS] == 0 else choose_group(ki, own, batch)
    else:
        group = r.policy_i[GROUP]
    if batch == 0:
        group = all_prefill(ki)
    if r.policy_i[GROUP] != group and not may_prefill(r):
        # both streams are synchronised first
        return
    enter_group(r, a, ki, group)
    launch_round(q, r, a, b, ki, own)


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, b, ki)
        if not execute_lanes(q, r, a, p, x):
            return


def divide_sm(total: int, compute_capability: int, groups: int) -> list[tuple[int, int]]:
    """(prefill, decode) SMs of at most `groups` splits, the most prefill first.

    sgl-project/sglang: srt/multiplex/pdmux_context.py, divide_sm.
    """
    least, step = GRANULES.get(compute_capability, GRANULES[9])
    prefill = [
        sms for sms in range(least, total, step) if sms >= total - sms and total - sms >= LEAST_DECODE_SMS
    ]
    every = max(1, len(prefill) // groups)
    return [(sms, total - sms) for sms in reversed(prefill[::every][:groups])]


class PdMuxPolicy(GroupedPolicy):
    """SGLang's PD multiplexing over green contexts."""

    name = "pdmux"
    source = "sgl-project/sglang, srt/multiplex"
    mirrors = "SGLang --enable-pdmux"
    knobs = {  # noqa: RUF012
        "sm_group_num": Knob(
            8, "groups: those of all SMs and the splits between", "sglang --sm-group-num", minimum=3
        ),
        "decode_bs_divisor": Knob(
            36, "decode batch at which decode gets its largest set", "sglang pdmux config", minimum=1
        ),
        "manual_divisions": Knob(
            (),
            "rows [prefill SMs, decode SMs, least decode batch] instead of the table",
            "sglang pdmux config; H200 there: [112,20,1] [104,28,5] [96,36,10] [80,52,15] [64,68,20] [56,76,25]",
        ),
        "split_forward_token_budget": Knob(
            65536, "layers times tokens of a prefill slice", "sglang pdmux config", minimum=1
        ),
        "overlap_schedule": Knob(
            False, "the host prepares a decode step while the GPU runs the last", "sglang: off under pdmux"
        ),
        "sync_us": Knob(0.0, "host time on each lane at a change of group", "choice", minimum=0),
        **WholePrompts.admission,
        "max_prefill_tokens": Knob(16384, "prompt tokens of a prefill batch", "sglang's default", minimum=1),
    }
    advance = advance

    def _rows(self, deployment: Deployment) -> list[tuple[int, int, int]]:
        rows = self["manual_divisions"]
        whole = all(
            isinstance(row, list | tuple) and len(row) == 3 and all(type(value) is int for value in row)
            for row in rows
        )
        if not whole or any(min(row) < 1 for row in rows):
            raise SimctlError(
                f"policy '{self.label}': manual_divisions has rows of three whole numbers above 0, prefill SMs, decode "
                f"SMs and the least decode batch, like [112, 20, 1]; it is {rows!r}"
            )
        for prefill, decode, _ in rows:
            sizes = deployment.mechanism.sizes(deployment.sms, deployment.compute_capability)
            if prefill + decode > deployment.sms or not {prefill, deployment.sms - prefill} & set(sizes):
                raise SimctlError(
                    f"policy '{self.label}': manual_divisions: {prefill} + {decode} SMs is no split that "
                    f"'{deployment.mechanism.name}' can make of the {deployment.sms} of {deployment.gpu}"
                )
        thresholds = [row[2] for row in rows]
        if rows and (thresholds[0] != 1 or thresholds != sorted(thresholds)):
            raise SimctlError(
                f"policy '{self.label}': manual_divisions: the thresholds {thresholds} must rise from 1 on, so that "
                "every decode batch has a row"
            )
        return [(row[0], row[1], row[2]) for row in rows]

    def splits(self, deployment: Deployment) -> list[tuple[int, int]]:
        """The rows of `manual_divisions`, or SGLang's table."""
        rows = self._rows(deployment)
        if rows:
            return [(prefill, decode) for prefill, decode, _ in rows]
        return divide_sm(deployment.sms, int(deployment.compute_capability), int(self["sm_group_num"]) - 2)

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Groups; divisor (0: thresholds instead), budget, overlap, thresholds."""
        rows = self._rows(deployment)
        return [
            *self.group_parameters(deployment, self["sync_us"]),
            0 if rows else int(self["decode_bs_divisor"]),
            int(self["split_forward_token_budget"]),
            int(not self["overlap_schedule"]),
            *(row[2] for row in rows),
        ], []

"""How long a request would wait and how fast it would decode if it joined a replica now, by believed prices.

Made for any policy, so it knows only what the state shows: prompts ahead in the queue run in passes as large as
the policy's steps, decodes ride in them where there is one lane, and KV blocks or slots that are missing come free as
running requests reach what their clients asked for. Not foreseen: later arrivals, evictions, prompts that a policy lets
jump the queue.
"""

from __future__ import annotations

import math
from typing import Any

from sim.cost.pairs import pair_factor
from sim.cost.step import (
    decode_attention_s,
    decode_pass_s,
    dense_s,
    head_s,
    overhang_s,
    prefill_attention_s,
)
from sim.engine.cohort import blocks_now, generated_now
from sim.engine.layout import (
    BLOCK,
    BUSY,
    COHORT,
    CONTEXT,
    DECODE_LANE,
    EAGER_LAUNCHES,
    FREE,
    GRAPH_LAUNCHES,
    IN_CHUNKS,
    LANE_BUSY,
    LANE_FLOATS,
    LANE_INTEGERS,
    LANE_PART,
    LANE_START,
    LANES,
    LANES_F,
    LAYERS_DONE,
    MODEL_LAYERS,
    N_JOINING,
    N_PARTIAL,
    N_READY,
    N_RUN,
    N_WAIT,
    OVERHANG,
    PREFILL,
    PREFILL_LANE,
    RUN_HEAD,
    STEP,
    STEP_START,
    WAIT_HEAD,
)

MOST_PREFILL = 0.95  # share of the time that prompts are thought to take at most
RECENT = 32  # admitted requests whose prompts tell how much of the time prefill takes


class Forecast:
    """What one replica would do with one more request. `b`, `y`: believed prices and, for two lanes, slowdowns.

    `tokens`, `seqs`: the policy's largest step and most running requests.
    """

    def __init__(self, q: Any, r: Any, b: Any, y: Any, tokens: int, seqs: int) -> None:
        self.q, self.r, self.b, self.y, self.tokens, self.seqs = q, r, b, y, tokens, seqs
        self._admitted: list[tuple[float, float, int]] = []  # when, seconds of its prefill, passes so far

    def admit(self, i: int, now: float) -> None:
        """Request i has been let in: its prompt is part of the load from now on."""
        seconds = self._prefill_s([int(self.q.prompt[i])])
        self._admitted = [*self._admitted[1 - RECENT :], (now, seconds, int(self.r.iv[EAGER_LAUNCHES]))]

    def ttft_s(self, i: int, now: float) -> float:
        """Seconds from now to the first token of request i, which is not in the queue yet."""
        own = int(self.q.prompt[i])
        prompts = [*self._prompts_ahead(), own]
        elapsed = now - self._started(PREFILL_LANE) if self.r.iv[IN_CHUNKS] > 0 else 0.0
        queued = max(0.0, self._prefill_s(prompts) - elapsed) + self._boundary_s(now)
        return max(queued, self._room_s(own) + self._prefill_s([own]))

    def tpot_s(self, i: int, now: float) -> float:
        """Seconds a token of request i once it decodes, beside everybody who is here and prompts as of late."""
        iv, q = self.r.iv, self.q
        waiting = self._queue(WAIT_HEAD)
        batch = min(self.seqs, iv[N_RUN] + iv[N_WAIT] + 1)
        context = iv[CONTEXT] + sum(int(q.target[j]) for j in waiting) + int(q.prompt[i]) + batch
        step = self._decode_s(int(batch), int(context))
        if self.y is not None:
            return step * self._slowdown(int(batch), int(context))
        return self._between_prompts_s(step, int(q.max_new[i]) * step, now)

    def _queue(self, head: int) -> list[int]:
        rows, i = [], int(self.r.iv[head])
        while i >= 0:
            rows.append(i)
            i = int(self.q.next[i])
        return rows

    def _part(self, lane: int) -> int:
        """The price partition that the lane has or had last; all SMs before its first launch."""
        if self.y is None:
            return 0
        return max(0, int(self.r.iv[LANES + lane * LANE_INTEGERS + LANE_PART]))

    def _started(self, lane: int) -> float:
        """When what is in flight was launched."""
        if self.y is None:
            return float(self.r.fv[STEP_START])
        return float(self.r.fv[LANES_F + lane * LANE_FLOATS + LANE_START])

    def _decodes(self) -> int:
        """Decodes that ride in the passes of prompts."""
        if self.y is not None:
            return 0
        # those that join in the step in flight are ready and in the cohort
        return int(self.r.iv[COHORT] + self.r.iv[N_READY] - self.r.iv[N_JOINING])

    def _pass_tokens(self) -> int:
        """Prompt tokens of a full pass."""
        return max(1, self.tokens - self._decodes())

    def _prompts_ahead(self) -> list[int]:
        """Tokens that are still to be computed of prompts that have begun or wait."""
        q, iv = self.q, self.r.iv
        left = [int(q.target[i] - q.computed[i]) for i in self.r.partial[: iv[N_PARTIAL]]]
        if self.y is not None and iv[LAYERS_DONE] > 0:
            share = 1.0 - iv[LAYERS_DONE] / iv[MODEL_LAYERS]
            left = [math.ceil(size * share) for size in left]
        return [*left, *(int(q.target[i] - q.computed[i]) for i in self._queue(WAIT_HEAD))]

    def _prefill_s(self, prompts: list[int]) -> float:
        """Seconds of the prompts one after the other, in passes of the policy's size."""
        b, part, decodes = self.b, self._part(PREFILL_LANE), self._decodes()
        size = self._pass_tokens()
        total = sum(prompts)
        passes = -(-total // size)
        width = min(-(-total // passes) + decodes, b.max_tokens)
        rows = min(-(-len(prompts) // passes) + decodes, b.max_seqs)
        gpu_s = passes * (dense_s(b, part, width, False) + head_s(b, part, rows))
        for prompt in prompts:
            for history in range(0, prompt, size):
                gpu_s += prefill_attention_s(b, part, min(size, prompt - history), history)
        if decodes > 0:
            gpu_s += passes * decode_attention_s(b, part, decodes, int(self.r.iv[CONTEXT]) + decodes)
        return float(max(gpu_s, passes * b.host_eager_s[rows]) + passes * b.gap_eager_s[rows])

    def _decode_s(self, batch: int, context: int) -> float:
        b = self.b
        part = self._part(DECODE_LANE)
        gpu_s = decode_pass_s(b, part, batch, context)
        gpu_s += overhang_s(b, part, batch, int(self.r.iv[OVERHANG]))
        return float(max(gpu_s, b.host_graph_s[batch]) + b.gap_graph_s[batch])

    def _boundary_s(self, now: float) -> float:
        """Seconds until the decode step in flight lets a prompt in, on one lane."""
        iv = self.r.iv
        if self.y is not None or iv[BUSY] == 0 or iv[IN_CHUNKS] > 0 or iv[COHORT] == 0:
            return 0.0
        step = self._decode_s(int(iv[COHORT]), int(iv[CONTEXT] + iv[COHORT]))
        return max(0.0, step - (now - self._started(DECODE_LANE)))

    def _room_s(self, own: int) -> float:
        """Seconds until blocks and a slot are free for everybody ahead and for a prompt of `own` tokens."""
        q, r, iv = self.q, self.r, self.r.iv
        waiting = self._queue(WAIT_HEAD)
        blocks = sum(-(-int(q.target[i]) // iv[BLOCK]) for i in waiting) + -(-own // iv[BLOCK]) - iv[FREE]
        slots = iv[N_RUN] + len(waiting) + 1 - self.seqs
        if blocks <= 0 and slots <= 0:
            return 0.0
        running = [i for i in self._queue(RUN_HEAD) if q.phase[i] != PREFILL]
        ends = sorted((int(q.max_new[i] - generated_now(q, r, i)), blocks_now(q, r, i)) for i in running)
        steps = 0
        for steps, freed in ends:  # noqa: B007
            blocks -= freed
            slots -= 1
            if blocks <= 0 and slots <= 0:
                break
        return steps * self._decode_s(int(iv[COHORT]), int(iv[CONTEXT] + iv[COHORT])) if iv[COHORT] else 0.0

    def _between_prompts_s(self, step: float, life: float, now: float) -> float:
        """Seconds a token where prompts as of late take their share of the time, and decodes ride in their passes as
        often as they have so far. Prompts count as spread over the request's own `life` at least."""
        if not self._admitted:
            return step
        iv = self.r.iv
        since, _, passes = self._admitted[0]
        span = max(now - since, life)
        busy = min(MOST_PREFILL, sum(seconds for _, seconds, _ in self._admitted) / span)
        riding = min(1.0, (iv[STEP] - iv[GRAPH_LAUNCHES]) / max(1, iv[EAGER_LAUNCHES]))
        return 1.0 / ((1.0 - busy) / step + riding * (iv[EAGER_LAUNCHES] - passes) / span)

    def _slowdown(self, batch: int, context: int) -> float:
        y, iv = self.y, self.r.iv
        config = y.config[self._part(PREFILL_LANE) * len(y.sms) + self._part(DECODE_LANE)]
        if config < 0 or iv[LANES + PREFILL_LANE * LANE_INTEGERS + LANE_BUSY] == 0:
            return 1.0
        return float(pair_factor(y, y.factor_decode, config, self.tokens, 0, batch, context // batch))

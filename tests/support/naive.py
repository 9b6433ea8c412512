"""A reference simulator that is easy to believe: request objects, one iteration at a time, nothing shared.

Each iteration asks a scheduler (`naive_schedulers`) which requests compute how many tokens, prices the batch by
the functions of `sim.cost.step`, and touches every request of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from sim.cost import step as price
from sim.workload.workload import Workload


@dataclass(eq=False)
class Request:
    """One request; `known` counts the tokens that must be in the KV pool before the next can be sampled."""

    row: int
    arrival_s: float
    prompt: int
    output: int
    max_new: int
    priority: int = 0
    computed: int = 0
    generated: int = 0
    known: int = 0
    blocks: int = 0
    preemptions: int = 0
    first_scheduled_s: float = math.nan
    token_s: list[float] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """Some of its known tokens are not computed: a new prompt, or a recomputation."""
        return self.computed < self.known


class Pool:
    """KV blocks."""

    def __init__(self, blocks: int, size: int) -> None:
        self.total = self.free = blocks
        self.size = size

    def count(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return math.ceil(tokens / self.size)

    def grow(self, request: Request, tokens: int) -> bool:
        """Let the request hold `tokens` tokens; False, and nothing changes, if there are not enough blocks."""
        more = max(0, self.count(tokens) - request.blocks)
        if more > self.free:
            return False
        self.free -= more
        request.blocks += more
        return True

    def release(self, request: Request) -> None:
        """Take back all its blocks."""
        self.free += request.blocks
        request.blocks = 0


@dataclass
class Outcome:
    """What the engine's records are compared with."""

    requests: list[Request]
    rejected: set[int]
    gaps: Counter[float]
    steps: list[tuple[float, float, int, int, int]]  # start, end, prompt tokens, chunks, decodes
    pool: Pool
    busy_s: float = 0.0
    waiting_s: float = 0.0
    running_s: float = 0.0
    kv_block_s: float = 0.0
    pairs: int = 0
    prefill_keys: int = 0
    decode_keys: int = 0


def overhang(contexts: list[int], spare: int) -> int:
    """Tokens by which the effective longest context exceeds the mean: 12 of them count, none below the mean.

    `spare` times the longest piece of a context is split one piece further; -1: into even pieces.
    """
    if spare < 0 or not contexts:
        return 0
    cuts = [1] * len(contexts)

    def piece(k: int) -> int:
        return math.ceil(contexts[k] / cuts[k])

    for _ in range(spare):
        cuts[max(range(len(cuts)), key=piece)] += 1
    mean = sum(contexts) // len(contexts)
    pieces = sorted((max(mean, piece(k)) for k in range(len(cuts)) for _ in range(cuts[k])), reverse=True)
    longest = (pieces + [mean] * 12)[:12]
    return (12 * longest[0] - sum(longest)) // 12


class Raggedness:
    """The overhang of the decodes, which is measured anew when their set changes, or the pieces to spare."""

    def __init__(self, prices: Any) -> None:
        self.prices, self.known = prices, (None, 0)

    def of(self, decodes: list[Request], graph: bool) -> int:
        """The overhang of a step of `decodes`."""
        if not decodes:
            return 0
        spare = (self.prices.spare_graph if graph else self.prices.spare_eager)[len(decodes)]
        key = (spare, {(r.row, r.preemptions) for r in decodes})
        if self.known[0] != key:
            self.known = key, overhang([r.computed + 1 for r in decodes], spare)
        return self.known[1]


def step_seconds(P: Any, chunks: list[tuple[int, int]], contexts: list[int], over: int, number: int) -> float:
    """Seconds of one pass: chunks of (new tokens, earlier tokens) and decodes with so many tokens each.

    `over`: tokens by which the longest of them stands out."""
    rows = len(chunks) + len(contexts)
    tokens = sum(new for new, _ in chunks) + len(contexts)
    graph = not chunks
    gpu = price.dense_s(P, 0, tokens, graph) + price.head_s(P, 0, rows)
    if chunks:
        attention = 0.0
        for new, earlier in chunks:
            attention += price.prefill_attention_s(P, 0, new, earlier)
        gpu += attention - (len(chunks) - 1) * P.pre_fixed_s[0]
    if contexts:
        attention = price.decode_attention_s(P, 0, len(contexts), sum(contexts))
        gpu += attention + P.over_s[len(contexts)] * over
    host, gap = (P.host_graph_s, P.gap_graph_s) if graph else (P.host_eager_s, P.gap_eager_s)
    return (max(gpu, host[rows]) + gap[rows]) * P.noise[number % len(P.noise)]


def run_naive(workload: Workload, scheduler: Any, prices: Any) -> Outcome:
    """Serve an open workload to its end on one replica."""
    requests = [
        Request(
            row,
            float(workload.arrival_s[row]),
            int(workload.prompt_tokens[row]),
            int(workload.output_tokens[row]),
            int(workload.max_new_tokens[row]),
            int(workload.priority[row]),
        )
        for row in range(len(workload))
    ]
    rejected = {r.row for r in requests if scheduler.never_fits(r)}
    out = Outcome(requests, rejected, Counter(), [], scheduler.pool)
    raggedness = Raggedness(prices)
    coming = deque(r for r in requests if r.row not in rejected)
    now = 0.0

    def pass_time(until: float) -> None:
        nonlocal now
        out.waiting_s += len(scheduler.waits()) * (until - now)
        out.running_s += len(scheduler.everybody_admitted()) * (until - now)
        now = until

    while True:
        while coming and coming[0].arrival_s <= now:
            newcomer = coming.popleft()
            newcomer.known = newcomer.prompt
            scheduler.arrive(newcomer)
        if not scheduler.waits() and not scheduler.everybody_admitted():
            if not coming:
                return out
            now = coming[0].arrival_s
            scheduler.idle()
            continue
        batch = scheduler.schedule()
        assert batch, "nothing was scheduled although requests wait"
        chunks = [(tokens, r.computed) for r, tokens in batch if r.prefilling]
        decodes = [r for r, _ in batch if not r.prefilling]
        contexts = [r.computed + 1 for r in decodes]
        over = raggedness.of(decodes, not chunks)
        end = now + step_seconds(prices, chunks, contexts, over, len(out.steps)) + scheduler.pause_s
        out.steps.append((now, end, sum(new for new, _ in chunks), len(chunks), len(decodes)))
        out.busy_s += end - now
        out.kv_block_s += (out.pool.total - out.pool.free) * (end - now)
        out.pairs += sum(earlier + k for new, earlier in chunks for k in range(1, new + 1))
        out.prefill_keys += sum(new + earlier for new, earlier in chunks)
        out.decode_keys += sum(contexts)
        for r, _ in batch:
            if math.isnan(r.first_scheduled_s):
                r.first_scheduled_s = now
        start = now
        while coming and coming[0].arrival_s <= end:
            pass_time(coming[0].arrival_s)
            newcomer = coming.popleft()
            newcomer.known = newcomer.prompt
            scheduler.arrive(newcomer)
        assert now >= start
        pass_time(end)
        for r, tokens in batch:
            decoding = not r.prefilling
            r.computed += tokens
            if decoding or r.computed == r.known:
                _emit(out, scheduler, r, end)


def _emit(out: Outcome, scheduler: Any, r: Request, end: float) -> None:
    if r.token_s:
        out.gaps[end - r.token_s[-1]] += 1
    r.token_s.append(end)
    r.generated += 1
    r.known = r.computed  # decoding: everything but the newest token is in the pool
    if r.generated == r.output:
        scheduler.finish(r)

"""The one-lane schedulers for the reference simulator, each with its own queues of request objects.

A scheduler's `schedule()` returns [(request, tokens)] in the order in which chunks are priced; a request that is
not prefilling decodes one token.
"""

from __future__ import annotations

import math
from typing import Any

from naive import Pool, Request

Batch = list[tuple[Request, int]]


def _urgency(r: Request) -> tuple[int, float, int]:
    """The first in this order is served first and evicted last."""
    return r.priority, r.arrival_s, r.row


class Scheduler:
    """Queues and eviction that they have in common."""

    def __init__(self, pool: Pool, max_seqs: int) -> None:
        self.pool, self.max_seqs = pool, max_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    pause_s = 0.0  # seconds by which copies lengthen the step

    def everybody_admitted(self) -> list[Request]:
        """Requests that hold blocks or are about to."""
        return self.running

    def waits(self) -> list[Request]:
        """Requests that wait."""
        return self.waiting

    def arrive(self, r: Request) -> None:
        """A new request waits."""
        self.waiting.append(r)

    def idle(self) -> None:
        """Nothing to do until the next arrival."""

    def finish(self, r: Request) -> None:
        """The request has made its last token."""
        self.pool.release(r)
        self.running.remove(r)

    def evict(self, r: Request) -> None:
        """Forget everything computed; prompt and generated tokens will be recomputed."""
        self.pool.release(r)
        r.computed = 0
        r.known = r.prompt + r.generated
        r.preemptions += 1

    def never_fits(self, r: Request) -> bool:
        """Could the request not be served even alone?"""
        return self.pool.count(r.prompt + r.output - 1) > self.pool.total


class Vllm(Scheduler):
    """vLLM v1: running requests in admission order, then waiting ones, one budget, blocks as scheduled."""

    def __init__(
        self,
        pool: Pool,
        budget: int,
        max_seqs: int,
        threshold: int = 0,
        watermark: int = 0,
        whole: bool = False,
        by_priority: bool = False,
    ) -> None:
        super().__init__(pool, max_seqs)
        self.budget, self.threshold, self.watermark, self.whole = budget, threshold, watermark, whole
        self.by_priority = by_priority

    def arrive(self, r: Request) -> None:
        """At the end of the queue, or sorted by (priority, arrival)."""
        self.waiting.append(r)
        self._sort()

    def _sort(self) -> None:
        if self.by_priority:
            self.waiting.sort(key=_urgency)

    def _tokens(self, r: Request, budget: int) -> int:
        wanted = r.known - r.computed if r.prefilling else 1
        if self.threshold:
            wanted = min(wanted, self.threshold)
        return min(wanted, budget)

    def schedule(self) -> Batch:
        """One step."""
        scheduled: list[Request] = []
        given: dict[int, int] = {}
        budget, evicted, at = self.budget, False, 0
        while at < len(self.running) and budget > 0:
            r = self.running[at]
            tokens = self._tokens(r, budget)
            while r in self.running and not self.pool.grow(r, r.computed + tokens):
                victim = max(self.running, key=_urgency) if self.by_priority else self.running[-1]
                self.running.remove(victim)
                if victim in scheduled:
                    scheduled.remove(victim)
                    budget += given[victim.row]
                    at -= 1
                self.evict(victim)
                self.waiting.insert(0, victim)
                self._sort()
                evicted = True
            if r not in self.running:
                break
            scheduled.append(r)
            given[r.row] = tokens
            budget -= tokens
            at += 1
        while not evicted and self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            r = self.waiting[0]
            tokens = self._tokens(r, budget)
            needed = self.pool.count(r.known if self.whole else tokens)
            if needed + (self.watermark if self.running else 0) > self.pool.free:
                break
            assert self.pool.grow(r, tokens)
            self.running.append(self.waiting.pop(0))
            scheduled.append(r)
            given[r.row] = tokens
            budget -= tokens
        return [(r, given[r.row]) for r in scheduled]


class Sarathi(Scheduler):
    """Sarathi-Serve: every decode, then unfinished prompts, then new ones while the whole prompt fits."""

    def __init__(
        self, pool: Pool, budget: int, max_seqs: int, watermark: int, one_prefill: bool = False
    ) -> None:
        super().__init__(pool, max_seqs)
        self.budget, self.watermark, self.one_prefill = budget, watermark, one_prefill

    def never_fits(self, r: Request) -> bool:
        """The watermark, or the free block that a decode asks for, comes on top."""
        return self.pool.count(r.prompt + r.output - 1) + max(1, self.watermark) > self.pool.total

    def schedule(self) -> Batch:
        """One step."""
        batch: Batch = []
        used = chunks = 0
        queue = sorted(self.running, key=lambda r: (r.arrival_s, r.row))
        kept: list[Request] = []
        prefills: list[Request] = []
        while queue:
            r = queue.pop(0)
            if r.prefilling:
                prefills.append(r)
                continue
            while self.pool.free < 1:
                victim = queue.pop() if queue else r
                self.evict(victim)
                self.waiting.insert(0, victim)
                if victim is r:
                    break
            else:
                assert self.pool.grow(r, r.computed + 1)
                kept.append(r)
                batch.append((r, 1))
                used += 1
        for r in prefills:
            kept.append(r)
            tokens = min(r.known - r.computed, self.budget - used)
            if tokens <= 0 or (self.one_prefill and chunks):
                continue
            batch.append((r, tokens))
            used += tokens
            chunks += 1
        while self.waiting and len(kept) < self.max_seqs:
            r = self.waiting[0]
            if self.pool.free - self.pool.count(r.known) < self.watermark:
                break
            tokens = min(r.known, self.budget - used)
            if tokens <= 0 or (self.one_prefill and chunks):
                break
            assert self.pool.grow(r, r.known)
            kept.append(self.waiting.pop(0))
            batch.append((r, tokens))
            used += tokens
            chunks += 1
        self.running = kept
        return batch


class VllmV0(Scheduler):
    """vLLM v0: all prompts that can be admitted, alone; else one decode of everybody, evicting the youngest."""

    def __init__(
        self, pool: Pool, budget: int, max_seqs: int, watermark: int, swap: bool, host: int, copy_s: float
    ) -> None:
        super().__init__(pool, max_seqs)
        self.budget, self.watermark = budget, watermark
        self.swap, self.host, self.copy_s = swap, host, copy_s
        self.swapped: list[Request] = []  # in order of arrival

    def waits(self) -> list[Request]:
        """Those on the host wait, too."""
        return self.waiting + self.swapped

    def never_fits(self, r: Request) -> bool:
        """Too long a prompt; the watermark, or the free block that a decode asks for, comes on top."""
        blocks = self.pool.count(r.prompt + r.output - 1) + max(1, self.watermark) + self.swap
        return r.prompt > self.budget or blocks > self.pool.total

    def schedule(self) -> Batch:
        """Prompts, or decodes."""
        self.pause_s = 0.0
        return ([] if self.swapped else self._prompts()) or self._decodes()

    def _prompts(self) -> Batch:
        for r in self.running:
            if r.prefilling:  # it has grown beyond the budget before it was evicted
                return [(r, min(r.known - r.computed, self.budget))]
        batch: Batch = []
        while self.waiting and len(self.running) < self.max_seqs:
            r = self.waiting[0]
            if batch and sum(tokens for _, tokens in batch) + r.known > self.budget:
                break
            if self.pool.free - self.pool.count(r.known) < self.watermark:
                break
            assert self.pool.grow(r, r.known)
            self.running.append(self.waiting.pop(0))
            batch.append((r, min(r.known, self.budget)))
        return batch

    def _decodes(self) -> Batch:
        left = sorted(self.running, key=lambda r: r.row)
        self.running = []
        victims: list[tuple[Request, int]] = []
        while left:
            r = left.pop(0)
            while self.pool.free < 1:
                victim = left.pop() if left else r
                victims.append((victim, victim.blocks))
                self.pool.release(victim)
                if victim is r:
                    break
            else:
                assert self.pool.grow(r, r.computed + 1)
                self.running.append(r)
        copied = self._send_away(victims) if victims else self._fetch()
        self.pause_s = copied * self.copy_s
        return [(r, 1) for r in self.running]

    def _send_away(self, victims: list[tuple[Request, int]]) -> int:
        """To the host if there is room for all, else to the front of the queue; returns the blocks copied."""
        blocks = sum(held for _, held in victims)
        taken = sum(self.pool.count(r.computed) for r in self.swapped)
        if not self.swap or taken + blocks > self.host:
            for victim, _ in victims:
                self.evict(victim)
                self.waiting.insert(0, victim)
            return 0
        for victim, _ in victims:
            victim.preemptions += 1
            self.swapped.insert(0, victim)
        return blocks

    def _fetch(self) -> int:
        """Back from the host in order, as long as one block more than theirs is free above the watermark."""
        copied = 0
        while self.swapped and len(self.running) < self.max_seqs:
            r = self.swapped[0]
            blocks = self.pool.count(r.computed)
            if self.pool.free - blocks - 1 < self.watermark:
                break
            assert self.pool.grow(r, r.computed + 1)
            self.running.append(self.swapped.pop(0))
            copied += blocks
        return copied


class StaticBatch(Scheduler):
    """A batch at a time, or whoever finds a slot; everything that a request may need is set aside for it."""

    def __init__(self, pool: Pool, size: int, tokens: int, continuous: bool) -> None:
        super().__init__(pool, size)
        self.tokens, self.continuous = tokens, continuous
        self.batch: list[Request] = []

    def _most(self, r: Request) -> int:
        return self.pool.count(r.prompt + r.max_new - 1)

    def never_fits(self, r: Request) -> bool:
        """Could all that it may need be set aside?"""
        return self._most(r) > self.pool.total

    def schedule(self) -> Batch:
        """Prompts that have not run yet, or a decode of everybody."""
        if self.continuous or not (self.batch or self.running):
            self.batch = []
            for r in self.waiting[: self.max_seqs - len(self.running)]:
                if sum(map(self._most, [*self.running, *self.batch, r])) > self.pool.total:
                    break
                self.batch.append(r)
        step: Batch = []
        while self.batch and (not step or sum(n for _, n in step) + self.batch[0].known <= self.tokens):
            r = self.batch.pop(0)
            self.waiting.remove(r)
            step.append((r, r.known))
        if not step or self.continuous:
            step += [(r, 1) for r in self.running]
        for r, tokens in step:
            assert self.pool.grow(r, r.computed + tokens)
        self.running += [r for r, _ in step if r not in self.running]
        return step


class Sglang(Scheduler):
    """SGLang 0.4.6: prompts first and alone (or with the decodes aboard), one chunked request, a full flag.

    `ratio` = (start, least, fall per decode step). What a chunk may take is cut to what is free, where the
    original would abort.
    """

    def __init__(
        self,
        pool: Pool,
        chunk: int,
        max_seqs: int,
        ratio: tuple[float, float, float],
        mixed: bool = False,
        max_prefill: int = 16384,
        clip: int = 4096,
        retract_steps: int = 20,
    ) -> None:
        super().__init__(pool, max_seqs)
        self.chunk, self.mixed, self.max_prefill, self.clip = chunk, mixed, max_prefill, clip
        self.start, self.least, self.fall = ratio
        self.ratio, self.retract_steps = self.start, retract_steps
        self.chunked: Request | None = None
        self.full = False
        self.last_extend: list[Request] = []  # prompts of the batch before, if it was an extend batch
        self.last_had_chunked = False
        self.left_in_extend = self.left_in_decode = 0
        self.extending = False

    def everybody_admitted(self) -> list[Request]:
        """Running, chunked, and prompts of the batch before, which are merged at the next round."""
        return self.running + self.last_extend + ([self.chunked] if self.chunked else [])

    def never_fits(self, r: Request) -> bool:
        """Admission, at worst of a request retracted before its last token, wants more than all this."""
        tokens = r.prompt + r.output - 1 + min(r.max_new, self.clip)
        return tokens + 1 > self.pool.total * self.pool.size

    def idle(self) -> None:
        """An idle server forgets what it has learned."""
        self.ratio = self.start

    def finish(self, r: Request) -> None:
        """Which batch it leaves decides when the full flag may fall."""
        self.pool.release(r)
        if r in self.running:
            self.running.remove(r)
        else:
            self.last_extend.remove(r)
        if self.extending:
            self.left_in_extend += 1
        else:
            self.left_in_decode += 1

    def schedule(self) -> Batch:
        """One round."""
        if self.extending:
            if self.last_had_chunked or self.left_in_extend:
                self.full = False
            self.running += self.last_extend
            self.last_extend, self.left_in_extend, self.extending = [], 0, False
        if not self.running and not self.chunked:
            if self.full:
                self.ratio = self.start  # a round without any batch
            self.full = False
        batch = self._prefill()
        if batch:
            self.last_extend = [r for r, tokens in batch if r.computed + tokens == r.known]
            self.extending, self.last_had_chunked = True, self.chunked is not None
            if self.mixed:
                self.left_in_decode = 0  # the running batch is filtered on its way into the mixed one
                for r in self.running:
                    assert self.pool.grow(r, r.computed + 1)
                    batch.append((r, 1))
            return batch
        return self._decode()

    def _prefill(self) -> Batch:
        if (self.full or not self.waiting) and self.chunked is None:
            return []
        if len(self.running) >= self.max_seqs:
            self.full = True
            return []
        aboard = len(self.running) if self.mixed else 0
        page = self.pool.size
        # each decode aboard may need a page
        pages = sum(self.pool.count(r.computed + 1) - r.blocks for r in self.running) if self.mixed else 0
        free = self.pool.free * page - pages * page
        expected = sum(min(r.max_new - r.generated, self.clip) * self.ratio for r in self.running)
        self._total, self._free = free - expected, free
        self._input, self._chunk = self.max_prefill - aboard, self.chunk - aboard
        batch: Batch = []

        def add(r: Request, tokens: int, last: bool) -> None:
            more = self.pool.count(r.computed + tokens) - r.blocks
            assert self.pool.grow(r, r.computed + tokens)
            batch.append((r, tokens))
            self._total -= more * page + (min(r.max_new, self.clip) if last else 0)
            self._free -= more * page
            self._input -= tokens
            self._chunk -= tokens

        if self.chunked:
            r = self.chunked
            held = r.blocks * page - r.computed
            tokens = min(r.known - r.computed, self._chunk, self._free + held)
            if tokens <= 0:
                return []
            whole = tokens == r.known - r.computed
            add(r, tokens, whole)
            if whole:
                self.chunked = None
        while self.waiting:
            r = self.waiting[0]
            if len(self.running) + len(batch) >= self.max_seqs:
                self.full = True
                break
            if r.known + min(r.max_new, self.clip) >= self._total:
                self.full = True
                break
            if r.known > self._input and batch:
                break
            whole = r.known <= self._chunk
            tokens = r.known if whole else self._chunk // page * page
            if tokens <= 0:
                break
            self.waiting.pop(0)
            add(r, tokens, whole)
            if not whole:
                self.chunked = r
                if self._total <= 0 or self._free <= 0:
                    self.full = True
                break
            if self._total <= 0 or self._free <= 0:
                self.full = True
                break
            if self._input <= 0 or self._chunk <= 0:
                break
        return batch

    def _decode(self) -> Batch:
        left = self.left_in_decode > 0
        self.left_in_decode = 0
        if self.pool.free < len(self.running):
            self._retract()
            left = True
        else:
            self.ratio = max(self.ratio - self.fall, self.least)
        if left:
            self.full = False
        batch: Batch = []
        for r in self.running:
            assert self.pool.grow(r, r.computed + 1)
            batch.append((r, 1))
        return batch

    def _retract(self) -> None:
        order = sorted(self.running, key=lambda r: (-r.generated, r.prompt, r.row))
        first, size = True, self.pool.size
        each = max(self.retract_steps, size)  # a decode may need a whole page
        while first or self.pool.free * size < len(order) * each:
            if len(order) == 1:
                break
            first = False
            victim = order.pop()
            self.running.remove(victim)
            self.evict(victim)
            self.waiting.append(victim)
        needed = sum(self.pool.count(r.computed + 1) - r.blocks for r in order)
        if needed > self.pool.free and self.chunked:
            # a single decode beside a chunked prompt that has taken everything
            victim, self.chunked = self.chunked, None
            self.evict(victim)
            self.waiting.append(victim)
        asked = sum(r.max_new for r in self.running)
        made = sum(r.generated for r in self.running)
        self.ratio = min(1.0, (made + self.retract_steps * len(self.running)) / asked)


def naive_scheduler(name: str, knobs: dict[str, Any], blocks: int, block_size: int) -> Scheduler:
    """The reference scheduler that stands for `make_policy({"name": name, **knobs})`; every knob is given."""
    pool = Pool(blocks, block_size)
    if name == "vllm":
        return Vllm(
            pool,
            knobs["max_num_batched_tokens"],
            knobs["max_num_seqs"],
            knobs["long_prefill_token_threshold"],
            math.floor(knobs["watermark"] * blocks),
            knobs["whole_prompt_gate"],
            knobs["scheduling_policy"] == "priority",
        )
    if name == "vllm-v0":
        block_bytes = block_size * 131072  # llama-3.1-8b
        return VllmV0(
            pool,
            knobs["max_num_batched_tokens"],
            knobs["max_num_seqs"],
            math.floor(knobs["watermark"] * blocks),
            knobs["preemption_mode"] == "swap",
            int(knobs["swap_space_gib"] * 2**30) // block_bytes,
            block_bytes / (knobs["swap_gb_s"] * 1e9),
        )
    if name == "static-batch":
        return StaticBatch(pool, knobs["max_batch_size"], knobs["max_prefill_tokens"], knobs["continuous"])
    if name == "sarathi":
        return Sarathi(
            pool,
            knobs["token_budget"],
            knobs["max_num_seqs"],
            math.floor(knobs["watermark"] * blocks),
            knobs["one_prefill"],
        )
    start = min(1.0, knobs["init_new_token_ratio"] * knobs["schedule_conservativeness"])
    least = min(1.0, start * knobs["min_new_token_ratio_factor"])
    return Sglang(
        pool,
        knobs["chunked_prefill_size"],
        knobs["max_running_requests"],
        (start, least, (start - least) / knobs["new_token_ratio_decay_steps"]),
        knobs["mixed_chunk"],
        knobs["max_prefill_tokens"],
        knobs["clip_max_new_tokens"],
        knobs["retract_decode_steps"],
    )

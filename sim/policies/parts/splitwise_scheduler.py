"""Splitwise's cluster scheduler: which machines serve a request, and which pool each machine is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sim.engine.dispatch import Machine

# visible cost of a hand-over beside the prompt: 5 ms over 400 Gbit/s (H100), 8 ms over 200 (A100), section 6.2
VISIBLE_S, VISIBLE_BYTES = 2e-3, 150e6


class Scheduler:
    """The cluster's scheduler: both machines of a request at its arrival, and which pool each machine is in."""

    def __init__(self, machines: Sequence[Machine], q: Any, link: Any, knobs: Mapping[str, Any]) -> None:
        self._machines, self._q = machines, q
        self._pool = [machine.pool for machine in machines]
        self._pending = [0] * len(machines)  # prompt tokens and token tasks to do
        self._memory = [0] * len(machines)  # blocks promised, to requests that are yet to come as well
        self._foreign = [0] * len(machines)  # work of the other kind than the machine's own
        self._placed: dict[int, tuple[int, int]] = {}
        self._long = int(knobs["prompt_queue_tokens"])
        self._shortest = int(knobs["overlap_min_tokens"]) if link.overlap != "none" else None
        given = knobs["handover_ms"]
        self._visible_s = VISIBLE_S + VISIBLE_BYTES / link.bytes_per_s if given is None else given / 1e3

    def place(self, i: int) -> tuple[int, int | None]:
        """Own pools first, then the mixed one, then a machine of the other pool, then one machine for both."""
        length, whole = int(self._q.prompt[i]), self._whole(i)
        prompt = next((k for pool in ("prefill", "mixed") for k in self._shortest_queue(pool, length)), None)
        token = next((k for pool in ("decode", "mixed") for k in self._most_memory(pool, whole)), None)
        if prompt is None:
            prompt = next(iter(self._by_pending("decode")), None)
            self._mix(prompt)
        if token is None:
            token = next(self._most_memory("prefill", whole), None)
            self._mix(token)
        if prompt is None or token is None:
            fits = [k for k, machine in enumerate(self._machines) if machine.num_blocks >= whole]
            prompt = token = min(fits, key=lambda k: (self._pending[k], k))
        self._placed[i] = prompt, token
        self._pending[prompt] += length
        self._pending[token] += 1
        self._memory[token] += whole
        if prompt != token:
            self._memory[prompt] += self._machines[prompt].blocks_for(length + 1)
        self._foreign[prompt] += self._machines[prompt].pool == "decode"
        self._foreign[token] += self._machines[token].pool == "prefill"
        return prompt, token

    def _whole(self, i: int) -> int:
        return self._machines[0].blocks_for(int(self._q.prompt[i] + self._q.max_new[i]))

    def _of(self, pool: str) -> list[int]:
        return [k for k, now in enumerate(self._pool) if now == pool]

    def _by_pending(self, pool: str) -> list[int]:
        return sorted(self._of(pool), key=lambda k: (self._pending[k], k))

    def _shortest_queue(self, pool: str, length: int) -> Iterator[int]:
        """The machine with the fewest pending tokens, unless its queue is long."""
        for k in self._by_pending(pool)[:1]:
            if self._machines[k].waiting == 0 or self._pending[k] + length <= self._long:
                yield k

    def _most_memory(self, pool: str, whole: int) -> Iterator[int]:
        """The machine with the least memory promised, unless that would be too much."""
        for k in sorted(self._of(pool), key=lambda k: (self._memory[k], k))[:1]:
            if self._memory[k] + whole <= self._machines[k].num_blocks:
                yield k

    def _mix(self, k: int | None) -> None:
        if k is not None:
            self._pool[k] = "mixed"

    def _done(self, k: int, own: str) -> None:
        """Machine k has done a piece of work; without any of the other kind than its own it goes home."""
        home = self._machines[k].pool
        self._foreign[k] -= home not in (own, "mixed")
        if self._foreign[k] == 0:
            self._pool[k] = home

    def decode_on(self, i: int) -> int:
        """As placed."""
        return self._placed[i][1]

    def may_pull(self, i: int, machine: Machine) -> bool:
        """All that it may grow to must fit beside what is promised to those that are here."""
        return machine.reserved_blocks + self._whole(i) <= machine.num_blocks

    def sends_early(self, i: int) -> bool:
        """Long prompts layer by layer, short ones after the prompt."""
        return self._shortest is not None and bool(self._q.prompt[i] >= self._shortest)

    def handover_s(self, i: int, early: bool) -> float:
        """Synchronising layer by layer shows."""
        return self._visible_s if early else 0.0

    def reserve(self, i: int) -> int:
        """Its whole output."""
        return self._whole(i)

    def prompt_done(self, i: int) -> None:
        """Fewer tokens are pending."""
        prompt, _ = self._placed[i]
        self._pending[prompt] -= int(self._q.prompt[i])
        self._done(prompt, "prefill")

    def moved(self, i: int) -> None:
        """The prompt machine has its memory back."""
        prompt, token = self._placed[i]
        if prompt != token:
            self._memory[prompt] -= self._machines[prompt].blocks_for(int(self._q.prompt[i]) + 1)
            self._placed[i] = token, token

    def finished(self, i: int) -> None:
        """The token machine has its memory back, and the prompt machine if the first token was the last."""
        self.moved(i)
        _, token = self._placed.pop(i)
        self._pending[token] -= 1
        self._memory[token] -= self._whole(i)
        self._done(token, "decode")

"""DistServe's central controller: which replicas serve a request, and when a decode replica may pull its KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.engine.dispatch import Machine


class Controller:
    """Where requests go: the prefill replica with the fewest prompts, the decode replica with the fewest requests."""

    def __init__(self, machines: Sequence[Machine], q: Any, threshold: float, early: bool) -> None:
        self._prompts = {machine.index: 0 for machine in machines if machine.pool == "prefill"}
        self._requests = {machine.index: 0 for machine in machines if machine.pool == "decode"}
        self._q, self._threshold, self._early = q, threshold, early
        self._prompt_at: dict[int, int] = {}
        self._decoded_at: dict[int, int] = {}

    def place(self, i: int) -> tuple[int, int | None]:
        """The decode replica is chosen later."""
        k = min(self._prompts, key=lambda k: (self._prompts[k], k))
        self._prompts[k] += 1
        self._prompt_at[i] = k
        return k, None

    def decode_on(self, i: int) -> int:
        """The least loaded when the KV is on offer."""
        k = min(self._requests, key=lambda k: (self._requests[k], k))
        self._requests[k] += 1
        self._decoded_at[i] = k
        return k

    def may_pull(self, i: int, machine: Machine) -> bool:
        """Few blocks wait for the batch, and one stays free for it; with a threshold of 0, one request at a time."""
        blocks = machine.blocks_for(int(self._q.target[i]))
        room = machine.free_blocks > blocks or machine.free_blocks == machine.num_blocks
        few = machine.incoming_blocks < self._threshold * machine.num_blocks
        return room and (few or machine.incoming_blocks == 0)

    def sends_early(self, i: int) -> bool:
        """As the link says; the artefact sends after the prompt."""
        return self._early

    def handover_s(self, i: int, early: bool) -> float:
        """Nothing beside the link."""
        return 0.0

    def reserve(self, i: int) -> int:
        """Nothing is promised: decode swaps."""
        return 0

    def prompt_done(self, i: int) -> None:
        """One prompt fewer."""
        self._prompts[self._prompt_at.pop(i)] -= 1

    def moved(self, i: int) -> None:
        """The engine knows what is free."""

    def finished(self, i: int) -> None:
        """One request fewer."""
        if i in self._decoded_at:
            self._requests[self._decoded_at.pop(i)] -= 1

"""What a policy with pools decides above its replicas: which of them serves a request, and when KV may come."""

from __future__ import annotations

from typing import Any, Protocol

from sim.engine.deployment import Deployment
from sim.engine.handover import free_now
from sim.engine.layout import INCOMING, N_RUN, N_WAIT, RESERVED, TOTAL

POOLS = ("prefill", "decode", "mixed")


class Machine:
    """What a dispatcher sees of one replica."""

    def __init__(self, index: int, deployment: Deployment, r: Any) -> None:
        self.index, self.pool, self._r = index, deployment.pool, r
        self.num_blocks, self.block_size = int(r.iv[TOTAL]), deployment.block_size

    @property
    def waiting(self) -> int:
        """Requests in the queue, those whose KV is here among them."""
        return int(self._r.iv[N_WAIT])

    @property
    def running(self) -> int:
        """Requests in the batch or with part of their prompt computed."""
        return int(self._r.iv[N_RUN])

    @property
    def free_blocks(self) -> int:
        """KV blocks that nothing holds and the step in flight does not want."""
        return int(free_now(self._r))

    @property
    def incoming_blocks(self) -> int:
        """Blocks of KV that was pulled, or is being pulled, for requests that are not in the batch yet."""
        return int(self._r.iv[INCOMING])

    @property
    def reserved_blocks(self) -> int:
        """Blocks that the policy has promised to requests here."""
        return int(self._r.iv[RESERVED])

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)


class Dispatcher(Protocol):
    """The cluster's scheduler. Requests are row numbers, replicas indices; it is told of every event that it asks for
    in its own counts, at the time of the event."""

    def place(self, i: int) -> tuple[int, int | None]:
        """Request i arrives: the replica of its prompt and that of its tokens (None: said by `decode_on` later)."""
        ...

    def decode_on(self, i: int) -> int:
        """The replica that is to decode request i, whose KV is on offer now."""
        ...

    def may_pull(self, i: int, machine: Machine) -> bool:
        """May this replica take the KV of request i now? The engine has made sure that its prompt's blocks are free."""
        ...

    def sends_early(self, i: int) -> bool:
        """Is the KV on offer layer by layer while the prompt is being computed, not only after it?"""
        ...

    def handover_s(self, i: int, early: bool) -> float:
        """Seconds that handing over takes beside what the link takes."""
        ...

    def reserve(self, i: int) -> int:
        """Blocks to promise to request i where it decodes, from the pull on."""
        ...

    def prompt_done(self, i: int) -> None:
        """The prompt of request i is computed."""
        ...

    def moved(self, i: int) -> None:
        """Request i holds nothing any more where its prompt was computed."""
        ...

    def finished(self, i: int) -> None:
        """Request i has all its tokens."""
        ...

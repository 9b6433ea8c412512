"""Pools of replicas: prompts are computed on some, tokens on others, and KV travels between them.

KV is pulled: a request whose prompt is computed (or, layer by layer, is being computed) is on offer to the replica that
will decode it, and stays where it is until that replica has room and its policy takes it. Offers to a replica are taken
in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import CostModel
from sim.engine.building import Group, Settings, build_replica
from sim.engine.clock import TRANSFER
from sim.engine.deploying import is_compiled
from sim.engine.dispatch import POOLS, Dispatcher, Machine
from sim.engine.handover import claim, let_go, start_again, take_over, unclaim
from sim.engine.layout import (
    DONE,
    HANDED,
    IN_CHUNKS,
    LEAVES,
    LINK_LOST_S,
    N_RUN,
    N_WAIT,
    PREFILL,
    STAYS,
    STEP_START,
)
from sim.engine.link import Link, Wire, default_link
from sim.engine.replica import ReplicaProcess
from sim.engine.run import Cluster
from sim.errors import SimctlError
from sim.workload.workload import Workload


@dataclass(frozen=True)
class Pool:
    """`count` replicas for one role (prefill, decode or mixed) on the GPUs of a cost model."""

    name: str
    count: int
    cost: CostModel


def pools_of(
    policy: Any, cost: CostModel, replicas: int, pools: Sequence[Pool] | None, link: Link | None
) -> tuple[list[Pool], Link | None]:
    """The pools that a policy runs on and the link between them: one nameless pool and no link if it has none.

    Raises SimctlError for pools or a link that the policy has no use for, or that lack a role.
    """
    named = f"policy '{getattr(policy, 'label', type(policy).__name__)}'"
    roles = tuple(getattr(policy, "pools", ()))
    if not roles:
        for what, given in (("pools", pools), ("link", link)):
            if given is not None:
                raise SimctlError(
                    f"{named} does not split prefill from decode, so it has no use for `{what}`"
                )
        return [Pool("", replicas, cost)], None
    if not is_compiled(policy):
        raise SimctlError(
            f"{named} is written in plain Python, which cannot have pools; leave `pools` out of it"
        )
    parts = list(pools) if pools is not None else [Pool("prefill", 1, cost), Pool("decode", 1, cost)]
    for pool in parts:
        if pool.name not in roles:
            raise SimctlError(f"{named} has no pool '{pool.name}'; its pools are {', '.join(roles)}")
    missing = next((role for role in POOLS[:2] if role not in {pool.name for pool in parts}), None)
    if missing is not None:
        raise SimctlError(f"{named} needs a {missing} pool")
    if link is None:
        first = {pool.name: pool.cost for pool in reversed(parts)}
        link = default_link(first["prefill"], first["decode"], count_gpus(parts))
    return parts, link


def count_gpus(pools: Sequence[Pool]) -> int:
    """GPUs of all pools together."""
    return sum(pool.count * pool.cost.tp for pool in pools)


@dataclass
class Move:
    """KV of one request under way; `early`: it began to travel while the prompt was being computed."""

    source: int
    target: int
    blocks: int
    reserve: int
    pulled_s: float
    early: bool


class PooledCluster(Cluster):
    """Replicas in pools, the links between them, and the policy's dispatcher."""

    has_events = True  # hand-overs and transfers

    def __init__(
        self, workload: Workload, policy: Any, groups: Sequence[Group], settings: Settings, link: Link
    ) -> None:
        self.link = link
        super().__init__(workload, policy, groups, settings)
        n = len(workload)
        self.decode_of = np.full(n, -1, np.int64)
        self.transfer_s, self.pull_wait_s = np.full(n, np.nan), np.full(n, np.nan)
        self.bytes_sent = 0.0
        self.machines = [
            Machine(k, group.deployment, replica.r)
            for k, (group, replica) in enumerate(zip(self.group_of, self.replicas, strict=True))
        ]
        self.dispatcher: Dispatcher = policy.dispatcher(self.machines, self.q, link)
        self._offers: list[deque[int]] = [deque() for _ in self.replicas]
        self._offered: set[int] = set()
        self._moves: dict[int, Move] = {}
        self.wires: dict[tuple[int, int], Wire] = {}

    def _assign(self) -> NDArray[np.int64] | None:
        """Nothing is known beforehand."""
        return None

    def _make_replica(self, policy: Any, k: int) -> ReplicaProcess:
        lanes, drive = build_replica(
            policy, self.group_of[k], self.hot, self.q, k, [], self.settings, self._shared(k)
        )
        return ReplicaProcess(
            self.clock,
            k,
            lanes,
            drive,
            self._limit,
            True,
            partial(self._completed, k),
            str(getattr(policy, "label", type(policy).__name__)),
            partial(self._launched, k),
        )

    def _route(self, i: int) -> None:
        prefill, decode = self.dispatcher.place(i)
        self.routed += 1
        self.replica_of[i] = prefill
        self.decode_of[i] = -1 if decode is None else decode
        self.q.hands_over[i] = STAYS if decode == prefill else LEAVES
        self.replicas[prefill].accept(i, self.clock.now)

    def _completed(self, k: int, requests: list[int]) -> None:
        """Requests that have all their tokens or their first one, on replica k."""
        q = self.q
        for i in requests:
            if q.hands_over[i] != 0:
                self.dispatcher.prompt_done(i)
            if q.phase[i] == DONE:
                self._finished(i)
            elif q.phase[i] == HANDED:
                if i not in self._offered and i not in self._moves:
                    self._offer(i)
            else:
                q.hands_over[i] = 0
        self._pull(k)

    def _finished(self, i: int) -> None:
        self.dispatcher.finished(i)
        if i in self._offered:
            # its first token was its last: its KV is not wanted anywhere, and the next may go
            self._offers[self.decode_of[i]].remove(i)
            self._offered.remove(i)
            self._pull(int(self.decode_of[i]))
        if self.closed:
            self._issue()

    def _launched(self, k: int) -> None:
        """A launch on replica k: prompts that it completes may be on offer already."""
        r = self.replicas[k].r
        for c in range(r.iv[IN_CHUNKS]):
            i = int(r.chunk_id[c])
            ends = self.q.computed[i] + r.chunk_tokens[c] == self.q.target[i]
            if self.q.hands_over[i] == LEAVES and ends and self.dispatcher.sends_early(i):
                self._offer(i)
        self._pull(k)

    def _offer(self, i: int) -> None:
        if self.decode_of[i] < 0:
            self.decode_of[i] = self.dispatcher.decode_on(i)
        k = int(self.decode_of[i])
        self._offers[k].append(i)
        self._offered.add(i)
        self._pull(k)

    def _pull(self, k: int) -> None:
        """Replica k takes what it may of the KV on offer to it."""
        now, offers = self.clock.now, self._offers[k]
        if not offers:
            return
        self.replicas[k].settle(now)
        machine, taken = self.machines[k], False
        while offers:
            i = offers[0]
            blocks = machine.blocks_for(int(self.q.target[i]))
            if blocks > machine.free_blocks or not self.dispatcher.may_pull(i, machine):
                break
            offers.popleft()
            self._offered.discard(i)
            self._start_move(i, k, blocks)
            taken = True
        if taken:
            self.replicas[k].interrupt(now)

    def _start_move(self, i: int, k: int, blocks: int) -> None:
        now, source = self.clock.now, int(self.replica_of[i])
        r, early = self.replicas[source].r, self.q.phase[i] == PREFILL
        reserve = self.dispatcher.reserve(i)
        claim(self.replicas[k].r, blocks, reserve, now)
        self._moves[i] = Move(source, k, blocks, reserve, now, early)
        cost = self.group_of[source].cost
        size, layers = float(cost.kv_bytes_per_token * self.q.target[i]), cost.model.layers
        self.bytes_sent += size
        if not early:
            self._send(i, self.link.carried(size))
            return
        # a layer's KV goes once it is computed, and the last layer's after the prompt
        start, end = r.fv[STEP_START], float(r.ends[0])
        floor = end + self.link.carried(size / layers) / self.link.bytes_per_s
        carried = self.link.carried(size, layers)
        event = self.clock.at(max(now, start + (end - start) / layers), TRANSFER, k)
        event.callbacks.append(lambda _event: self._send(i, carried, floor))

    def _send(self, i: int, size: float, floor_s: float = 0.0) -> None:
        """Give the link the KV of request i, with what it and the compute at both ends do to each other."""
        move, curve = self._moves[i], self.link.curve
        beside = []
        for k, side in ((move.source, curve.prefill), (move.target, curve.decode)) if curve else ():
            self.replicas[k].settle(self.clock.now)
            iv = self.replicas[k].r.iv
            if side is not None and iv[N_RUN] + iv[N_WAIT] > 0:
                size *= side.transfer_factor
                beside.append((k, side.compute_factor))
        seconds = size / self.link.bytes_per_s + self.link.latency_s
        for k, factor in beside:
            self._slow_down(k, seconds * max(0.0, 1.0 - 1.0 / factor))
        self._wire(move.source, move.target).send(i, size, floor_s)

    def _slow_down(self, k: int, lost_s: float) -> None:
        """Replica k computes that much less from now on: its next step takes it up."""
        if lost_s > 0.0:
            now = self.clock.now
            self.replicas[k].r.fv[LINK_LOST_S] += lost_s
            event = self.clock.at(now, TRANSFER, k)
            event.callbacks.append(lambda _event: self.replicas[k].interrupt(now))

    def _wire(self, source: int, target: int) -> Wire:
        pair = source, target
        if pair not in self.wires:
            self.wires[pair] = Wire(self.clock, self.link, target, self._carried)
        return self.wires[pair]

    def _carried(self, i: int) -> None:
        """The link has done its part."""
        rest = self.dispatcher.handover_s(i, self._moves[i].early)
        event = self.clock.at(self.clock.now + rest, TRANSFER, self._moves[i].target)
        event.callbacks.append(lambda _event: self._arrived(i))

    def _arrived(self, i: int) -> None:
        now, q, move = self.clock.now, self.q, self._moves.pop(i)
        source, target = self.replicas[move.source], self.replicas[move.target]
        source.settle(now)
        target.settle(now)
        self.last_transfer_s = now
        if q.phase[i] == DONE:
            unclaim(target.r, move.blocks, move.reserve, now)
        else:
            self.transfer_s[i] = now - max(q.first_token_s[i], move.pulled_s)
            self.pull_wait_s[i] = max(0.0, move.pulled_s - q.first_token_s[i])
            let_go(q, source.r, i, now)
            take_over(q, target.r, i, move.reserve, now)
            self.dispatcher.moved(i)
        for replica in (source, target):
            replica.interrupt(now)
            self._pull(replica.index)

    def _run_clock(self) -> None:
        super()._run_clock()
        while math.isinf(self.end_s) and self._break_circle():
            super()._run_clock()

    def _break_circle(self) -> bool:
        """Nothing can happen, yet KV is on offer: replicas hold each other's room. One request starts over where it
        will decode, and what it held becomes free."""
        k = next((k for k, offers in enumerate(self._offers) if offers), None)
        if k is None:
            return False
        i, now = self._offers[k].popleft(), self.clock.now
        self._offered.remove(i)
        source = self.replicas[self.replica_of[i]]
        let_go(self.q, source.r, i, now)
        start_again(self.q, self.replicas[k].r, i, now)
        self.dispatcher.moved(i)
        for replica in (source, self.replicas[k]):
            replica.interrupt(now)
            self._pull(replica.index)
        return True

    def moved(self) -> dict[str, NDArray[Any]]:
        """Columns of `RunRecords.requests`: where requests decode, and what handing over took."""
        return {
            "decode_replica": self.decode_of,
            "transfer_s": self.transfer_s,
            "pull_wait_s": self.pull_wait_s,
        }

    def link_facts(self) -> dict[str, Any]:
        """What the links are and what they carried."""
        return {
            "bandwidth_gb_s": self.link.bytes_per_s / 1e9,
            "latency_us": 1e6 * self.link.latency_s,
            "sharing": self.link.sharing,
            "overlap": self.link.overlap,
            "source": self.link.source,
            "sent_gb": self.bytes_sent / 1e9,
            "busy_s": sum(wire.busy_s for wire in self.wires.values()),
        }

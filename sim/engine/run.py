"""A run: arrivals, a router, replicas, and what they leave behind."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.engine.building import Group, Settings, build_replica
from sim.engine.clock import ARRIVAL, TRANSFER, Clock
from sim.engine.deploying import is_compiled
from sim.engine.deployment import Deployment
from sim.engine.gate import Gate, make_gate, unwrapped
from sim.engine.layout import DONE, N_RUN, N_WAIT, Requests, make_requests
from sim.engine.recording import Snapshot, make_records
from sim.engine.records import REJECTED, UNFINISHED, RunRecords
from sim.engine.replica import ReplicaProcess
from sim.engine.routers import ROUTERS, check_router
from sim.engine.routing import Routing
from sim.errors import StalledError
from sim.native import HotCode
from sim.workload.workload import Workload


def _none_refused(workload: Workload, deployment: Deployment) -> dict[int, str]:
    return {}


class Cluster:
    """Replicas of one policy behind a router on one clock."""

    has_events: ClassVar[bool] = False  # of its own between arrivals, which concern more than one replica

    def __init__(
        self,
        workload: Workload,
        policy: Any,
        groups: Sequence[Group],
        settings: Settings,
        router: str = "round-robin",
    ) -> None:
        check_router(router)
        self.workload, self.groups, self.settings = workload, groups, settings
        self.group_of = [group for group in groups for _ in range(group.count)]
        self.end_s, self.warmup_s = settings.end_s, settings.warmup_s
        self._of_group: dict[int, dict[str, Any]] = {}
        self.clock = Clock()
        self.router = ROUTERS[router]()
        self.hot = HotCode(settings.compiled)
        self.q: Requests = self.hot.state(make_requests(workload))
        self.replica_of = np.full(len(workload), -1, np.int64)
        self.status = np.full(len(workload), UNFINISHED, np.int8)
        self.reasons = [""] * len(workload)
        self.routed = 0
        self.issued = 0
        self.last_transfer_s = 0.0
        self.closed = workload.max_concurrency is not None
        self.window_start: list[Snapshot] | None = None
        wrapper, policy = policy, unwrapped(policy)
        self.gated = wrapper is not policy
        self.attention = policy.attention(groups[0].deployment) if is_compiled(policy) else None
        self.split_reasons: tuple[str, ...] = getattr(policy, "split_reasons", ())
        self._hears = self.closed or (self.gated and wrapper.holds)
        for group in groups:
            self._find_unservable(policy, group)
        self._routable = np.flatnonzero(self.status != REJECTED)
        assigned = self._assign()
        self.run_ahead = assigned is not None
        if assigned is not None:
            self.replica_of[self._routable] = assigned
        kept = not (self.run_ahead or self._hears or self.gated or self.has_events)
        self.replicas = [self._make_replica(policy, k) for k in range(len(self.group_of))]
        self.gates = [self._make_gate(wrapper, k) for k in range(len(self.replicas))] if self.gated else []
        self._routing = Routing(self.replicas, self.router.choose) if kept else None
        if self.hot.compiled:
            self.hot.load()

    def _assign(self) -> NDArray[np.int64] | None:
        """Replicas of all requests, if they are known beforehand: then each runs ahead through its own arrivals."""
        return (
            None if self.closed or self.gated else self.router.assign(len(self._routable), len(self.group_of))
        )

    def _shared(self, k: int) -> dict[str, Any]:
        """What the replicas of replica k's group have in common."""
        return self._of_group.setdefault(id(self.group_of[k]), {})

    def _make_replica(self, policy: Any, k: int) -> ReplicaProcess:
        inbox = self._routable[self.replica_of[self._routable] == k]
        lanes, drive = build_replica(
            policy, self.group_of[k], self.hot, self.q, k, inbox, self.settings, self._shared(k)
        )
        return ReplicaProcess(
            self.clock,
            k,
            lanes,
            drive,
            self._limit,
            not self.run_ahead,
            partial(self._on_finish, k) if self._hears else None,
            str(getattr(policy, "label", type(policy).__name__)),
        )

    def _find_unservable(self, policy: Any, group: Group) -> None:
        """Refuse, with the arithmetic, what the replicas of a group could never serve."""
        w, d = self.workload, group.deployment
        total = w.prompt_tokens.astype(np.int64) + w.output_tokens
        if is_compiled(policy):
            need = policy.required_blocks(w, d)
        else:
            need = -(-(total - 1) // d.block_size)
        pool = f"{group.pool} pool" if group.pool else "pool"
        for i in np.flatnonzero((need > d.num_blocks) | (total > d.max_context)).tolist():
            prompt, output = int(w.prompt_tokens[i]), int(w.output_tokens[i])
            if total[i] > d.max_context:
                self._refuse(i, f"{prompt} + {output} tokens exceed the context limit of {d.max_context}")
            else:
                self._refuse(
                    i,
                    f"{prompt} + {output} tokens need {int(need[i])} KV blocks of {d.block_size}; "
                    f"the {pool} has {d.num_blocks}",
                )
        for i, reason in getattr(policy, "refusals", _none_refused)(w, d).items():
            self._refuse(int(i), reason)

    def _refuse(self, i: int, reason: str) -> None:
        if self.status[i] != REJECTED:
            self.status[i], self.reasons[i] = REJECTED, reason

    def _limit(self) -> float:
        """The next time at which something from outside may touch a replica."""
        bound = self.end_s
        if self.window_start is None:
            bound = min(bound, self.warmup_s)
        if not self.run_ahead and self.routed < len(self._routable):
            bound = min(bound, float(self.workload.arrival_s[self._routable[self.routed]]))
        return bound

    def _route(self, i: int) -> None:
        now = self.clock.now
        self._settle(now)
        k = self.router.choose([replica.outstanding for replica in self.replicas])
        self.routed += 1
        self.replica_of[i] = k
        if self.gated:
            self.gates[k].arrive(i, now)
        else:
            self.replicas[k].accept(i, now)

    def _settle(self, now: float) -> None:
        """Bring every replica up to `now`."""
        for replica in self.replicas:
            if replica.wake_s <= now:
                replica.settle(now)

    def _route_all(self, router: Routing) -> None:
        """Every arrival to a replica that the router keeps; the measured window opens in between."""

        def open_window(now: float) -> None:
            if self.window_start is None and self.warmup_s <= now and self.warmup_s < self.end_s:
                router.bring_to(self.warmup_s)
                self._open_window(self.warmup_s)

        def arrivals() -> Iterator[tuple[int, float]]:
            for i in self._routable.tolist():
                now = float(self.workload.arrival_s[i])
                if now >= self.end_s:
                    return
                if self.window_start is None:
                    open_window(now)
                yield i, now

        router.route(arrivals(), self.replica_of.__setitem__)
        if math.isfinite(self.warmup_s):
            open_window(math.inf)
        router.bring_to(self.end_s)

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        for i in self._routable.tolist():
            yield self.clock.at(float(self.workload.arrival_s[i]), ARRIVAL)
            self._route(i)

    def _issue(self) -> None:
        """Closed loop: send the next request, at its own earliest time or now."""
        if self.issued >= len(self._routable):
            return
        i = int(self._routable[self.issued])
        self.issued += 1
        time_s = max(self.clock.now, float(self.workload.arrival_s[i]))
        self.q.arrival_s[i] = time_s
        event = self.clock.at(time_s, ARRIVAL)
        event.callbacks.append(lambda _event: self._route(i))

    def _on_finish(self, k: int, finished: list[int]) -> None:
        if self.gated:
            self.gates[k].reconsider(self.clock.now)
        if self.closed:
            for _ in finished:
                self._issue()

    def _make_gate(self, wrapper: Any, k: int) -> Gate:
        classes = self.workload.slo_classes
        return make_gate(wrapper, self.group_of[k], classes, self.replicas[k], self._turn_away)

    def _turn_away(self, i: int, reason: str) -> None:
        """The gate refuses request i; whoever sent it sends the next."""
        self._refuse(i, reason)
        if self.closed:
            self._issue()

    def moved(self) -> dict[str, NDArray[Any]]:
        """Columns of `RunRecords.requests` on changes of replica; none of these here."""
        return {}

    def link_facts(self) -> dict[str, Any] | None:
        """What the links are and what they carried; there are none here."""
        return None

    def _open_window(self, now: float) -> None:
        self._settle(now)
        self.window_start = [replica.snapshot(now) for replica in self.replicas]

    def _run_clock(self) -> None:
        self.clock.run(until=self.end_s if math.isfinite(self.end_s) else None)

    def run(self) -> float:
        """Run to the end; returns the time of the last event that counts."""
        if self._routing is not None:
            self._route_all(self._routing)
            return self._ended()
        if math.isfinite(self.warmup_s) and self.warmup_s < self.end_s:
            event = self.clock.at(self.warmup_s, TRANSFER)
            event.callbacks.append(lambda _event: self._open_window(self.clock.now))
        if self.closed:
            for _ in range(self.workload.max_concurrency or 0):
                self._issue()
        elif self.run_ahead:
            for replica in self.replicas:
                replica.start()
        else:
            self.clock.process(self._arrivals())
        if self.end_s > self.clock.now:
            self._run_clock()
        return self._ended()

    def _ended(self) -> float:
        """When the run ended, everything being settled."""
        finishes = np.array(self.q.finish_s, np.float64)
        done = np.array(self.q.phase) == DONE
        if math.isfinite(self.end_s):
            return self.end_s
        # not the clock: its last event may be a wake-up that was overtaken
        return float(np.max(finishes[done], initial=self.last_transfer_s))

    def close(self, end_s: float) -> RunRecords:
        """The records of a run that ended at `end_s`; raises StalledError if it should have gone on."""
        for replica in self.replicas:
            replica.settle(end_s)
            replica.read_meter(end_s)
            replica.drain()
            if not math.isfinite(self.end_s) and replica.outstanding > 0:
                raise StalledError(
                    f"nothing can progress: policy '{replica.name}' leaves {int(replica.r.iv[N_WAIT])} requests "
                    f"waiting and {int(replica.r.iv[N_RUN])} running on replica {replica.index} although no "
                    "other event is due"
                )
            replica.check_empty()
        records = make_records(self, end_s)
        # replicas and clock stand in cycles with this object: their arrays would outlive it
        self.replicas, self.clock = [], Clock()
        return records

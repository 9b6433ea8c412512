"""What a policy written in plain Python sees, and what it returns.

`View` is read-only; the true output length is not in it. `Plan` names launches, admissions and victims; the
engine allocates blocks and raises `PlanError` if the plan cannot be carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.cohort import computed_now, generated_now
from sim.engine.lane import begin, execute
from sim.engine.layout import (
    BLOCK,
    DECODE,
    DECODE_ALL,
    DONE,
    FREE,
    N_CHUNKS,
    N_HOLD,
    N_PREEMPT,
    NOW,
    PREFILL,
    READY,
    REPEAT,
    RUN_HEAD,
    TOTAL,
    WAIT_HEAD,
    WAITING,
)
from sim.engine.plans import clear_plan
from sim.errors import PlanError


@dataclass(frozen=True)
class Prefill:
    """Prompt chunks on one lane: pairs of (request id, tokens)."""

    chunks: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Decode:
    """One token for each of the requests; None means all that can decode."""

    requests: Iterable[int] | None = None


@dataclass(frozen=True)
class Mixed:
    """One forward pass with prompt chunks and decodes together."""

    chunks: Sequence[tuple[int, int]]
    requests: Iterable[int] | None = None


Launch = Prefill | Decode | Mixed


@dataclass(frozen=True)
class Plan:
    """A decision. `admit` names waiting requests that start (None: those of the chunks); `preempt` are evicted
    and recomputed later; `repeat_for` is how many times the same decode plan may repeat unasked."""

    launches: Sequence[Launch] = ()
    admit: Iterable[int] | None = None
    preempt: Iterable[int] = ()
    repeat_for: int = 1


@dataclass(frozen=True)
class Batch:
    """Columns over some requests, each of shape (n,)."""

    id: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    computed_tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]  # tokens to compute before decoding: the prompt, more after a preemption
    generated_tokens: NDArray[np.int64]
    max_new_tokens: NDArray[np.int64]
    slo_class: NDArray[np.int64]
    priority: NDArray[np.int64]
    decoding: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.id)


class View:
    """One replica at a decision: `waiting` in queue order, `running` in admission order, and its KV pool."""

    def __init__(self, q: Any, r: Any, sms: int) -> None:
        self._q, self._r = q, r
        self.now_s = float(r.fv[NOW])
        self.free_blocks = int(r.iv[FREE])
        self.num_blocks = int(r.iv[TOTAL])
        self.block_size = int(r.iv[BLOCK])
        self.sms = sms

    @cached_property
    def waiting(self) -> Batch:
        """Requests that hold nothing yet."""
        return self._batch(WAIT_HEAD)

    @cached_property
    def running(self) -> Batch:
        """Admitted requests, prefilling or decoding."""
        return self._batch(RUN_HEAD)

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def _batch(self, head: int) -> Batch:
        q, r = self._q, self._r
        rows: list[int] = []
        i = int(r.iv[head])
        while i >= 0:
            rows.append(i)
            i = int(q.next[i])

        def column(source: Any, dtype: Any = np.int64) -> NDArray[Any]:
            return np.array([source[i] for i in rows], dtype=dtype)

        return Batch(
            id=np.array(rows, np.int64),
            arrival_s=column(q.arrival_s, np.float64),
            prompt_tokens=column(q.prompt),
            computed_tokens=np.array([computed_now(q, r, i) for i in rows], np.int64),
            target_tokens=column(q.target),
            generated_tokens=np.array([generated_now(q, r, i) for i in rows], np.int64),
            max_new_tokens=column(q.max_new),
            slo_class=column(q.slo_class),
            priority=column(q.priority),
            decoding=np.array([q.phase[i] in (READY, DECODE) for i in rows], np.bool_),
        )


def _is_here(q: Any, r: Any, i: int) -> bool:
    """Does request i stand in one of this replica's queues?"""
    while q.prev[i] >= 0:
        i = q.prev[i]
    return bool(i == r.iv[WAIT_HEAD] or i == r.iv[RUN_HEAD])


def _write_plan(q: Any, r: Any, a: Any, plan: Plan) -> None:
    """Translate a Plan into plan arrays; raises PlanError where it is not one."""
    clear_plan(a)
    if not isinstance(plan, Plan):
        raise PlanError(f"plan(view) returned {type(plan).__name__}; it must return a Plan")
    if len(plan.launches) > 1:
        raise PlanError(
            "a plan for one lane has at most one launch; use Mixed for chunks and decodes together"
        )
    victims = [int(i) for i in plan.preempt]
    launch = plan.launches[0] if plan.launches else None
    if launch is not None and not isinstance(launch, Prefill | Decode | Mixed):
        raise PlanError(f"a launch is Prefill, Decode or Mixed, not {type(launch).__name__}")
    chunks = list(launch.chunks) if isinstance(launch, Prefill | Mixed) else []
    slots = len(a.chunk_id)
    if len(victims) > slots or len(chunks) > slots:
        raise PlanError(f"a plan names more than {slots - 1} requests; raise the policy's max_num_seqs")
    for n, i in enumerate(victims):
        if not 0 <= i < len(q.phase) or q.phase[i] not in (PREFILL, READY, DECODE):
            raise PlanError(f"request {i} is to be preempted but is not running")
        if not _is_here(q, r, i):
            raise PlanError(f"request {i} is to be preempted but is on another replica")
        a.preempt[n] = i
    a.iv[N_PREEMPT] = len(victims)
    admitted = None if plan.admit is None else {int(i) for i in plan.admit}
    for n, (i, tokens) in enumerate(chunks):
        if not 0 <= i < len(q.phase) or q.phase[i] not in (WAITING, PREFILL):
            state = (
                "finished" if 0 <= i < len(q.phase) and q.phase[i] == DONE else "not waiting or prefilling"
            )
            raise PlanError(f"request {i} has a chunk but is {state}")
        if not _is_here(q, r, i):
            raise PlanError(f"request {i} has a chunk but is on another replica")
        if admitted is not None and q.phase[i] == WAITING and i not in admitted:
            raise PlanError(f"request {i} waits and has a chunk but is not in `admit`")
        a.chunk_id[n], a.chunk_tokens[n], a.chunk_reserve[n] = int(i), int(tokens), 0
    if admitted is not None and not admitted <= {int(i) for i, _ in chunks}:
        raise PlanError(
            f"requests {sorted(admitted - {int(i) for i, _ in chunks})} are admitted without a chunk"
        )
    a.iv[N_CHUNKS] = len(chunks)
    a.iv[DECODE_ALL] = int(isinstance(launch, Decode | Mixed))
    if isinstance(launch, Decode | Mixed) and launch.requests is not None:
        _write_holds(q, r, a, {int(i) for i in launch.requests}, set(victims))
    a.iv[REPEAT] = max(1, int(plan.repeat_for)) if not chunks else 1


def _write_holds(q: Any, r: Any, a: Any, wanted: set[int], victims: set[int]) -> None:
    n = 0
    i = int(r.iv[RUN_HEAD])
    able = set()
    while i >= 0:
        if q.phase[i] in (READY, DECODE) and i not in victims:
            able.add(i)
            if i not in wanted:
                a.hold[n] = i
                n += 1
        i = int(q.next[i])
    if not wanted <= able:
        raise PlanError(f"requests {sorted(wanted - able)} are to decode but cannot")
    a.iv[N_HOLD] = n


def advance_object(
    policy: Any, q: Any, r: Any, a: Any, p: Any, sms: int, limit: float, look_ahead: float
) -> None:
    """Run a replica until `limit` under a policy with `plan(view)`."""
    while begin(q, r, p, limit):
        _write_plan(q, r, a, policy.plan(View(q, r, sms)))
        if not execute(q, r, a, p, look_ahead):
            return

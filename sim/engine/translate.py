"""From a `Plan` object to plan arrays; PlanError, in one sentence, for one that cannot be carried out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sim.engine.decisions import Decode, Launch, Mixed, Plan, Prefill
from sim.engine.layout import (
    CHAIN_CAP,
    D_LAUNCH,
    D_PART,
    D_STEPS,
    DECODE,
    DECODE_ALL,
    DECODE_LANE,
    DONE,
    IN_CHUNKS,
    IN_DECODE,
    LANE_BUSY,
    LANE_INTEGERS,
    LANE_PART,
    LANES,
    LAYERS_DONE,
    MODEL_LAYERS,
    N_CHUNKS,
    N_HOLD,
    N_PREEMPT,
    P_LAYERS,
    P_MIXED,
    P_PART,
    PREFILL,
    PREFILL_LANE,
    READY,
    REASON,
    REPEAT,
    RUN_HEAD,
    WAITING,
)
from sim.engine.plans import clear_lanes, clear_plan
from sim.engine.rows import Rows
from sim.engine.view import Fixed
from sim.errors import PlanError


def write_plan(q: Any, r: Any, a: Any, plan: Any, rows: Rows) -> None:
    """One lane: at most one launch."""
    clear_plan(a)
    launches, victims = _parts(plan)
    if len(launches) > 1:
        raise PlanError(
            "a plan for one lane has at most one launch; use Mixed for chunks and decodes together"
        )
    launch = launches[0] if launches else None
    if isinstance(launch, Prefill | Decode) and (launch.sms is not None or getattr(launch, "layers", None)):
        raise PlanError("a launch on one lane runs on all SMs and through all layers; declare `lanes = 2`")
    if isinstance(launch, Decode) and launch.steps != 1:
        raise PlanError(
            "steps launched back to back are a choice on two lanes; here the same is `repeat_for`"
        )
    chunks = launch.chunks if isinstance(launch, Prefill | Mixed) else ()
    _write_victims(q, a, victims, rows)
    _write_chunks(q, a, chunks, plan.admit, rows, victims)
    a.iv[DECODE_ALL] = int(isinstance(launch, Decode | Mixed))
    if isinstance(launch, Decode | Mixed) and launch.requests is not None:
        _write_holds(q, r, a, {int(i) for i in launch.requests}, victims)
    a.iv[REPEAT] = max(1, int(plan.repeat_for)) if not chunks else 1


def write_lanes(q: Any, r: Any, a: Any, plan: Any, rows: Rows, fixed: Fixed) -> None:
    """Two lanes: a prefill and a decode on their SM sets, or one mixed pass."""
    clear_lanes(a)
    launches, victims = _parts(plan)
    kinds = [type(launch) for launch in launches]
    if len(set(kinds)) < len(kinds) or (Mixed in kinds and len(kinds) > 1):
        raise PlanError("a plan for two lanes has one Prefill and one Decode at most, or one Mixed alone")
    if plan.repeat_for != 1:
        raise PlanError("`repeat_for` is for one lane; on two, Decode takes `steps`")
    _write_victims(q, a, victims, rows)
    for i in victims:
        if _in_flight(q, r, i):
            raise PlanError(f"request {i} is to be preempted but is in flight")
    chunks: Sequence[tuple[int, int]] = ()
    for launch in launches:
        if isinstance(launch, Prefill):
            chunks = _prefill(r, a, launch, fixed)
        elif isinstance(launch, Decode):
            _free(r, DECODE_LANE, "a decode")
            if not 1 <= launch.steps <= CHAIN_CAP:
                raise PlanError(f"a decode has 1 to {CHAIN_CAP} steps, not {launch.steps}")
            a.iv[D_LAUNCH], a.iv[D_STEPS], a.iv[D_PART] = 1, launch.steps, _part(launch.sms, fixed)
        else:
            _free(r, PREFILL_LANE, "a mixed pass")
            _free(r, DECODE_LANE, "a mixed pass")
            if r.iv[IN_CHUNKS] > 0:
                raise PlanError("a mixed pass cannot begin while a prefill has layers left")
            chunks = launch.chunks
            a.iv[P_LAYERS], a.iv[P_MIXED] = r.iv[MODEL_LAYERS], 1
        if isinstance(launch, Decode | Mixed) and launch.requests is not None:
            _write_holds(q, r, a, {int(i) for i in launch.requests}, victims)
    _write_chunks(q, a, chunks, plan.admit, rows, victims)
    _check_pair(r, a, fixed)
    a.iv[REASON] = int(plan.reason)


def _parts(plan: Any) -> tuple[list[Launch], list[int]]:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan(view) returned {type(plan).__name__}; it must return a Plan")
    launches = list(plan.launches)
    for launch in launches:
        if not isinstance(launch, Prefill | Decode | Mixed):
            raise PlanError(f"a launch is Prefill, Decode or Mixed, not {type(launch).__name__}")
    return launches, [int(i) for i in plan.preempt]


def _prefill(r: Any, a: Any, launch: Prefill, fixed: Fixed) -> Sequence[tuple[int, int]]:
    """Write a prefill's layers and set; returns the chunks that it opens, none if its pass has begun before."""
    _free(r, PREFILL_LANE, "a prefill")
    done, total = int(r.iv[LAYERS_DONE]) if r.iv[IN_CHUNKS] > 0 else 0, fixed.deployment.layers
    first, last = launch.layers or (done, total)
    if first != done or not first < last <= total:
        raise PlanError(f"a prefill runs layers {first} to {last}; the next are {done} to at most {total}")
    a.iv[P_LAYERS], a.iv[P_PART] = last - first, _part(launch.sms, fixed)
    if r.iv[IN_CHUNKS] == 0:
        return launch.chunks
    begun = [(int(r.chunk_id[c]), int(r.chunk_tokens[c])) for c in range(r.iv[IN_CHUNKS])]
    if launch.chunks and [(int(i), int(n)) for i, n in launch.chunks] != begun:
        raise PlanError(f"the open prefill has the chunks {begun}; it goes on with these, or with none named")
    return ()


def _part(sms: int | None, fixed: Fixed) -> int:
    part = fixed.part(sms)
    if part < 0:
        raise PlanError(
            f"a launch on {sms} SMs: no such set; there are {', '.join(map(str, sorted(fixed.sms)))}"
        )
    return part


def _free(r: Any, lane: int, what: str) -> None:
    if r.iv[LANES + lane * LANE_INTEGERS + LANE_BUSY] == 1:
        raise PlanError(f"{what} cannot start: the {('prefill', 'decode')[lane]} lane is busy")


def _check_pair(r: Any, a: Any, fixed: Fixed) -> None:
    """Sets that run side by side must be a declared pair."""
    sides = []
    for lane, starts, part in ((0, a.iv[P_LAYERS] > 0, a.iv[P_PART]), (1, a.iv[D_LAUNCH] == 1, a.iv[D_PART])):
        at = LANES + lane * LANE_INTEGERS
        busy = r.iv[at + LANE_BUSY] == 1
        sides.append(fixed.sms[part] if starts else fixed.sms[r.iv[at + LANE_PART]] if busy else None)
    if a.iv[P_MIXED] == 0 and None not in sides and tuple(sides) not in fixed.sm_sets:
        raise PlanError(
            f"prefill on {sides[0]} SMs beside decode on {sides[1]}: no declared pair; see `View.sm_sets`"
        )


def _in_flight(q: Any, r: Any, i: int) -> bool:
    """Is running request i part of what a lane has begun?"""
    in_chunks = any(r.chunk_id[c] == i for c in range(r.iv[IN_CHUNKS]))
    return in_chunks or bool(r.iv[IN_DECODE] == 1 and q.phase[i] == DECODE)


def _room(a: Any, named: int) -> None:
    slots = len(a.chunk_id)
    if named > slots:
        raise PlanError(f"a plan names more than {slots - 1} requests; raise the policy's max_num_seqs")


def _write_victims(q: Any, a: Any, victims: list[int], rows: Rows) -> None:
    if not victims:
        return
    _room(a, len(victims))
    for n, i in enumerate(victims):
        if not 0 <= i < len(q.phase) or q.phase[i] not in (PREFILL, READY, DECODE):
            raise PlanError(f"request {i} is to be preempted but is not running")
        if not rows.hold(i):
            raise PlanError(f"request {i} is to be preempted but is on another replica")
        a.preempt[n] = i
    a.iv[N_PREEMPT] = len(victims)


def _write_chunks(
    q: Any,
    a: Any,
    chunks: Sequence[tuple[int, int]],
    admit: Iterable[int] | None,
    rows: Rows,
    victims: list[int],
) -> None:
    _room(a, len(chunks))
    allowed = None if admit is None else {int(i) for i in admit}
    admitted = []
    for n, (i, tokens) in enumerate(chunks):
        if not 0 <= i < len(q.phase) or q.phase[i] not in (WAITING, PREFILL):
            state = (
                "finished" if 0 <= i < len(q.phase) and q.phase[i] == DONE else "not waiting or prefilling"
            )
            raise PlanError(f"request {i} has a chunk but is {state}")
        if not rows.hold(i):
            raise PlanError(f"request {i} has a chunk but is on another replica")
        if q.phase[i] == WAITING:
            if allowed is not None and i not in allowed:
                raise PlanError(f"request {i} waits and has a chunk but is not in `admit`")
            admitted.append(int(i))
        a.chunk_id[n], a.chunk_tokens[n], a.chunk_reserve[n] = int(i), int(tokens), 0
    if allowed is not None and not allowed <= {int(i) for i, _ in chunks}:
        raise PlanError(
            f"requests {sorted(allowed - {int(i) for i, _ in chunks})} are admitted without a chunk"
        )
    a.iv[N_CHUNKS] = len(chunks)
    rows.planned(admitted, victims)


def _write_holds(q: Any, r: Any, a: Any, wanted: set[int], victims: list[int]) -> None:
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

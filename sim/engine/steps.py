"""What launches and completions do to requests, whichever lane they run on."""

from __future__ import annotations

from typing import Any

from sim.engine.cohort import (
    add_ready,
    drop_partial,
    fail,
    finish,
    join,
    leave,
    log_gap,
    open_epoch,
    widen_epochs,
)
from sim.engine.handover import hand_over, tell
from sim.engine.layout import (
    BLOCK,
    CHAIN_LEFT,
    COHORT,
    CONTEXT,
    DECISIONS,
    DECODE,
    E_BLOCKS,
    E_CHUNK,
    E_PHASE,
    E_SLOTS,
    E_TWICE,
    FREE,
    HELD,
    IN_CHUNKS,
    IN_FALLBACK,
    LAST_END,
    LAUNCH_SM,
    LEAVES,
    N_HEAP,
    N_HOLD,
    N_JOINING,
    N_PARTIAL,
    N_READY,
    N_RUN,
    N_STEPLOG,
    NOW,
    OVERRUN_BLOCKS,
    PREFILL,
    READY,
    SM_CLASSES,
    STAYS,
    STEP,
    STEP_WIDTH,
    WAITING,
)
from sim.engine.queues import push_running, remove_waiting
from sim.jit import jit


@jit
def log_step(
    q: Any,
    r: Any,
    start: float,
    end: float,
    lane: int,
    sms: int,
    layers: int,
    tokens: int,
    batch: int,
    context: int,
    slowdown: float,
    reason: int,
) -> None:
    """One row of the step log, written before the launch's tokens are committed; SM-seconds as just split."""
    chunks, history = 0, 0
    if tokens > 0:
        chunks = r.iv[IN_CHUNKS]
        for c in range(chunks):
            history += q.computed[r.chunk_id[c]]
    at = r.iv[N_STEPLOG] * STEP_WIDTH
    r.steplog[at] = start
    r.steplog[at + 1] = end
    r.steplog[at + 2] = float(lane)
    r.steplog[at + 3] = float(sms)
    r.steplog[at + 4] = float(layers)
    r.steplog[at + 5] = float(tokens)
    r.steplog[at + 6] = float(chunks)
    r.steplog[at + 7] = float(history)
    r.steplog[at + 8] = float(batch)
    r.steplog[at + 9] = float(context)
    r.steplog[at + 10] = slowdown
    for n in range(SM_CLASSES):
        r.steplog[at + 11 + n] = r.fv[LAUNCH_SM + n]
    r.steplog[at + 11 + SM_CLASSES] = float(reason)
    r.steplog[at + 12 + SM_CLASSES] = float(r.iv[IN_FALLBACK] if tokens > 0 else 0)
    r.iv[N_STEPLOG] += 1


@jit
def commit_decode(q: Any, r: Any, end: float) -> None:
    """Every member gets a token at `end`; those that have all theirs leave."""
    iv = r.iv
    joining = iv[N_JOINING]
    veterans = iv[COHORT] - joining
    if veterans > 0:
        gap = end - r.fv[LAST_END]
        log_gap(r, gap, end, veterans)
        widen_epochs(r, gap)
    for n in range(joining):
        i = r.ready[n]
        gap = end - q.last_s[i]
        log_gap(r, gap, end, 1)
        q.max_itl_s[i] = max(q.max_itl_s[i], gap)
    iv[CONTEXT] += iv[COHORT]
    iv[STEP] += 1
    r.fv[LAST_END] = end
    if joining > 0:
        open_epoch(q, r, iv[STEP])
        iv[N_READY] -= joining
        iv[N_JOINING] = 0
        for n in range(iv[N_READY]):
            r.ready[n] = r.ready[n + joining]
    while iv[N_HEAP] > 0 and r.heap_key[0] == iv[STEP]:
        i = r.heap_id[0]
        leave(q, r, i)
        if iv[CHAIN_LEFT] > 0:
            # steps that were launched ahead still write to its blocks
            iv[OVERRUN_BLOCKS] += q.blocks[i]
            q.blocks[i] = 0
        finish(q, r, i, end)


@jit
def commit_chunk(q: Any, r: Any, i: int, tokens: int, end: float) -> None:
    """A chunk of request i is computed; the last one of its prompt yields a token."""
    q.computed[i] += tokens
    if q.computed[i] < q.target[i]:
        return
    drop_partial(r, i)
    if q.generated[i] == 0:
        q.first_token_s[i] = end
    else:
        gap = end - q.last_s[i]
        log_gap(r, gap, end, 1)
        q.max_itl_s[i] = max(q.max_itl_s[i], gap)
    q.generated[i] += 1
    q.last_s[i] = end
    if q.generated[i] == q.output[i]:
        finish(q, r, i, end)
    elif q.hands_over[i] == LEAVES:
        hand_over(q, r, i, end)
    else:
        add_ready(q, r, i)
        if q.hands_over[i] == STAYS:
            tell(r, i)


@jit
def take_chunk(q: Any, r: Any, a: Any, c: int) -> None:
    """Validate chunk c of the plan, admit its request if it waits, and hold its blocks."""
    iv = r.iv
    i, tokens = a.chunk_id[c], a.chunk_tokens[c]
    if q.phase[i] == WAITING:
        if iv[N_RUN] + 1 >= len(r.ready):
            fail(r, E_SLOTS, i)
            return
        remove_waiting(q, r, i, r.fv[NOW])
        push_running(q, r, i, r.fv[NOW])
        if q.first_scheduled_s[i] != q.first_scheduled_s[i]:
            q.first_scheduled_s[i] = r.fv[NOW]
        q.phase[i] = PREFILL
        r.partial[iv[N_PARTIAL]] = i
        iv[N_PARTIAL] += 1
    elif q.phase[i] != PREFILL:
        fail(r, E_PHASE, i)
        return
    # `joined` means nothing before decoding: it marks the decision in which a chunk was taken
    if q.joined[i] == -iv[DECISIONS]:
        fail(r, E_TWICE, i)
        return
    q.joined[i] = -iv[DECISIONS]
    if tokens < 1 or tokens > q.target[i] - q.computed[i]:
        fail(r, E_CHUNK, i)
        return
    reserve = max(a.chunk_reserve[c], q.computed[i] + tokens)
    need = -(-min(reserve, q.target[i]) // iv[BLOCK]) - q.blocks[i]
    if need > iv[FREE]:
        fail(r, E_BLOCKS, i)
        return
    if need > 0:
        iv[FREE] -= need
        q.blocks[i] += need
    r.chunk_id[c] = i
    r.chunk_tokens[c] = tokens


@jit
def form_cohort(q: Any, r: Any, a: Any) -> None:
    """Members that are to sit out leave; ready requests that may decode join, in order."""
    iv = r.iv
    for n in range(a.iv[N_HOLD]):
        i = a.hold[n]
        if q.phase[i] == DECODE:
            leave(q, r, i)
            add_ready(q, r, i)
        elif q.phase[i] != READY:
            fail(r, E_PHASE, i)
            return
        q.phase[i] = HELD
    joining = 0
    for n in range(iv[N_READY]):
        i = r.ready[n]
        if q.phase[i] == READY:
            # stable partition: joiners in front, held ones behind
            for m in range(n, joining, -1):
                r.ready[m] = r.ready[m - 1]
            r.ready[joining] = i
            joining += 1
    iv[N_JOINING] = joining
    for n in range(joining):
        join(q, r, r.ready[n])
    for n in range(joining, iv[N_READY]):
        q.phase[r.ready[n]] = READY


@jit
def off_coverage(q: Any, r: Any, p: Any, tokens: int, batch: int, context: int) -> int:
    """1 if a pass about to be committed is larger than what the profile covers, else 0."""
    if tokens + batch > p.cover_tokens or batch > p.cover_batch or context > p.cover_context * batch:
        return 1
    if tokens > 0:
        for c in range(r.iv[IN_CHUNKS]):
            if r.chunk_tokens[c] > p.cover_chunk or q.computed[r.chunk_id[c]] > p.cover_history:
                return 1
    return 0

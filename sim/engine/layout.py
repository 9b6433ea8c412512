"""The engine's state as plain arrays (lists under CPython, see `sim.columns`) and its index names.

A request is a row number of the workload. What all members of the decode batch share is kept once: the cohort
of decoding requests advances together, so a step costs the same whether it holds one request or a thousand,
and a request is touched only when something happens to it alone (`sim.engine.cohort`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.columns import Columns, columns
from sim.cost.fallbacks import MOST_FALLBACKS
from sim.workload.workload import Workload

# phases of a request
NEW, WAITING, PREFILL, READY, HELD, DECODE, DONE = 0, 1, 2, 3, 4, 5, 6
HANDED = 7  # its first token is made here, the others will be elsewhere

# Replica.iv: integers of one replica
N_WAIT, WAIT_HEAD, WAIT_TAIL = 0, 1, 2  # queue of waiting requests (linked through Requests.prev/next)
N_RUN, RUN_HEAD, RUN_TAIL = 3, 4, 5  # admitted requests in running order, linked likewise
RUN_ORDER = 6  # BY_ADMISSION or BY_ARRIVAL
FREE, TOTAL, BLOCK = 7, 8, 9  # KV blocks free and in all; tokens per block
COHORT, CONTEXT, STEP = 10, 11, 12  # decoding requests, sum of their computed tokens, cohort steps so far
N_READY, N_JOINING, N_PARTIAL, N_HEAP, N_EPOCH = 13, 14, 15, 16, 17
BUSY, BURST, COMMITTED = 18, 19, 20  # lane: in flight?, steps of its burst, of which committed
IN_DECODE, IN_CHUNKS, IN_TOKENS = 21, 22, 23  # what is in flight: cohort?, chunks, prefill tokens
N_LOG, N_DONE, N_STEPLOG, LOG_STEPS = 24, 25, 26, 27
ITERATIONS, DECISIONS, FINISHED_COUNT = 28, 29, 30
DENSE_TOKENS, HEAD_ROWS, PAIRS, PREFILL_KV, DECODE_KV = 31, 32, 33, 34, 35
GRAPH_LAUNCHES, EAGER_LAUNCHES, FLAGGED = 36, 37, 38  # passes of decodes alone, and with prompts
ERROR, ERROR_ID = 39, 40
INBOX_NEXT = 41  # first entry of the inbox that has not arrived yet
DUE, LAYERS_DONE = 42, 43  # two lanes: a decision is due; layers that the open prefill batch has run
SMS, MODEL_LAYERS = 44, 45
CHAIN_LEFT, CHAIN_BLOCKS, OVERRUN_BLOCKS = 46, 47, 48  # decode steps launched ahead, see sim.engine.lanes
PARKED, PARKED_TOKENS, PARKED_LAYERS = 49, 50, 51  # chunks, tokens, layers done of the parked prefill batch
LENDING = 52
IN_FALLBACK = 53  # why what is in flight could not take its fast path; 0: it did, or has none
WAIT_ORDER = 54  # BY_COMING or BY_PRIORITY
CHAIN_AT = 55
EVALUATIONS = 56  # splits of the SMs that the policy has priced
# pools (`sim.engine.handover`): requests handed over and not taken yet; blocks of these and of KV on its way here;
# blocks that came or will come for requests outside the batch; blocks promised to requests; blocks on the host
HANDED_OVER, HANDED_BLOCKS, INCOMING, RESERVED, ON_HOST = 57, 58, 59, 60, 61
POLLED, UNPOLLED = 62, 63  # two lanes: is a pass seen done only as a decode step ends; is one unseen?
# `sim.engine.ragged`: longest members kept in order; by how many tokens the longest stands out, for how many pieces
N_LEADERS, OVERHANG, OVERHANG_SPARE = 64, 65, 66
# steps with chunks and decodes: fused, and by reason for separate kernels (`sim.cost.fallbacks`)
FAST_PATHS = 67
LANES = FAST_PATHS + 1 + MOST_FALLBACKS  # first of the lanes' own fields
LANE_BUSY, LANE_KIND, LANE_PART, LANE_LAYERS, LANE_BATCH, LANE_CONTEXT = 0, 1, 2, 3, 4, 5
LANE_TOKENS, LANE_CHUNKS, LANE_REASON, LANE_COMMITS = 6, 7, 8, 9
LANE_INTEGERS = 10
N_METER = LANES + 2 * LANE_INTEGERS  # readings of the meter (`sim.engine.meter`) since last drained
INTEGERS = N_METER + 1

BY_ADMISSION, BY_ARRIVAL = 0, 1
LEAVES, STAYS = 1, 2
# waiting: as they come, the evicted in front; or by priority (lower first), then by arrival, the evicted too
BY_COMING, BY_PRIORITY = 0, 1
WAIT_ORDERS = {"fcfs": BY_COMING, "priority": BY_PRIORITY}

# Replica.fv: floats of one replica
NOW, STEP_START, LAST_END = 0, 1, 2  # last boundary; start of the step in flight; end of the last cohort step
BUSY_S, GPU_S, HOST_BOUND_S, SWITCH_S, KV_BLOCK_S = 3, 4, 5, 6, 7  # SWITCH_S: price of a lane's new SM set
WAIT_AREA, WAIT_SINCE, RUN_AREA, RUN_SINCE = 8, 9, 10, 11
# of every step of the launch: SM-seconds of decodes but for attention; host seconds
IN_SM_S, IN_HOST_S = 12, 13
# SM-seconds by class (`sim.engine.sm_time`), all launches; then the same fields of the launch just committed
SM_S, TAIL_SM_S, HOST_SM_S, CONTENTION_SM_S, SWITCH_SM_S, LENT_SM_S = 14, 15, 16, 17, 18, 19
ATTENTION_SM_S, LOCKSTEP_SM_S = 20, 21
SM_CLASSES = 8
LAUNCH_SM = 22
IDLE_LANE_SM_S = 30
DECISION_S = 31  # what deciding has cost by the policy's own model of it
HANDED_AREA, HANDED_BLOCK_S, HANDED_SINCE = 32, 33, 34  # integrals of HANDED_OVER and HANDED_BLOCKS over time
# `sim.engine.heat`: what has been drawn beyond the power cap, when; of two lanes how fast, the bound, idle time's rate
SPENT, HEAT_AT, HEAT_RATE, HEAT_ROOM, HEAT_IDLE = 35, 36, 37, 38, 39
LINK_LOST_S = 40  # what KV transfers beside it have cost the replica's compute, not yet charged to a step
AHEAD_SPENT = 41  # `SPENT` at the step that is being priced, while a burst is
LANES_F = 42
# see sim.engine.lanes. GPU seconds, host's beyond them; SM-seconds active, held
LANE_START, LANE_SINCE, LANE_LEFT, LANE_FACTOR, LANE_SOLO = 0, 1, 2, 3, 4
LANE_GPU, LANE_HOST, LANE_SM, LANE_HELD = 5, 6, 7, 8
LANE_SWITCH, LANE_ATTENTION, LANE_CLASH, LANE_CLASHED, LANE_LENDS, LANE_LENT = 9, 10, 11, 12, 13, 14
LANE_FASTER, LANE_TOOK, LANE_BESIDE = 15, 16, 17
LANE_DRAWS, LANE_HOT = 18, 19  # what the launch draws beyond the power cap; factor of the clock on it
LANE_FLOATS = 20
METER_DUE = LANES_F + 2 * LANE_FLOATS  # when the next reading is due; end of the last launch
METER_END = METER_DUE + 1
FLOATS = METER_DUE + 2

WHOLE_GPU = 0  # the price partition of all SMs
PREFILL_LANE, DECODE_LANE = 0, 1
PREFILL_ITEM, DECODE_ITEM, MIXED_ITEM = 1, 2, 3

# Plan.iv
DECODE_ALL, N_CHUNKS, N_PREEMPT, N_HOLD, REPEAT, GUARD, TO_BACK = 0, 1, 2, 3, 4, 5, 6
# of two lanes: launch on the prefill lane (layers > 0; with the decodes aboard if P_MIXED) and on the decode lane
P_LAYERS, P_PART, P_MIXED, D_LAUNCH, D_PART = 7, 8, 9, 10, 11
# decode steps launched ahead; decode takes SMs that prefill's waves leave idle; set the open prefill batch aside for
# the plan's chunks; why the plan splits the SMs as it does (a number of the policy's own, for the step log)
D_STEPS, LEND, PARK, REASON = 12, 13, 14, 15
P_DELAY_NS, D_DELAY_NS = 16, 17  # host time before the launch's first kernel: deciding, synchronising
# pools: waiting requests with KV that are to decode; victims go to the host, with their KV
N_JOIN, SWAP = 18, 19
# the end of the pass is seen, and its tokens appear, only as a decode step ends (if one is running)
P_POLL = 20
PLAN_INTEGERS = 21

MANY = 1 << 40  # `repeat_for` without a bound of its own
BURST_CAP = 512
LOG_CAP = 1 << 15
METER_CAP = 1 << 12
METER_FIELDS = (
    "time_s",
    "gpu_s",
    "launches",
    "dense_tokens",
    "head_rows",
    "prefill_pairs",
    "prefill_kv_tokens",
    "decode_kv_tokens",
)
METER_WIDTH = len(METER_FIELDS)
POLICY_SLOTS = 128
LEADERS = 32  # longest contexts of the cohort that are kept in order
CHAIN_CAP, CHAIN_WIDTH = 64, 4  # decode steps launched ahead: seconds, of the GPU; SM-seconds, of attention

# errors that a plan can make, Replica.iv[ERROR]
E_BLOCKS, E_CHUNK, E_PHASE, E_SLOTS, E_TWICE, E_TABLE, E_LANE = 1, 2, 3, 4, 5, 6, 7
ERROR_TEXT = {
    E_BLOCKS: "needs more KV blocks than are free",
    E_CHUNK: "was given a chunk that is empty or longer than what is left of its prompt",
    E_PHASE: "was named for something that its state does not allow",
    E_SLOTS: "is one more running request than the policy declared as its maximum",
    E_TWICE: "was repeated within one plan",
    E_LANE: "was launched on a lane that is busy, on SM sets that the policy did not declare, "
    "with too many steps ahead, or evicted or parked in flight",
    E_TABLE: "makes the step larger than the price tables that the policy asked for",
}


@columns
class Requests(Columns):
    """Columns over all requests of the workload, shared by all replicas."""

    arrival_s: Any
    prompt: Any
    output: Any  # hidden from policies
    max_new: Any
    priority: Any
    slo_class: Any
    phase: Any
    computed: Any  # tokens whose KV is in the pool; for cohort members as of joining
    target: Any  # tokens to compute before the next token can be sampled
    generated: Any  # for cohort members as of joining
    joined: Any  # cohort step at joining
    blocks: Any  # KV blocks held; for cohort members as of joining
    preempted: Any
    first_scheduled_s: Any
    first_token_s: Any
    finish_s: Any
    last_s: Any  # time of the last token; of cohort members it is fv[LAST_END]
    max_itl_s: Any
    prev: Any
    next: Any
    heap_at: Any
    hands_over: Any  # of pools: LEAVES or STAYS after its first token; 0: it has, or nobody wants to know
    reserved: Any  # blocks promised to it by a policy that reserves
    sat_out: Any  # iterations that it has sat out before, and the one since when it does (-1: it does not)
    sat_since: Any


@columns
class Replica(Columns):
    """One replica: scalars by index, and small arrays bounded by its number of running requests."""

    iv: Any
    fv: Any
    block_phase: Any  # cohort members by the step (mod block size) at which they need a new block
    heap_key: Any  # finish heap: cohort step at which a member finishes
    heap_id: Any
    ready: Any  # requests with their first token, not in the cohort yet
    partial: Any  # requests with part of their prompt computed, in running order
    epoch_key: Any  # suffix maxima of the cohort's gaps, see cohort.py
    epoch_max: Any
    epoch_live: Any
    leader_key: Any  # the cohort's longest contexts, as they would be at step 0, and whose they are
    leader_id: Any
    piece: Any  # of these, while the overhang is measured: longest piece, pieces
    pieces: Any
    chunk_id: Any
    chunk_tokens: Any
    park_id: Any  # chunks of the parked prefill batch
    park_tokens: Any
    chain: Any  # prices of the decode steps launched ahead, CHAIN_WIDTH numbers each
    ends: Any  # ends of the steps in flight
    step_gpu_s: Any  # and their GPU seconds; with chunks also SM-seconds in all, and of decode attention
    step_sm_s: Any
    step_attention_sm_s: Any
    step_hot: Any  # factors of the clock on these seconds, and `SPENT` at the end of each
    step_spent: Any
    log_gap: Any
    log_count: Any
    log_end: Any
    done: Any  # finished since last drained
    steplog: Any  # flat rows of STEP_FIELDS numbers
    meter: Any  # flat rows of METER_FIELDS: running sums of work
    inbox: Any  # requests known to arrive here, by arrival; the loop takes them by itself
    policy_i: Any  # the policy's own state
    policy_f: Any
    policy_sms: Any  # SMs of each price partition


@columns
class PlanArrays(Columns):
    """What a compiled policy writes: one launch on the lane, with its victims."""

    iv: Any
    chunk_id: Any
    chunk_tokens: Any
    chunk_reserve: Any  # tokens for which blocks are to be held
    preempt: Any
    hold: Any  # decodable requests that sit this step out
    join: Any  # waiting requests with KV that are to decode


STEP_FIELDS = (
    "start_s",
    "end_s",
    "lane",
    "sms",
    "layers",
    "prefill_tokens",
    "chunks",
    "history_tokens",
    "decode_batch",
    "context_sum",
    "slowdown",
    "active_sm_s",
    "tail_sm_s",
    "host_sm_s",
    "contention_sm_s",
    "switch_sm_s",
    "lent_sm_s",
    "attention_sm_s",
    "lockstep_sm_s",
    "reason",
    "fallback",
)
STEP_WIDTH = len(STEP_FIELDS)


def array(values: Any, dtype: Any) -> Any:
    """A flat array of its own; CPython gets lists instead (`sim.native.HotCode`)."""
    return np.array(values, dtype=dtype)


def _ints(n: int, fill: int = 0) -> Any:
    return array(np.full(n, fill), np.int64)


def _floats(n: int, fill: float = 0.0) -> Any:
    return array(np.full(n, fill), np.float64)


def make_requests(workload: Workload) -> Requests:
    """State columns for a workload, nothing started."""
    n = len(workload)
    nan = float("nan")
    return Requests(
        arrival_s=array(workload.arrival_s, np.float64),
        prompt=array(workload.prompt_tokens, np.int64),
        output=array(workload.output_tokens, np.int64),
        max_new=array(workload.max_new_tokens, np.int64),
        priority=array(workload.priority, np.int64),
        slo_class=array(workload.slo_class, np.int64),
        phase=_ints(n, NEW),
        computed=_ints(n),
        target=array(workload.prompt_tokens, np.int64),
        generated=_ints(n),
        joined=_ints(n),
        blocks=_ints(n),
        preempted=_ints(n),
        first_scheduled_s=_floats(n, nan),
        first_token_s=_floats(n, nan),
        finish_s=_floats(n, nan),
        last_s=_floats(n, nan),
        max_itl_s=_floats(n, 0.0),
        prev=_ints(n, -1),
        next=_ints(n, -1),
        heap_at=_ints(n, -1),
        hands_over=_ints(n),
        reserved=_ints(n),
        sat_out=_ints(n),
        sat_since=_ints(n, -1),
    )


def make_replica(
    num_blocks: int,
    block_size: int,
    max_seqs: int,
    run_order: int,
    record_steps: bool,
    inbox: Any,
    partitions: Sequence[int],
    layers: int,
    switch_s: float = 0.0,
    wait_order: int = BY_COMING,
    policy_slots: int = POLICY_SLOTS,
) -> Replica:
    """An idle replica with all its blocks free, to which the requests of `inbox` will come.

    `partitions`: SMs of each price partition, the whole GPU first. `switch_s`: time that a lane loses when it moves
    to another SM set.
    """
    slots = max_seqs + 1
    iv = _ints(INTEGERS)
    for index in (WAIT_HEAD, WAIT_TAIL, RUN_HEAD, RUN_TAIL):
        iv[index] = -1
    iv[FREE] = iv[TOTAL] = num_blocks
    iv[BLOCK] = block_size
    iv[RUN_ORDER] = run_order
    iv[WAIT_ORDER] = wait_order
    iv[LOG_STEPS] = int(record_steps)
    iv[SMS] = partitions[0]
    iv[MODEL_LAYERS] = layers
    for lane in range(2):
        iv[LANES + lane * LANE_INTEGERS + LANE_PART] = -1
    fv = _floats(FLOATS)
    fv[SWITCH_S] = switch_s
    return Replica(
        iv=iv,
        fv=fv,
        block_phase=_ints(block_size),
        heap_key=_ints(slots),
        heap_id=_ints(slots),
        ready=_ints(slots),
        partial=_ints(slots),
        epoch_key=_ints(2 * slots + 2),
        epoch_max=_floats(2 * slots + 2),
        epoch_live=_ints(2 * slots + 2),
        leader_key=_ints(LEADERS),
        leader_id=_ints(LEADERS),
        piece=_ints(LEADERS),
        pieces=_ints(LEADERS),
        chunk_id=_ints(slots),
        chunk_tokens=_ints(slots),
        park_id=_ints(slots),
        park_tokens=_ints(slots),
        chain=_floats(CHAIN_CAP * CHAIN_WIDTH),
        ends=_floats(BURST_CAP),
        step_gpu_s=_floats(BURST_CAP),
        step_sm_s=_floats(BURST_CAP),
        step_attention_sm_s=_floats(BURST_CAP),
        step_hot=_floats(BURST_CAP, 1.0),
        step_spent=_floats(BURST_CAP),
        log_gap=_floats(LOG_CAP + BURST_CAP + 2 * slots),
        log_count=_ints(LOG_CAP + BURST_CAP + 2 * slots),
        log_end=_floats(LOG_CAP + BURST_CAP + 2 * slots),
        done=_ints(LOG_CAP + BURST_CAP + 2 * slots),
        steplog=_floats((LOG_CAP + BURST_CAP) * STEP_WIDTH if record_steps else 1),
        meter=_floats((METER_CAP + 4 * BURST_CAP) * METER_WIDTH),
        inbox=array(inbox, np.int64),
        policy_i=_ints(policy_slots),
        policy_f=_floats(policy_slots),
        policy_sms=array(partitions, np.int64),
    )


def make_plan(max_seqs: int) -> PlanArrays:
    """Empty plan arrays for at most `max_seqs` running requests."""
    slots = max_seqs + 1
    return PlanArrays(_ints(PLAN_INTEGERS), *(_ints(slots) for _ in range(6)))

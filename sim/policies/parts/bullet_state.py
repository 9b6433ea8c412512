"""Names of Bullet's parameters and of what it remembers, for the modules `sim.policies.bullet*`."""

from __future__ import annotations

from typing import Any

from sim.engine.layout import DECISION_S, EVALUATIONS
from sim.jit import jit

# ki: limits, switches, costs in nanoseconds; then the price partitions of prefill in every split, and of decode
TOKENS, SEQS, SPARE, GROUP, CAP, LOOK_AHEAD = 0, 1, 2, 3, 4, 5
PARTITION, SCHEDULER, CONTENTION, ONLINE, SEARCH, REUSE, OVERLAP_MASKS = 6, 7, 8, 9, 10, 11, 12
HANDOVER, PREDICTION_NS, SYNC_NS, HANDOFF_NS, MASK_NS, BALANCE, SPLITS, PARTS = 13, 14, 15, 16, 17, 18, 19, 20
GREEDY, CLOSED_FORM, EXHAUSTIVE = 0, 1, 2
SEARCHES = ("greedy", "closed_form", "exhaustive")
BY_SLOWDOWN, BY_LIMIT = 0, 1
BALANCES = ("slowdown", "limit")
OFF, LAYER, OVERLAP, IDEAL = 0, 1, 2, 3
REUSES = ("off", "layer", "overlap", "ideal")

# kf: share of requests that may miss a limit, weight of an observation; then TTFT, TTFT a token, TPOT of each class
MISSES, WEIGHT, LIMITS = 0, 1, 2
CLASS_LIMITS = 3

# why the SMs are split as they are, for the step log
ALONE, LESS_DECODE, LESS_PREFILL, BALANCED, PAUSED, HANDED_OVER, KEPT = 0, 1, 2, 3, 4, 5, 6

# policy_i. The split in force and those that what is in flight runs on (WHOLE: all SMs); predictions of a decision;
# the work that it is about: a decode step, and a prefill batch with its mean history; BLOCKED: requests that had
# finished, and one, when no waiting one found blocks
SPLIT, P_SPLIT, D_SPLIT, ASKED, BATCH, CONTEXT_SUM, P_TOKENS, P_HISTORY = 0, 1, 2, 3, 4, 5, 6, 7
STARTED, P_SEEN, D_SEEN, SCAN_AT, QUEUE_LATE, KNEE, TAIL_BASE, BLOCKED, ORDER = (
    8,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    32,
)
WHOLE = -1

# policy_f. Alphas, and what was believed of the launches in flight: solo seconds, slowdown beside the neighbour; first
# token and limit of the request in the tail of TPOT (it has STEP - TAIL_BASE tokens after that); arrival and deadline
# of the most urgent request in the batch at hand; seconds of its pass by partition (below 0: not asked yet); scratch
P_ALPHA, D_ALPHA, P_SOLO, P_SLOW, D_SOLO, D_SLOW = 0, 1, 2, 3, 4, 5
TAIL_SINCE, TAIL_LIMIT, DEADLINE, DUE_SINCE = 6, 7, 8, 9
PASS_S, COSTS, SLACKS = 16, 64, 96
SCRATCH_SIZE = 32
SLOTS = SLACKS + SCRATCH_SIZE
MOST_PARTITIONS = COSTS - PASS_S


@jit
def start(r: Any, ki: Any) -> None:
    """Before the first decision: nothing observed, the middle split."""
    if r.policy_i[STARTED] == 1:
        return
    r.policy_i[STARTED] = 1
    r.policy_i[SPLIT] = ki[SPLITS] // 2
    r.policy_i[P_SPLIT] = WHOLE
    r.policy_i[D_SPLIT] = WHOLE
    r.policy_i[KNEE] = -1
    r.policy_f[P_ALPHA] = 1.0
    r.policy_f[D_ALPHA] = 1.0


@jit
def deciding_ns(r: Any, ki: Any, masks: int) -> int:
    """Nanoseconds that this decision has taken by the model of its cost, counted; `masks`: SM sets that it changes."""
    ns = r.policy_i[ASKED] * ki[PREDICTION_NS]
    r.iv[EVALUATIONS] += r.policy_i[ASKED]
    r.fv[DECISION_S] += 1e-9 * (ns + masks * ki[MASK_NS])
    r.policy_i[ASKED] = 0
    return int(ns)

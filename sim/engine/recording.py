"""From the state that a finished run leaves to its records: columns and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sim.cost.fallbacks import FALLBACKS
from sim.cost.fused_steps import fused_columns
from sim.cost.step_work import work_columns
from sim.engine.layout import (
    ATTENTION_SM_S,
    BUSY_S,
    CONTENTION_SM_S,
    DECISION_S,
    DECISIONS,
    DECODE_KV,
    DENSE_TOKENS,
    DONE,
    EAGER_LAUNCHES,
    EVALUATIONS,
    FAST_PATHS,
    FLAGGED,
    GPU_S,
    GRAPH_LAUNCHES,
    HANDED_AREA,
    HANDED_BLOCK_S,
    HEAD_ROWS,
    HOST_BOUND_S,
    HOST_SM_S,
    IDLE_LANE_SM_S,
    ITERATIONS,
    KV_BLOCK_S,
    LENT_SM_S,
    LOCKSTEP_SM_S,
    NEW,
    PAIRS,
    PREFILL_KV,
    RUN_AREA,
    SM_S,
    STEP_FIELDS,
    SWITCH_SM_S,
    TAIL_SM_S,
    WAIT_AREA,
)
from sim.engine.records import FINISHED, STATUS_NAMES, PoolRecords, RunRecords

if TYPE_CHECKING:
    from sim.engine.run import Cluster

Snapshot = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # integers and floats of one replica at a time

INTEGER_TOTALS = {
    "iterations": ITERATIONS,
    "decisions": DECISIONS,
    "dense_tokens": DENSE_TOKENS,
    "head_rows": HEAD_ROWS,
    "prefill_pairs": PAIRS,
    "prefill_kv_tokens": PREFILL_KV,
    "decode_kv_tokens": DECODE_KV,
    "launches_graph": GRAPH_LAUNCHES,
    "launches_eager": EAGER_LAUNCHES,
    "flagged": FLAGGED,
    "split_evaluations": EVALUATIONS,
    "fast_path_steps": FAST_PATHS,
    **{f"fallback/{reason}": FAST_PATHS + code for code, reason in FALLBACKS.items()},
}
FLOAT_TOTALS = {
    "busy_s": BUSY_S,
    "gpu_s": GPU_S,
    "host_bound_s": HOST_BOUND_S,
    "sm_active_s": SM_S,
    "sm_tail_s": TAIL_SM_S,
    "sm_host_s": HOST_SM_S,
    "sm_contention_s": CONTENTION_SM_S,
    "sm_switch_s": SWITCH_SM_S,
    "sm_lent_s": LENT_SM_S,
    "sm_attention_s": ATTENTION_SM_S,
    "sm_lockstep_s": LOCKSTEP_SM_S,
    "sm_idle_lane_s": IDLE_LANE_SM_S,
    "kv_block_s": KV_BLOCK_S,
    "decision_s": DECISION_S,
    "waiting_s": WAIT_AREA,
    "running_s": RUN_AREA,
    "handover_s": HANDED_AREA,
}


def _totals(snapshots: list[Snapshot]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, at in INTEGER_TOTALS.items():
        totals[name] = int(sum(int(iv[at]) for iv, _ in snapshots))
    for name, at in FLOAT_TOTALS.items():
        totals[name] = float(sum(float(fv[at]) for _, fv in snapshots))
    totals["kv_block_s"] += float(sum(float(fv[HANDED_BLOCK_S]) for _, fv in snapshots))
    return totals


def _request_frame(cluster: Cluster) -> pd.DataFrame:
    w, q = cluster.workload, cluster.q  # arrays are taken over, not copied: nothing writes to them any more
    status = cluster.status.copy()
    status[np.asarray(q.phase) == DONE] = FINISHED
    replica = np.where(np.asarray(q.phase) == NEW, -1, cluster.replica_of)
    nan_where_never = np.array(q.max_itl_s, np.float64)
    generated = np.asarray(q.generated, np.int64)
    nan_where_never[nan_where_never == 0.0] = np.nan
    never = np.full(len(w), np.nan)
    moved = {"decode_replica": replica, "transfer_s": never, "pull_wait_s": never, **cluster.moved()}
    return pd.DataFrame(
        {
            "request_id": np.arange(len(w), dtype=np.int64),
            "arrival_s": np.asarray(q.arrival_s, np.float64),
            "prompt_tokens": w.prompt_tokens,
            "output_tokens": w.output_tokens,
            "slo_class": np.array(w.slo_classes, dtype=object)[w.slo_class],
            "priority": w.priority,
            "replica": replica.astype(np.int32),
            "status": np.array(STATUS_NAMES, dtype=object)[status],
            "reason": cluster.reasons,
            "first_scheduled_s": np.asarray(q.first_scheduled_s, np.float64),
            "first_token_s": np.asarray(q.first_token_s, np.float64),
            "finish_s": np.asarray(q.finish_s, np.float64),
            "max_itl_s": nan_where_never,
            "generated_tokens": generated,
            "preemptions": np.asarray(q.preempted, np.int32),
            "decode_replica": moved["decode_replica"].astype(np.int32),
            "transfer_s": moved["transfer_s"],
            "pull_wait_s": moved["pull_wait_s"],
        },
        copy=False,
    )


def _pooled(logs: list[list[np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """The replicas' logs as one array; the parts go at once, since a long run's are large."""
    pooled = np.concatenate([block for blocks in logs for block in blocks])
    for blocks in logs:
        blocks.clear()
    return pooled


def make_records(cluster: Cluster, end_s: float) -> RunRecords:
    """Records of a run that ended at `end_s`."""
    final = [replica.snapshot(end_s) for replica in cluster.replicas]
    for replica in cluster.replicas:
        replica.disband()
    zero = [(np.zeros_like(iv), np.zeros_like(fv)) for iv, fv in final]
    start = cluster.window_start or zero
    window = [(iv - a, fv - b) for (iv, fv), (a, b) in zip(final, start, strict=True)]
    steps = None
    if any(len(block) for replica in cluster.replicas for block in replica.steps):
        frames = []
        for replica in cluster.replicas:
            frame = pd.DataFrame(np.concatenate(replica.steps), columns=list(STEP_FIELDS))
            frame.insert(0, "replica", replica.index)
            frames.append(frame)
        steps = pd.concat(frames, ignore_index=True)
        steps = steps.sort_values(["start_s", "replica"], kind="stable", ignore_index=True)
        whole = [name for name in STEP_FIELDS if name != "slowdown" and not name.endswith("_s")]
        steps[whole] = steps[whole].astype(np.int64)
        steps["graph"] = steps["chunks"] == 0
        if cluster.split_reasons:
            words = np.array(cluster.split_reasons, dtype=object)
            steps["split_reason"] = words[steps["reason"].to_numpy()]
        _add_work(cluster, steps)
        for name, column in fused_columns(cluster.groups[0].cost, cluster.attention, steps).items():
            steps[name] = column
    return RunRecords(
        requests=_request_frame(cluster),
        itl_s=_pooled([replica.gaps for replica in cluster.replicas]),
        itl_count=_pooled([replica.counts for replica in cluster.replicas]),
        itl_end_s=_pooled([replica.gap_ends for replica in cluster.replicas]),
        totals=_totals(final),
        window_totals=_totals(window),
        window_s=(min(cluster.warmup_s, end_s) if cluster.window_start else 0.0, end_s),
        end_s=end_s,
        num_blocks=cluster.groups[0].deployment.num_blocks,
        block_size=cluster.groups[0].deployment.block_size,
        replicas=len(cluster.replicas),
        steps=steps,
        pools=_pools(cluster, final, window),
        link=cluster.link_facts(),
        fused_label=cluster.groups[0].cost.fused_label(cluster.attention),
        readings=[np.concatenate(replica.readings) for replica in cluster.replicas],
    )


def _add_work(cluster: Cluster, steps: pd.DataFrame) -> None:
    """Bytes and watts of every launch, by the prices of its replica."""
    first = 0
    for group in cluster.groups:
        mine = steps["replica"].between(first, first + group.count - 1)
        for name, column in work_columns(group.cost, steps[mine]).items():
            steps.loc[mine, name] = column
        first += group.count


def _pools(cluster: Cluster, final: list[Snapshot], window: list[Snapshot]) -> list[PoolRecords]:
    """Sums by pool; none for replicas that do everything."""
    made, first = [], 0
    for group in cluster.groups:
        mine = slice(first, first + group.count)
        first += group.count
        if group.pool:
            d, cost = group.deployment, group.cost
            sums = _totals(final[mine]), _totals(window[mine])
            made.append(PoolRecords(group.pool, cost.gpu.name, cost.tp, group.count, d.num_blocks, *sums))
    return made

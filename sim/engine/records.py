"""What a finished run leaves behind: columns and counters, never engine objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.engine.layout import METER_FIELDS

__all__ = ["METER_FIELDS", "STATUS_NAMES", "PoolRecords", "RunRecords"]

FINISHED, REJECTED, UNFINISHED = 0, 1, 2
STATUS_NAMES = ("finished", "rejected", "unfinished")


@dataclass(frozen=True)
class PoolRecords:
    """Part of a run with pools: `tp` GPUs to each of `replicas`; `num_blocks`: KV blocks of one. Sums as the run's."""

    name: str
    gpu: str
    tp: int
    replicas: int
    num_blocks: int
    totals: dict[str, float]
    window_totals: dict[str, float]


@dataclass
class RunRecords:
    """Raw outcome of one simulated run.

    `requests`: one row a request, in workload order: `request_id`, `arrival_s`, `prompt_tokens`,
    `output_tokens`, `slo_class` (name), `priority`, `replica` (-1 if never routed), `status` (name),
    `reason` (why rejected, else ""), `first_scheduled_s`, `first_token_s`, `finish_s`, `max_itl_s`
    (NaN where not reached), `generated_tokens`, `preemptions`; with pools also `decode_replica`, `transfer_s` (the part
    of the KV's transfer after the first token that is no wait for room) and `pull_wait_s` (that wait), else NaN.

    `itl_s`, `itl_count`, `itl_end_s`: every gap between consecutive tokens of a request, pooled; equal gaps of
    one step are one row with a count; `itl_end_s` is when the later token appeared.

    `totals`: sums over the whole run, all replicas: `iterations` (launches), `decisions`, `busy_s` (GPU time with a
    launch in flight, replica-seconds), `gpu_s` (solo and without host time, added over lanes), `host_bound_s`
    (host time beyond the GPU's), `dense_tokens`, `head_rows`, `prefill_pairs` (query-key pairs of causal prefill
    attention), `prefill_kv_tokens` (keys read by prefill attention), `decode_kv_tokens`, `kv_block_s` (used
    blocks x seconds), `waiting_s` and `running_s` (integrals of the queue and running lengths), `handover_s` (that of
    the requests between two replicas), `launches_graph`
    and `launches_eager` (forward passes of decodes alone and with prompts; one in layer groups counts once),
    `flagged` (steps outside the profile's coverage), `split_evaluations` (splits of the SMs that a policy priced) and
    `decision_s` (what its decisions take by its own model of their cost). SM-seconds of the busy time by class
    (`sim.engine.sm_time`), which add up to its whole: `sm_active_s`, `sm_tail_s`, `sm_host_s`, `sm_contention_s`,
    `sm_switch_s`, `sm_lent_s`, `sm_idle_lane_s`; parts of the active ones: `sm_attention_s`, `sm_lockstep_s`.
    `window_totals`: the same from the end of warm-up on; a launch belongs to the part in which it ends, but busy time
    and SM-seconds to both in proportion, and `prefill_pairs` and `prefill_kv_tokens` of a policy of two lanes to that
    in which it starts.

    `steps`: one row a launch if asked for: `replica`, `start_s`, `end_s`, `lane`, `sms`, `layers`,
    `prefill_tokens`, `chunks`, `history_tokens`, `decode_batch`, `context_sum`, `slowdown` (time over solo time),
    SM-seconds by class (`active_sm_s`, ...), `hbm_bytes`, `joules` above idle and mean
    `watts` of a GPU, `reason` (the policy's number for its split; `split_reason` in
    words, where the policy has them), `fallback` (why attention
    was not fused, a number of `sim.cost.fallbacks`), `graph`; in a run with fused attention also `virtual_ctas` (decode
    CTAs in one CTA), `tile` and `occupancy` (CTAs on an SM) of the steps that ran fused.

    `pools`: the same sums by pool, empty for a run without; `num_blocks` is then that of the first pool's replicas.
    `fused_label`: where the prices of fused attention come from; empty for a run without.
    `readings`: of each replica, in the order of the pools, running sums of its work at times throughout the run
    (`sim.engine.meter`, columns METER_FIELDS).
    `link`: what the links between pools are (`sim.engine.link.Link`), with `sent_gb` and `busy_s` of all.
    """

    requests: pd.DataFrame
    itl_s: NDArray[np.float64]
    itl_count: NDArray[np.int32]
    itl_end_s: NDArray[np.float64]
    totals: dict[str, float]
    window_totals: dict[str, float]
    window_s: tuple[float, float]
    end_s: float
    num_blocks: int
    block_size: int
    replicas: int
    steps: pd.DataFrame | None = None
    pools: list[PoolRecords] = field(default_factory=list)
    link: dict[str, Any] | None = None
    fused_label: str = ""
    notes: list[str] = field(default_factory=list)
    readings: list[NDArray[np.float64]] = field(default_factory=list)

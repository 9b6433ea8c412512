"""Where the GPU's time, arithmetic, bandwidth, memory and energy went, from the counters of a run's window.

FLOPs and bytes are those that the model's shapes ask for (`sim.cost.work`), so `tensor_active_pct` is model
FLOP utilisation (share of the data sheet's peak) and `hbm_util_pct` the share of the nominal bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.shapes import Launch
from sim.cost.work import total_work
from sim.engine.records import RunRecords
from sim.metrics.power import Power, power_figures, power_of
from sim.metrics.window import gaps_in


@dataclass(frozen=True)
class Part:
    """Replicas alike within a run: their sums over the window, prices, replica-seconds and tokens decoded, and watts
    over time, None where the prices say nothing of them."""

    totals: Mapping[str, float]
    cost: Any
    seconds: float
    num_blocks: int
    decoded: float
    fused_label: str
    power: Power | None = None


def parts_of(records: RunRecords, cost: Any, pool_costs: Mapping[str, Any]) -> dict[str, Part]:
    """The pools of a run by name, or all of it under an empty name; tokens are split by the KV that decoding read."""
    span = records.window_s[1] - records.window_s[0]
    decoded = int(gaps_in(records)[1].sum(dtype=np.int64))
    if not records.pools:
        blocks, sums = records.num_blocks, records.window_totals
        power = power_of(cost, records.readings, records.window_s)
        return {"": Part(sums, cost, span * records.replicas, blocks, decoded, records.fused_label, power)}
    read = max(1.0, sum(pool.window_totals["decode_kv_tokens"] for pool in records.pools))
    made, first = {}, 0
    for pool in records.pools:
        priced = pool_costs.get(pool.name, cost)
        mine = records.readings[first : first + pool.replicas]
        first += pool.replicas
        made[pool.name] = Part(
            pool.window_totals,
            priced,
            span * pool.replicas,
            pool.num_blocks,
            decoded * pool.window_totals["decode_kv_tokens"] / read,
            records.fused_label,
            power_of(priced, mine, records.window_s),
        )
    return made


# what a share is a share of: figures of several pools are averaged with these weights
WEIGHTS: dict[str, Callable[[Part], float]] = {
    "busy_pct": lambda part: part.seconds * part.cost.tp,
    "host_bound_pct": lambda part: part.seconds * part.cost.tp,
    "sm_active_pct": lambda part: part.seconds * part.cost.tp * part.cost.gpu.sms,
    "sm_lent_pct": lambda part: part.seconds * part.cost.tp * part.cost.gpu.sms,
    "sm_time_pct": lambda part: part.seconds * part.cost.tp * part.cost.gpu.sms,
    "tensor_active_pct": lambda part: part.seconds * part.cost.tp * part.cost.gpu.peak_flops,
    "hbm_util_pct": lambda part: part.seconds * part.cost.tp * part.cost.gpu.hbm_bytes_per_s,
    "kv_util_pct": lambda part: part.seconds * part.num_blocks * part.cost.kv_bytes_per_token,
    "mean_power_w": lambda part: part.seconds * part.cost.tp,
    "provenance": lambda part: part.totals["busy_s"] * part.cost.tp,
}


def utilisation(
    records: RunRecords, cost: Any, *, output_tokens: int, pool_costs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Per-cent activity over (window x GPUs), energy, and the share of busy time by provenance label.

    `pool_costs` are the prices of each pool of a run with pools. Watts are those of one GPU (`sim.metrics.power`).
    """
    parts = list(parts_of(records, cost, pool_costs or {}).values())
    figures = [figures_of(part) for part in parts]
    made: dict[str, Any] = dict(figures[0])
    if len(parts) > 1:
        for name, weight in WEIGHTS.items():
            made[name] = _mean([figure[name] for figure in figures], [weight(part) for part in parts])
        for name in ("energy_j", "flagged_steps", "iterations", "split_evaluations", "decision_s"):
            made[name] = sum(figure[name] for figure in figures)
        made |= fast_path(records.window_totals) | power_figures([part.power for part in parts])
    made["joules_per_output_token"] = made["energy_j"] / output_tokens if output_tokens else float("nan")
    return made


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Weighted mean of numbers, or of mappings key by key."""
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean([value.get(key, 0.0) for value in values], weights) for key in keys}
    whole = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / whole if whole else float("nan")


def figures_of(part: Part) -> dict[str, Any]:
    """The figures of `utilisation` for replicas alike."""
    totals, cost = part.totals, part.cost
    gpu_s = part.seconds if part.seconds > 0 else float("nan")
    work = total_work(cost.model, totals)
    energy = cost.tp * (cost.energy_j(totals, gpu_s) if part.power is None else part.power.energy_j)
    return {
        "busy_pct": 100 * totals["busy_s"] / gpu_s,
        "sm_active_pct": 100 * (totals["sm_active_s"] + totals["sm_lent_s"]) / (gpu_s * cost.gpu.sms),
        "sm_time_pct": sm_time_pct(totals, gpu_s, cost.gpu.sms),
        "sm_lent_pct": 100 * totals["sm_lent_s"] / (gpu_s * cost.gpu.sms),
        "tensor_active_pct": 100 * work.flops / (gpu_s * cost.gpu.peak_flops),
        "hbm_util_pct": 100 * work.hbm_bytes / (gpu_s * cost.gpu.hbm_bytes_per_s),
        "kv_util_pct": 100 * totals["kv_block_s"] / (gpu_s * part.num_blocks),
        "host_bound_pct": 100 * totals["host_bound_s"] / gpu_s,
        "energy_j": energy,
        "joules_per_output_token": float("nan"),
        "mean_power_w": energy / gpu_s / cost.tp,
        **power_figures([part.power]),
        **fast_path(totals),
        "flagged_steps": int(totals["flagged"]),
        "iterations": int(totals["iterations"]),
        "split_evaluations": int(totals["split_evaluations"]),
        "decision_s": float(totals["decision_s"]),
        "provenance": provenance_share(part),
    }


def fast_path(totals: Mapping[str, float]) -> dict[str, Any]:
    """`fast_path_pct`: per cent of the steps with chunks and decodes whose attention ran fused, None where none was
    to; `fallbacks`: how many of them took separate kernels, by reason."""
    named = {name.partition("/")[2]: int(n) for name, n in totals.items() if name.startswith("fallback/")}
    fused, fell = int(totals.get("fast_path_steps", 0)), sum(named.values())
    return {
        "fast_path_pct": 100 * fused / (fused + fell) if fused + fell else None,
        "fallbacks": {reason: n for reason, n in named.items() if n},
    }


def sm_time_pct(totals: Mapping[str, float], gpu_s: float, sms: int) -> dict[str, float]:
    """Per cent of the SM time of `gpu_s` GPU-seconds by class; sums to 100.

    `attention_bound` and `lockstep` are SMs with resident warps that memory-bound attention keeps from computing, in
    launches of decodes alone and in mixed ones; `active` are all other resident ones, lent SMs included; `empty`:
    nothing in flight. `sim.engine.sm_time` defines the classes.
    """
    waiting = totals["sm_attention_s"] + totals["sm_lockstep_s"]
    seconds = {
        "active": totals["sm_active_s"] + totals["sm_lent_s"] - waiting,
        "wave_tail": totals["sm_tail_s"],
        "attention_bound": totals["sm_attention_s"],
        "lockstep": totals["sm_lockstep_s"],
        "contention": totals["sm_contention_s"],
        "host": totals["sm_host_s"],
        "switch": totals["sm_switch_s"],
        "idle_lane": totals["sm_idle_lane_s"],
        "empty": max(0.0, sms * (gpu_s - totals["busy_s"])),
    }
    return {name: 100 * value / (sms * gpu_s) for name, value in seconds.items()}


def provenance_share(run: Part) -> dict[str, float]:
    """Share of the window's busy time by label of the curve that priced it, largest first; sums to 1.

    Operators are weighed at the mean step with and the mean step without a prefill chunk, since the counters
    do not split time by operator; time beyond the GPU's own has the label of the host terms.
    """
    totals, cost = run.totals, run.cost
    labels = cost.provenance()
    seconds: dict[str, float] = {}
    for count, launch in mean_launches(run):
        fused = totals.get("fast_path_steps", 0) / count if launch.chunks else 0.0
        for part in cost.solo(launch).by_operator:
            label = labels.get(part.name, part.label)
            mixed = fused if part.name in ("prefill_attention", "decode_attention") else 0.0
            for name, weight in ((label, 1.0 - mixed), (run.fused_label, mixed)):
                if weight > 0:
                    seconds[name] = seconds.get(name, 0.0) + weight * count * part.seconds
    priced = sum(seconds.values())
    if priced <= 0 or totals["busy_s"] <= 0:
        return {}
    host = min(totals["host_bound_s"] / totals["busy_s"], 1.0)
    share = {label: (1 - host) * value / priced for label, value in seconds.items()}
    if host > 0:
        share[labels["host"]] = share.get(labels["host"], 0.0) + host
    return dict(sorted(share.items(), key=lambda item: (-item[1], item[0])))


def mean_launches(part: Part) -> list[tuple[int, Launch]]:
    """(how many, shape) of the window's mean launch with prefill and its mean launch without."""
    totals, decoded = part.totals, part.decoded
    eager, graph = int(totals["launches_eager"]), int(totals["launches_graph"])
    if eager + graph == 0:
        return []
    batch = round(decoded / (eager + graph))
    context = round(totals["decode_kv_tokens"] / (eager + graph))
    launches = []
    if graph:
        launches.append(
            (graph, Launch(decode_batch=max(1, batch), decode_context_sum=max(1, context), graph=True))
        )
    if eager:
        new = max(1, round((totals["dense_tokens"] - decoded) / eager))
        history = max(0, round(totals["prefill_kv_tokens"] / eager) - new)
        launches.append((eager, Launch(((new, history),), batch, context)))
    return launches


def by_kind(provenance: Mapping[str, float]) -> dict[str, float]:
    """Collapse labels to their first word: measured, fitted or extrapolated."""
    kinds: dict[str, float] = {}
    for label, share in provenance.items():
        kind = label.split(" ", 1)[0].rstrip(",;:")
        kinds[kind] = kinds.get(kind, 0.0) + share
    return kinds

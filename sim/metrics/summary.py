"""One run's summary: the keys of `vllm bench serve` where it has them, ours beside them.

`completed`, `rejected` and `unfinished` count the whole run. Rates and percentiles use the window: latencies are
those of the requests that arrived in it, tokens and completions count when they happen in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sim.engine.records import RunRecords
from sim.metrics.definitions import (
    STALL_THRESHOLDS_MS,
    Slo,
    latencies,
    stalled_pct,
    statistics,
    verdicts,
)
from sim.metrics.pools import pool_figures
from sim.metrics.saturation import detect
from sim.metrics.utilisation import utilisation
from sim.metrics.window import gaps_in, requests_in

# each reason shows a request's own arithmetic: a summary lists the commonest
MOST_REASONS = 20
PER_GPU = ("request_throughput", "output_throughput", "request_goodput")


def summarise(
    records: RunRecords,
    *,
    slo: Slo,
    cost: Any,
    policy_label: str,
    request_rate: float | None,
    seed: int,
    num_gpus: int = 1,
    closed_loop: bool = False,
    rejected_overlength: int = 0,
    pool_costs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the run's row of `summary.json`; undefined values are None, never NaN.

    `request_rate` is the offered rate in requests/s (None: as the trace or the closed loop has it).
    `rejected_overlength` requests were turned away before the engine saw them: they count as rejected and in
    the denominator of SLO shares. `cost` tells the model, the GPU and the work behind the counters
    (`sim.cost.load_cost`), `pool_costs` the same for each pool of a run that has some.
    """
    pool_costs = pool_costs or {}
    summary: dict[str, Any] = {
        "policy": policy_label,
        "model": cost.model.name,
        "gpu": " + ".join(dict.fromkeys(c.gpu.name for c in pool_costs.values())) or cost.gpu.name,
        "num_gpus": num_gpus,
        "request_rate": request_rate,
        "seed": seed,
        **_counts(records, rejected_overlength),
        **_rates(records, slo, rejected_overlength),
        **_latency(records),
    }
    for key in PER_GPU:
        summary[f"{key}_per_gpu"] = None if summary[key] is None else summary[key] / num_gpus
    requests = requests_in(records)
    verdict = detect(requests, closed_loop=closed_loop)
    summary |= {
        "saturated": verdict.saturated,
        "rate_deficit": verdict.rate_deficit,
        "backlog_growth": verdict.backlog_growth,
        **utilisation(records, cost, output_tokens=summary["total_output_tokens"], pool_costs=pool_costs),
        **pool_figures(records, cost, pool_costs),
        "kv_blocks": records.num_blocks,
        "kv_block_size": records.block_size,
        "notes": list(records.notes),
    }
    row: dict[str, Any] = without_nan(summary)
    return row


def _counts(records: RunRecords, overlength: int) -> dict[str, Any]:
    requests = records.requests
    status = requests["status"].value_counts()
    reasons = requests.loc[requests["status"] == "rejected", "reason"].value_counts()
    reasons = reasons.sort_index().sort_values(ascending=False, kind="stable")
    because = {str(reason): int(n) for reason, n in reasons.head(MOST_REASONS).items()}
    if len(reasons) > MOST_REASONS:
        because["others, told in requests.parquet"] = int(reasons.iloc[MOST_REASONS:].sum())
    if overlength:
        because["longer than the model's context"] = overlength
    return {
        "num_prompts": len(requests) + overlength,
        "completed": int(status.get("finished", 0)),
        "rejected": int(status.get("rejected", 0)) + overlength,
        "unfinished": int(status.get("unfinished", 0)),
        "rejected_reasons": because,
        "preemptions": int(requests["preemptions"].sum()),
    }


def _rates(records: RunRecords, slo: Slo, overlength: int) -> dict[str, Any]:
    """Throughput, goodput and attainment. Goodput counts good requests that arrived in the window."""
    start, end = records.window_s
    duration = end - start
    requests = records.requests
    finished_in = int(requests["finish_s"].between(start, end, inclusive="right").sum())
    first_in = requests["first_token_s"].between(start, end, inclusive="right")
    output = int(first_in.sum() + gaps_in(records)[1].sum(dtype=np.int64))
    prompt = int(requests.loc[first_in, "prompt_tokens"].sum())
    per_s = 1 / duration if duration > 0 else math.nan
    window = requests_in(records)
    span = window["arrival_s"].max() - window["arrival_s"].min() if len(window) else 0.0
    return {
        "window_start": start,
        "duration": duration,
        "offered_request_rate": (len(window) - 1) / span if span > 0 else math.nan,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": finished_in * per_s,
        "output_throughput": output * per_s,
        "total_token_throughput": (prompt + output) * per_s,
        **_attainment(window, slo, per_s, overlength),
    }


def _attainment(window: Any, slo: Slo, per_s: float, overlength: int) -> dict[str, Any]:
    """SLO results; every share is of all requests of the window, rejected and unfinished included."""
    met = verdicts(window, latencies(window), slo)
    n = len(window) + overlength
    if not met or not n:
        return {"request_goodput": None, "slo_attainment": None, "slo_requests": n}
    good = met.pop("all")
    by_class = {
        str(name): float(good[(window["slo_class"] == name).to_numpy()].mean())
        for name in sorted(window["slo_class"].unique())
    }
    share = int(good.sum()) / n
    return {
        "request_goodput": int(good.sum()) * per_s,
        "slo_attainment": share,
        "slo_requests": n,
        "slo_attained": share >= slo.attainment,
        "slo_attainment_by_metric": {name: int(ok.sum()) / n for name, ok in met.items()},
        "slo_attainment_by_class": by_class,
    }


def _latency(records: RunRecords) -> dict[str, Any]:
    """Percentiles in ms; `censored` counts the window's accepted requests whose value the end of the run hid."""
    requests = requests_in(records)
    values = latencies(requests)
    out: dict[str, Any] = {}
    for name in ("ttft", "tpot", "e2el"):
        out |= _in_ms(statistics(values[f"{name}_s"].to_numpy()), name)
    itl_s, itl_count = gaps_in(records)
    out |= _in_ms(statistics(itl_s, itl_count), "itl")
    out["max_itl_ms"] = 1e3 * float(itl_s.max()) if len(itl_s) else math.nan
    out |= _in_ms(statistics(values["normalized_s"].to_numpy()), "ntpot")
    waits = (requests["first_scheduled_s"] - requests["arrival_s"]).to_numpy(np.float64)
    out |= _in_ms({k: v for k, v in statistics(waits).items() if k in ("mean", "median", "p99")}, "queue")
    started = requests["first_token_s"].notna().to_numpy()
    longest = requests["max_itl_s"].to_numpy(np.float64)
    out["stalled_request_pct"] = {str(ms): stalled_pct(longest, started, ms) for ms in STALL_THRESHOLDS_MS}
    unfinished = requests["status"] == "unfinished"
    out["single_token_requests"] = int((requests["output_tokens"] == 1).sum())
    out["censored"] = {
        "ttft": int((unfinished & requests["first_token_s"].isna()).sum()),
        "tpot": int((unfinished & (requests["output_tokens"] > 1)).sum()),
        "itl": int((unfinished & (requests["output_tokens"] > 1)).sum()),
        "e2el": int(unfinished.sum()),
    }
    return out


def _in_ms(values: dict[str, float], name: str) -> dict[str, float]:
    return {f"{stat}_{name}_ms": 1e3 * value for stat, value in values.items()}


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None and numpy scalars by Python's, all the way down."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

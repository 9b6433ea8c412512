"""Every metric's definition, once: latencies of a request, SLO verdicts, statistics.

TTFT = first token - arrival. TPOT = (E2E latency - TTFT) / (output tokens - 1), undefined for one token.
ITL = every gap between consecutive tokens of a request, pooled over requests. E2EL = finish - arrival. Names
and formulas are those of `vllm bench serve` 0.33 (vllm/benchmarks/serve.py). All times are seconds here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

PERCENTILES = (90, 95, 99)
STALL_THRESHOLDS_MS = (200, 500)


@dataclass(frozen=True)
class Slo:
    """Limits on one request in milliseconds, None for no limit; `attainment`: the share that must meet them.

    `ttft_ms_per_token` limits TTFT divided by prompt tokens; `itl_ms` limits a request's longest gap.
    `classes` gives other limits to the requests of a class; a class that it does not name has these.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2el_ms: float | None = None
    ttft_ms_per_token: float | None = None
    attainment: float = 0.99
    classes: Mapping[str, Slo] = field(default_factory=dict)

    def limits(self) -> dict[str, float]:
        """The limits that are set, by key."""
        keys = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "ttft_ms_per_token")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Return `ttft_s`, `tpot_s`, `e2el_s`, `normalized_s` per request; NaN where not reached or not defined.

    `normalized_s` is E2E latency per output token.
    """
    arrival = requests["arrival_s"].to_numpy(np.float64)
    first = requests["first_token_s"].to_numpy(np.float64)
    end = requests["finish_s"].to_numpy(np.float64)
    tokens = requests["output_tokens"].to_numpy(np.float64)
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return pd.DataFrame(
        {
            "ttft_s": first - arrival,
            "tpot_s": (end - first) / gaps,
            "e2el_s": end - arrival,
            "normalized_s": (end - arrival) / tokens,
        },
        index=requests.index,
    )


def verdicts(requests: pd.DataFrame, values: pd.DataFrame, slo: Slo) -> dict[str, Bools]:
    """Say per request whether it met each limited metric and, under "all", finished and met every one.

    A rejected or unfinished request meets nothing that it has not shown: TTFT may be met by one that has its
    first token, the other metrics only by one that finished. One output token meets any TPOT or ITL limit.
    Without any limit the result is empty.
    """
    finished = requests["status"].to_numpy() == "finished"
    single = finished & (requests["output_tokens"].to_numpy() == 1)
    prompt = requests["prompt_tokens"].to_numpy(np.float64)
    ttft, tpot, e2el = (values[c].to_numpy() * 1e3 for c in ("ttft_s", "tpot_s", "e2el_s"))
    longest = requests["max_itl_s"].to_numpy(np.float64) * 1e3
    met: dict[str, Bools] = {}

    def limit(metric: str, value: Floats, key: str, pardon: Bools | None = None) -> None:
        bound = _limits(requests["slo_class"], slo, key)
        if np.all(np.isinf(bound)):
            return
        ok = value <= bound  # NaN compares false
        ok = ok if pardon is None else (ok & finished) | pardon
        ok = ok | np.isinf(bound)  # a class without this limit
        met[metric] = met[metric] & ok if metric in met else ok

    limit("ttft", ttft, "ttft_ms")
    limit("ttft", ttft / prompt, "ttft_ms_per_token")
    limit("tpot", tpot, "tpot_ms", single)
    limit("itl", longest, "itl_ms", single)
    limit("e2el", e2el, "e2el_ms", np.zeros(len(requests), bool))
    if met:
        met["all"] = np.logical_and.reduce([finished, *met.values()])
    return met


def _limits(slo_class: pd.Series[str], slo: Slo, key: str) -> Floats:
    """A limit for each request, or one for all where no class has its own; infinite for none."""
    default = getattr(slo, key)
    bounds = {name: getattr(of_class, key) for name, of_class in slo.classes.items()}
    if not bounds:
        return np.array([np.inf if default is None else float(default)])
    codes, names = pd.factorize(slo_class)
    given = [bounds.get(name, default) for name in names]
    return np.array([np.inf if bound is None else float(bound) for bound in given])[codes]


def weighted_percentiles(
    values: Floats, counts: NDArray[np.integer[Any]], q: tuple[float, ...]
) -> list[float]:
    """Percentiles of the sample that holds `values[i]` `counts[i]` times; NaN for an empty one.

    The same numbers as `numpy.percentile` (method "linear") gives for the expanded sample, which is never made.
    """
    order = np.argsort(values)
    v = values[order]
    ends = np.cumsum(counts[order], dtype=np.int64)
    del order
    if len(v) == 0 or ends[-1] == 0:
        return [float("nan")] * len(q)
    at = (ends[-1] - 1) * (np.asarray(q, np.float64) / 100)
    low = np.floor(at).astype(np.int64)
    a = v[np.searchsorted(ends, low, side="right")]
    b = v[np.searchsorted(ends, np.minimum(low + 1, ends[-1] - 1), side="right")]
    t = at - low
    # numpy interpolates from the nearer end
    mixed = np.where(t < 0.5, a + (b - a) * t, b - (b - a) * (1 - t))
    return [float(x) for x in mixed]


def statistics(values: Floats, counts: NDArray[np.integer[Any]] | None = None) -> dict[str, float]:
    """Mean, median, population standard deviation, p90, p95 and p99 of the values that are not NaN."""
    unknown = np.isnan(values)
    if unknown.any():
        values, counts = values[~unknown], None if counts is None else counts[~unknown]
    weight = np.ones(len(values), np.int32) if counts is None else counts
    n = int(weight.sum(dtype=np.int64))
    median, *upper = weighted_percentiles(values, weight, (50, *PERCENTILES))
    mean = float(np.dot(values, weight)) / n if n else float("nan")
    spread = float(np.sqrt(np.dot((values - mean) ** 2, weight) / n)) if n else float("nan")
    named = {f"p{q}": value for q, value in zip(PERCENTILES, upper, strict=True)}
    return {"mean": mean, "median": median, "std": spread, **named}


def stalled_pct(longest_gap_s: Floats, started: Bools, threshold_ms: float) -> float:
    """Per cent of the requests that got a first token whose longest gap exceeds the threshold."""
    n = int(started.sum())
    return 100 * int((longest_gap_s[started] * 1e3 > threshold_ms).sum()) / n if n else float("nan")

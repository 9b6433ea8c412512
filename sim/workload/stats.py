"""Statistics of a trace: what to look at before running it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.workload.trace import Trace

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
CONTEXT_LIMITS = (2048, 4096, 8192, 16384, 32768, 131072)


def describe(trace: Trace) -> dict[str, Any]:
    """Plain data: rows, arrivals (None if the trace has none), lengths, correlation, shares over context limits."""
    prompt, output = trace.prompt_tokens, trace.output_tokens
    total = prompt + output
    return {
        "name": trace.name,
        "format": trace.format,
        "sha256": trace.sha256,
        "requests": len(trace),
        "arrivals": None if trace.arrival_s is None else arrival_statistics(trace.arrival_s),
        "prompt_tokens": _lengths(prompt),
        "output_tokens": _lengths(output),
        "total_tokens": int(total.sum()),
        "spearman": spearman(prompt, output),
        "over_context_limit": {str(limit): float(np.mean(total > limit)) for limit in CONTEXT_LIMITS},
        "slo_classes": list(trace.slo_classes),
        "sessions": None if trace.session_id is None else len(np.unique(trace.session_id)),
        "prefix_blocks": None if trace.prefix_hashes is None else sum(map(len, trace.prefix_hashes)),
        "notes": list(trace.notes),
    }


def arrival_statistics(arrival_s: NDArray[np.float64]) -> dict[str, Any]:
    """Span, mean rate (gaps over span), CV of gaps, and variance over mean of counts (1 is Poisson).

    Bins start at the first arrival; the last one is partial and left out of the dispersion.
    Values are None where too few requests exist.
    """
    gaps = np.diff(arrival_s)
    span = float(arrival_s[-1] - arrival_s[0])
    spread = len(gaps) > 0 and span > 0
    per_second, per_minute = _counts(arrival_s, 1.0), _counts(arrival_s, 60.0)
    return {
        "span_s": span,
        "request_rate": len(gaps) / span if spread else None,
        "gap_cv": float(np.std(gaps) / np.mean(gaps)) if spread else None,
        "dispersion_1s": _dispersion(per_second),
        "dispersion_60s": _dispersion(per_minute),
        "peak_1s": int(per_second.max()),
        "peak_60s": int(per_minute.max()),
        "equal_stamps": int(np.sum(gaps == 0)),
    }


def spearman(a: NDArray[np.int64], b: NDArray[np.int64]) -> float | None:
    """Rank correlation with ties averaged; None if one of the two is constant."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt(np.dot(x, x) * np.dot(y, y)))
    return float(np.dot(x, y)) / norm if norm > 0 else None


def _ranks(values: NDArray[np.int64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(middle[inverse], np.float64)


def _lengths(values: NDArray[np.int64]) -> dict[str, float]:
    at = np.percentile(values, PERCENTILES)
    names = ["max" if p == 100 else f"p{p}" for p in PERCENTILES]
    return {"mean": float(values.mean()), **{name: float(x) for name, x in zip(names, at, strict=True)}}


def _counts(arrival_s: NDArray[np.float64], bin_s: float) -> NDArray[np.int64]:
    return np.bincount(((arrival_s - arrival_s[0]) / bin_s).astype(np.int64))


def _dispersion(counts: NDArray[np.int64]) -> float | None:
    whole = counts[:-1]
    return float(whole.var() / whole.mean()) if len(whole) > 1 else None

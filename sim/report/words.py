"""Numbers and names as reports print them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency"}
NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """At least `digits` significant digits, thousands grouped, no exponent; a dash for undefined."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def plain(value: float) -> str:
    """A rate or a limit as someone would write it: 4, 0.5, 1,000."""
    return f"{value:,.10g}"


def per_cent(share: float | None) -> str:
    """A share as per cent; 100 % only when nothing is missing."""
    if share is None:
        return NOTHING
    text = f"{100 * share:.1f}"
    return "99.9" if text == "100.0" and share < 1 else text.removesuffix(".0")


def rate_name(rate: float | None) -> str:
    """An offered rate in words."""
    return "own arrivals" if rate is None else f"{plain(rate)} req/s"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def limits_text(slo: Mapping[str, Any]) -> str:
    """The limits of an SLO block: TTFT ≤ 1,000 ms, TPOT ≤ 50 ms."""
    parts = [
        f"{name} ≤ {plain(slo[f'{metric}_ms'])} ms"
        for metric, name in LATENCIES.items()
        if slo.get(f"{metric}_ms") is not None
    ]
    if slo.get("ttft_ms_per_token") is not None:
        parts.append(f"TTFT ≤ {plain(slo['ttft_ms_per_token'])} ms per prompt token")
    return ", ".join(parts)

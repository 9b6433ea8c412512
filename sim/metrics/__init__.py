"""From event records to latency, goodput, SLO attainment and utilisation."""

from __future__ import annotations

from sim.metrics.definitions import Slo
from sim.metrics.summary import summarise

__all__ = ["Slo", "summarise"]

"""Vidur's processed traces; many hold lengths only and need an arrival process."""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="vidur",
    title="Vidur processed trace",
    source="github.com/microsoft/vidur, data/processed_traces",
    arrival="arrived_at",
    arrival_required=False,
    prompt="num_prefill_tokens",
    output="num_decode_tokens",
    time_unit="s",
    known=("num_total_tokens", "pd_ratio"),
)

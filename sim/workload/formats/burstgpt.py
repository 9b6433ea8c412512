"""BurstGPT: whole seconds from midnight of day one; version 3 inserts two columns, so only names decide."""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="burstgpt",
    title="BurstGPT trace",
    source="github.com/HPMLL/BurstGPT",
    arrival="Timestamp",
    prompt="Request tokens",
    output="Response tokens",
    time_unit="s",
    optional={"session_id": "Session ID"},
    known=("Model", "Total tokens", "Log Type", "Elapsed time"),
    zero_means="failed requests",
)

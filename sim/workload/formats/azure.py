"""Azure LLM inference traces of 2023 and 2024: dates with seven or six digits, or none, of a second."""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="azure",
    title="Azure LLM inference trace",
    source="github.com/Azure/AzurePublicDataset",
    arrival="TIMESTAMP",
    prompt="ContextTokens",
    output="GeneratedTokens",
    time_unit="s",
)

"""Our own columns, in CSV, JSON lines or Parquet; the format that `simctl trace convert` writes."""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="plain",
    title="plain columns",
    source="docs: arrival_s, prompt_tokens, output_tokens",
    arrival="arrival_s",
    arrival_required=False,
    prompt="prompt_tokens",
    output="output_tokens",
    time_unit="s",
    unit_stated=True,
    optional={
        "max_new_tokens": "max_new_tokens",
        "slo_class": "slo_class",
        "priority": "priority",
        "session_id": "session_id",
        "prefix_hashes": "prefix_hashes",
    },
)

"""LLMServingSim's JSON lines: nanoseconds by the field's name; agentic sessions cannot be replayed."""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="llmservingsim",
    title="LLMServingSim workload",
    source="github.com/casys-kaist/LLMServingSim",
    arrival="arrival_time_ns",
    prompt="input_toks",
    output="output_toks",
    time_unit="ns",
    unit_stated=True,
    optional={"session_id": "session_id"},
    known=("input_tok_ids", "output_tok_ids"),
    refuse={
        "sub_requests": "its sessions issue a request when the one before and a tool have finished, which "
        "fixed arrivals cannot express; keep the rows without sub_requests"
    },
)

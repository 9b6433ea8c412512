"""Mooncake's JSON lines: relative milliseconds and prefix hashes of 512-token blocks.

The unit stands in no field (Mooncake issue 4 and its README say it), and other tools write seconds or
nanoseconds under the same names, so the reader says what it took.
"""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="mooncake",
    title="Mooncake trace",
    source="github.com/kvcache-ai/Mooncake, FAST25-release/traces",
    arrival="timestamp",
    prompt="input_length",
    output="output_length",
    time_unit="ms",
    optional={"prefix_hashes": "hash_ids", "session_id": "session_id"},
    unlike=("parent_chat_id",),
    block_tokens=512,
)

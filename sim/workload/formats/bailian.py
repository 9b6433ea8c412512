"""Qwen-Bailian usage traces: Mooncake's field names, but seconds and 16-token blocks."""

from __future__ import annotations

from sim.workload.formats.base import TraceFormat

FORMAT = TraceFormat(
    name="bailian",
    title="Qwen-Bailian usage trace",
    source="github.com/alibaba-edu/qwen-bailian-usagetraces-anon",
    arrival="timestamp",
    prompt="input_length",
    output="output_length",
    time_unit="s",
    optional={"prefix_hashes": "hash_ids", "session_id": "chat_id"},
    known=("type", "turn"),
    needs=("chat_id", "parent_chat_id"),
    block_tokens=16,
)

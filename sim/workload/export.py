"""A workload as the bytes of a file in our columns, which the reader takes back unchanged.

Optional columns are written only where they say something. Arrivals are relative to the first request.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.workload import Workload

ENDINGS = (".csv", ".parquet", ".jsonl")


def encode(workload: Workload, path: Path) -> bytes:
    """The file's content in the container that the ending of `path` names: .csv, .parquet or .jsonl."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        hint = nearest(ending, ENDINGS)
        raise SimctlError(f"cannot write {path}: the ending must be one of {', '.join(ENDINGS)}.{hint}")
    columns = export_columns(workload)
    if ending == ".jsonl":
        rows = zip(*columns.values(), strict=True)
        return "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows).encode()
    import pyarrow as pa

    if ending == ".csv" and "prefix_hashes" in columns:
        columns["prefix_hashes"] = [";".join(map(str, hashes)) for hashes in columns["prefix_hashes"]]
    table = pa.table(columns)
    sink = io.BytesIO()
    if ending == ".csv":
        import pyarrow.csv as pc

        sink.write((",".join(columns) + "\n").encode())
        pc.write_csv(table, sink, pc.WriteOptions(include_header=False, quoting_style="needed"))
    else:
        import pyarrow.parquet as pq

        pq.write_table(table, sink)
    return sink.getvalue()


def export_columns(workload: Workload) -> dict[str, list[Any]]:
    """Columns by name as plain lists, essential ones first."""
    columns: dict[str, list[Any]] = {
        "arrival_s": (workload.arrival_s - workload.arrival_s[0]).tolist(),
        "prompt_tokens": workload.prompt_tokens.tolist(),
        "output_tokens": workload.output_tokens.tolist(),
    }
    if np.any(workload.max_new_tokens != workload.output_tokens):
        columns["max_new_tokens"] = workload.max_new_tokens.tolist()
    if workload.slo_classes != ("default",):
        columns["slo_class"] = [workload.slo_classes[code] for code in workload.slo_class.tolist()]
    if np.any(workload.priority != 0):
        columns["priority"] = workload.priority.tolist()
    if workload.session_id is not None:
        columns["session_id"] = workload.session_id.tolist()
    if workload.prefix_hashes is not None:
        columns["prefix_hashes"] = [list(hashes) for hashes in workload.prefix_hashes]
    return columns

"""The files of a result folder, written from the finished runs. None but `timing.json` knows the wall clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from sim.metrics.replicates import intervals
from sim.study.plan import Study

ROWS_AT_A_TIME = 1 << 17
# mappings whose entries are numbers that one plots: a column each in runs.parquet
SPREAD = ("stalled_request_pct", "slo_attainment_by_metric", "slo_attainment_by_class", "censored")


def summary_of(study: Study, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The content of `summary.json`."""
    return {
        "schema_version": 1,
        "experiment": study.resolved,
        "profile": study.profile,
        "runs": list(runs),
        "intervals": intervals(runs),
    }


def runs_table(runs: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A row a run: plottable mappings spread into `key.entry` columns, other mappings and lists as JSON."""
    rows = []
    for run in runs:
        row: dict[str, Any] = {}
        for key, value in run.items():
            if key in SPREAD:
                row |= {f"{key}.{entry}": inner for entry, inner in value.items()}
            else:
                row[key] = json.dumps(value) if isinstance(value, dict | list) else value
        rows.append(row)
    table = pd.DataFrame(rows)
    unknown = [column for column in table.columns if table[column].isna().all()]
    return table.astype(dict.fromkeys(unknown, np.float64))


def write_summary(folder: Path, study: Study, runs: Sequence[dict[str, Any]]) -> None:
    """Write `experiment.yaml`, `summary.json` and `runs.parquet`."""
    text = yaml.safe_dump(study.resolved, sort_keys=False, allow_unicode=True, width=100)
    (folder / "experiment.yaml").write_text(text, encoding="utf-8")
    text = json.dumps(summary_of(study, runs), indent=1, allow_nan=False, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    runs_table(runs).to_parquet(folder / "runs.parquet", index=False)


def write_rows(path: Path, parts: Iterable[Path]) -> None:
    """Join parquet files one after the other, some rows in memory at a time; a column that one lacks is null there."""
    files = list(parts)
    if not files:
        return
    schemas = [pq.read_schema(file) for file in files]
    schema = pa.unify_schemas(schemas, promote_options="permissive").with_metadata(schemas[0].metadata)
    with pq.ParquetWriter(path, schema) as writer:
        for file in files:
            with pq.ParquetFile(file) as source:
                for batch in source.iter_batches(ROWS_AT_A_TIME):
                    writer.write_table(_with_columns(pa.Table.from_batches([batch]), schema))


def _with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the schema's columns in their order and types."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names).cast(schema)


def write_timing(folder: Path, timings: Sequence[dict[str, float]], startup_s: float, write_s: float) -> None:
    """Write `timing.json`: sums over the runs; times are wall seconds, added over processes."""
    total = {key: sum(timing[key] for timing in timings) for key in ("iterations", "decisions", "loop_s")}
    total["startup_s"] = startup_s + sum(timing["startup_s"] for timing in timings)
    total["write_s"] = write_s
    (folder / "timing.json").write_text(json.dumps(total, indent=1) + "\n")

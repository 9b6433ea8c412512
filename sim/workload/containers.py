"""From a file's bytes to an Arrow table: CSV, JSON lines or Parquet, gzipped or not.

The container is recognised by its bytes, never by the file's ending. What was unusual about the bytes (byte
order mark, CRLF, no newline at the end) is kept as notes.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import SimctlError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawTable:
    """A file's columns as they stand, with what is needed to point at a row in an error message."""

    path: Path
    kind: str  # "CSV", "JSONL" or "Parquet"
    table: Any  # pyarrow.Table
    data: bytes  # decompressed
    sha256: str  # of the file's bytes on disk
    notes: tuple[str, ...]

    def where(self, row: int) -> str:
        """Name data row `row` (from 0) the way an editor would show it: file, line and the line's text."""
        if self.kind == "Parquet":
            return f"{self.path}, row {row + 1}"
        skip = 1 if self.kind == "CSV" else 0
        for number, line in enumerate(self.data.decode("utf-8", "replace").splitlines(), 1):
            if not line.strip():
                continue
            if row + skip == 0:
                return f"{self.path}, line {number} ({_shorten(line)})"
            row -= 1
        return f"{self.path}, last row"


def read_table(path: Path) -> RawTable:
    """Read a trace file of any container.

    Raises SimctlError for an unreadable, empty or malformed file, with the line where parsing failed.
    """
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise SimctlError(f"cannot read trace {path}: {error.strerror or error}") from None
    notes: list[str] = []
    data = _decompress(path, stored, notes)
    if data.startswith(_BOM):
        data = data[len(_BOM) :]
        notes.append("byte-order mark at the start skipped")
    kind = _container(path, data)
    if kind == "Parquet":
        table = _parquet(path, data)
    else:
        if b"\r\n" in data:
            notes.append("lines end in CRLF")
        if not data.endswith(b"\n"):
            notes.append("no newline after the last row")
        table = _csv(path, data) if kind == "CSV" else _jsonl(path, data)
    if table.num_rows == 0:
        raise SimctlError(f"trace {path} has a header but no rows; at least one request is needed")
    names = [str(name).strip() for name in table.column_names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SimctlError(f"trace {path} has the column '{twice[0]}' twice; each name may stand once")
    return RawTable(
        path, kind, table.rename_columns(names), data, hashlib.sha256(stored).hexdigest(), tuple(notes)
    )


def _decompress(path: Path, stored: bytes, notes: list[str]) -> bytes:
    if not stored.startswith(b"\x1f\x8b"):
        return stored
    notes.append("gzip")
    try:
        return gzip.decompress(stored)
    except (OSError, EOFError, zlib.error) as error:
        raise SimctlError(f"trace {path} is a damaged gzip file: {error}") from None


def _container(path: Path, data: bytes) -> str:
    if data.startswith(b"PAR1"):
        return "Parquet"
    head = data[:4096].lstrip()
    if not head:
        raise SimctlError(f"trace {path} is empty; at least one request is needed")
    if data.startswith(b"PK\x03\x04") or b"\0" in head:
        raise SimctlError(
            f"trace {path} is neither text nor Parquet; give one CSV, JSONL or Parquet file (gzip is fine, "
            "archives are not)"
        )
    if data.startswith(b"version https://git-lfs"):
        raise SimctlError(
            f"trace {path} is a Git LFS pointer, not the data; fetch the file with 'git lfs pull'"
        )
    if head.startswith(b"["):
        raise SimctlError(f"trace {path} is one JSON array; write one JSON object a line (JSONL) instead")
    return "JSONL" if head.startswith(b"{") else "CSV"


def _parquet(path: Path, data: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise SimctlError(f"trace {path} is a damaged Parquet file: {_first_line(error)}") from None


def _csv(path: Path, data: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.csv as pc

    # only an empty cell is a missing one; "NaN" is a number that is none, "NA" may be the name of a session
    convert = pc.ConvertOptions(null_values=[""], strings_can_be_null=True)
    if len(data.splitlines()) == 1:  # the parser finds no columns in a header without a newline
        raise SimctlError(f"trace {path} has a header but no rows; at least one request is needed")
    try:
        return pc.read_csv(pa.BufferReader(data), convert_options=convert)
    except pa.ArrowException as error:
        raise SimctlError(_csv_fault(path, data) or f"trace {path}: {_first_line(error)}") from None


def _csv_fault(path: Path, data: bytes) -> str:
    """The first line whose number of fields is not the header's, or an empty string."""
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        return f"trace {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
    width = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = len(next(csv.reader([line])))
        width = width or fields
        if fields != width:
            return f"trace {path}, line {number} ({_shorten(line)}) has {fields} fields, the header {width}"
    return ""


def _jsonl(path: Path, data: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.json as pj

    # a block must hold the longest line, and lines with token ids are long
    block = max(1 << 20, min(len(data), 1 << 28))
    try:
        return pj.read_json(pa.BufferReader(data), read_options=pj.ReadOptions(block_size=block))
    except pa.ArrowException as error:
        fault = _jsonl_fault(path, data)
        if fault:
            raise SimctlError(fault) from None
        try:
            return pa.Table.from_pylist(_jsonl_rows(data))
        except pa.ArrowException:
            raise SimctlError(
                f"trace {path}: one field holds numbers in some lines and text in others: "
                f"{_first_line(error)}"
            ) from None


def _jsonl_fault(path: Path, data: bytes) -> str:
    """The first line that is no JSON object, or an empty string."""
    for number, line in enumerate(io.TextIOWrapper(io.BytesIO(data), "utf-8", errors="replace"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            return f"trace {path}, line {number} ({_shorten(line)}) is not valid JSON: {error.msg}"
        if not isinstance(value, dict):
            return f"trace {path}, line {number} ({_shorten(line)}) is not a JSON object with named fields"
    return ""


def _jsonl_rows(data: bytes) -> list[dict[str, Any]]:
    """Rows in the order of the file; fields that first appear in a later line are kept."""
    rows = [json.loads(line) for line in data.decode("utf-8").splitlines() if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _shorten(line: str, width: int = 60) -> str:
    line = line.strip()
    return f"'{line}'" if len(line) <= width else f"'{line[:width]}…'"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

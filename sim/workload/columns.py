"""Checked columns: from what a file holds to whole numbers, names and hashes, or an error with the row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.workload.containers import RawTable

_MAX_INT32 = 2**31 - 1


def numbers(raw: RawTable, column: str) -> NDArray[Any]:
    """The column as int64 where it holds whole numbers, else float64; shape (rows,).

    Raises SimctlError at the first missing, NaN, infinite or non-numeric value.
    """
    import pyarrow as pa

    values = raw.table[column].combine_chunks()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = _parse_text(values)
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        row = _first_not_number(raw.table[column].to_pylist())
        raise _bad(raw, row, column, "is missing or not a number")
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise _bad(raw, row, column, "is missing or not a number")
    out: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if out.dtype.kind != "f":
        return out.astype(np.int64)
    finite = np.isfinite(out)
    if not finite.all():
        raise _bad(raw, int(np.argmin(finite)), column, "is not a finite number")
    return out.astype(np.float64)


def tokens(raw: RawTable, column: str, *, least: int = 0, most: int = _MAX_INT32) -> NDArray[np.int64]:
    """The column as whole numbers from `least` to `most`; '7564.0' is taken for 7564."""
    values = numbers(raw, column)
    if values.dtype.kind == "f" and np.any(values != np.rint(values)):
        raise _bad(raw, int(np.argmax(values != np.rint(values))), column, "is not a whole number")
    if np.any(values < least):
        rule = "is negative" if least == 0 else f"is below {least}"
        raise _bad(raw, int(np.argmax(values < least)), column, rule)
    if np.any(values > most):
        raise _bad(raw, int(np.argmax(values > most)), column, f"is above {most:,}")
    return values.astype(np.int64)


def codes(raw: RawTable, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The column's texts as codes into the tuple of distinct names, in order of first appearance."""
    import pyarrow as pa

    values = raw.table[column].combine_chunks()
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise _bad(raw, row, column, "is missing")
    encoded = values.cast(pa.string()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), tuple(encoded.dictionary.to_pylist())


def sessions(raw: RawTable, column: str) -> NDArray[np.int64] | None:
    """Session numbers, -1 in an empty cell; texts are numbered by first appearance; None if all are empty."""
    import pyarrow as pa

    values = raw.table[column].combine_chunks()
    if values.null_count == len(values):
        return None
    if pa.types.is_integer(values.type):
        return np.asarray(values.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
    encoded = values.cast(pa.string()).dictionary_encode()
    return np.asarray(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)


def hashes(raw: RawTable, column: str) -> tuple[tuple[int, ...], ...] | None:
    """Prefix block hashes of each request: a list column, or text such as '3;14;15'."""
    import pyarrow as pa

    values = raw.table[column].combine_chunks()
    if values.null_count == len(values):
        return None
    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
        return tuple(_split_hashes(raw, column, row, cell) for row, cell in enumerate(values.to_pylist()))
    flat: list[int] = values.flatten().to_pylist()
    lengths = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths).tolist()
    return tuple(tuple(flat[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _split_hashes(raw: RawTable, column: str, row: int, cell: object) -> tuple[int, ...]:
    if cell is None:
        return ()
    try:
        return tuple(int(part) for part in str(cell).split(";") if part.strip())
    except ValueError:
        raise _bad(raw, row, column, "is not a list of whole numbers such as '3;14;15'") from None


def _parse_text(values: Any) -> Any:
    """Numbers written as text, as integers if all are; the text itself if some are not numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(values)
    for kind in (pa.int64(), pa.float64()):
        try:
            return trimmed.cast(kind)
        except pa.ArrowInvalid:
            continue
    return values


def _first_not_number(values: list[Any]) -> int:
    for row, value in enumerate(values):
        try:
            float(value)
        except (TypeError, ValueError):
            return row
    return 0


def _bad(raw: RawTable, row: int, column: str, rule: str) -> SimctlError:
    return SimctlError(f"trace {raw.where(row)}: column '{column}' {rule}")

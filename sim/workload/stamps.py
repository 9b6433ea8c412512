"""Arrival stamps of every kind as seconds since the first request, and a sentence on how they were read.

Stamps are dates with any fraction and offset, or numbers (also written as text) since the Unix epoch or since
the start of the trace. The same column names mean milliseconds in one tool and seconds in another, so what is
not fixed by the format is said, can be overridden, and is refused when the request rate it implies is absurd.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.columns import numbers
from sim.workload.containers import RawTable

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
# Values of 2001 to 2096 since the epoch in each unit; relative stamps start near zero.
_EPOCH = {"s": (1e9, 4e9), "ms": (1e12, 4e12), "us": (1e15, 4e15), "ns": (1e18, 4e18)}
# Published traces run at 0.02 to 1,200 requests/s; a wrong unit is a factor of a thousand off.
GUESSED_RATE = (1e-4, 2_000.0)
STATED_RATE = (1e-7, 1e6)
_ZONE = r"(?:Z|[+-]\d{2}:?\d{2})$"


@dataclass(frozen=True)
class Stamps:
    """`seconds` (rows,) since the earliest stamp, in the file's order; whether the unit was `guessed`."""

    seconds: NDArray[np.float64]
    unit: str
    note: str
    guessed: bool


def read_stamps(
    raw: RawTable, column: str, *, unit: str | None, stated: bool, override: str | None
) -> Stamps:
    """Read the arrival column.

    `unit` is the format's usual unit for relative numbers, `stated` whether the format fixes it beyond doubt
    (by the column's name), `override` the user's word. Raises SimctlError with the row of a bad stamp.
    """
    if override is not None and override not in (*PER_SECOND, "iso"):
        raise SimctlError(
            f"time_unit '{override}' is not one of s, ms, us, ns, "
            f"iso.{nearest(override, [*PER_SECOND, 'iso'])}"
        )
    dates = _dates(raw, column)
    if dates is not None:
        if override not in (None, "iso"):
            raise SimctlError(
                f"trace {raw.path}: column '{column}' holds dates, so time_unit '{override}' does not apply"
            )
        return _from_dates(*dates)
    if override == "iso":
        raise SimctlError(
            f"trace {raw.path}: column '{column}' holds numbers, not dates; drop time_unit: iso"
        )
    return _from_numbers(raw, column, unit, stated, override)


def check_rate(raw: RawTable, stamps: Stamps) -> None:
    """Refuse a mean rate that no server sees, which is what a wrong time unit looks like.

    What the user said about the unit is not doubted, so this is for stamps read without an override.
    """
    span = float(stamps.seconds.max())
    if len(stamps.seconds) < 2 or span == 0.0:
        return
    rate = (len(stamps.seconds) - 1) / span
    low, high = GUESSED_RATE if stamps.guessed else STATED_RATE
    if not low <= rate <= high:
        raise SimctlError(
            f"trace {raw.path}: read in {stamps.unit}, {len(stamps.seconds):,} requests span {span:.6g} s, "
            f"which is {rate:.3g} requests/s and hardly meant; say the unit with time_unit (s, ms, us or ns)"
        )


def _from_numbers(raw: RawTable, column: str, unit: str | None, stated: bool, override: str | None) -> Stamps:
    values = numbers(raw, column)
    first, last = values.min(), values.max()
    if first < 0:
        row = int(np.argmax(values < 0))
        raise SimctlError(f"trace {raw.where(row)}: column '{column}' is negative")
    epoch = next((name for name, (low, high) in _EPOCH.items() if low <= first and last <= high), None)
    chosen, why, guessed = override, "as told", False
    if chosen is None and stated and unit is not None:
        chosen, why = unit, "by the column's name"
    elif chosen is None and epoch is not None:
        chosen, why, guessed = epoch, "guessed from the size of the numbers", True
    elif chosen is None:
        chosen, why, guessed = unit or "s", "the usual unit of this format", True
    # subtracted before scaling: nanoseconds since the epoch do not fit a float64
    seconds = (values - first).astype(np.float64) / PER_SECOND[chosen]
    since = "since the epoch" if chosen == epoch else "relative"
    note = f"time unit {chosen} ({why}), {since}; origin: the first request at {first:.16g} {chosen}"
    return Stamps(seconds, chosen, note, guessed)


def _from_dates(nanoseconds: NDArray[np.int64], zone: str) -> Stamps:
    first = int(nanoseconds.min())
    origin = str(np.datetime64(first, "ns")).replace("T", " ").rstrip("0").rstrip(".")
    seconds = (nanoseconds - first) / PER_SECOND["ns"]
    return Stamps(seconds, "dates", f"time as dates, {zone}; origin: the first request at {origin}", False)


def _dates(raw: RawTable, column: str) -> tuple[NDArray[np.int64], str] | None:
    """Nanoseconds since the epoch and a word on the zone, or None if the column holds numbers."""
    import pyarrow as pa

    values = raw.table[column].combine_chunks()
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("ns"))
    if pa.types.is_timestamp(values.type):
        _no_gaps(raw, column, values)
        zone = f"with offset, in {values.type.tz}" if values.type.tz else "without offset, taken as UTC"
        return _nanoseconds(values), zone
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return None
    _no_gaps(raw, column, values)
    if "-" not in values[0].as_py().lstrip("-") and ":" not in values[0].as_py():
        return None
    return _parse_dates(raw, column, values)


def _parse_dates(raw: RawTable, column: str, values: Any) -> tuple[NDArray[np.int64], str]:
    """Dates of mixed form: with and without a fraction, with and without an offset, any number of digits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pc.utf8_trim_whitespace(values)
    text = pc.replace_substring_regex(text, r"(\.\d{9})\d+", r"\1")
    zoned = pc.match_substring_regex(text, _ZONE)
    share = pc.sum(pc.cast(zoned, pa.int64())).as_py()
    text = pc.if_else(zoned, text, pc.binary_join_element_wise(text, "Z", ""))
    try:
        parsed = text.cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid:
        row = next(i for i, cell in enumerate(text.to_pylist()) if not _is_date(cell))
        raise SimctlError(
            f"trace {raw.where(row)}: column '{column}' is neither a date nor a number"
        ) from None
    zone = "with offset, in UTC" if share == len(text) else "without offset, taken as UTC"
    if 0 < share < len(text):
        zone = f"{share:,} rows with offset, {len(text) - share:,} without, which are taken as UTC"
    return _nanoseconds(parsed), zone


def _is_date(text: str) -> bool:
    import pyarrow as pa

    if not re.match(r"\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        pa.array([text]).cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid:
        return False
    return True


def _nanoseconds(values: Any) -> NDArray[np.int64]:
    import pyarrow as pa

    whole: NDArray[np.int64] = values.cast(pa.timestamp("ns", values.type.tz)).cast(pa.int64()).to_numpy()
    return whole


def _no_gaps(raw: RawTable, column: str, values: Any) -> None:
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise SimctlError(
            f"trace {raw.where(row)}: column '{column}' is missing; every request needs its arrival"
        )

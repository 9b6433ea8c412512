"""A parsed trace file: columns in arrival order and sentences on how they were read.

Parsing is separate from making a workload, so that one file is read once for all the rates of a sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload import columns, formats
from sim.workload.containers import RawTable, read_table
from sim.workload.stamps import check_rate, read_stamps

# our names, in the order in which a plain file has them
COLUMNS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "max_new_tokens",
    "slo_class",
    "priority",
    "session_id",
)
ON_ZERO = ("drop", "clamp")


@dataclass(frozen=True)
class Trace:
    """Requests of a file, sorted by arrival if it has arrivals (`arrival_s`, from the first request on).

    Columns have shape (n,) and are read-only; `slo_class` indexes `slo_classes`. `notes` says what the reader
    took the file for and what it did to the rows; `sha256` is that of the file's bytes.
    """

    name: str
    format: str
    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_new_tokens: NDArray[np.int64] | None = None
    slo_class: NDArray[np.int64] | None = None
    slo_classes: tuple[str, ...] = ()
    priority: NDArray[np.int64] | None = None
    session_id: NDArray[np.int64] | None = None
    prefix_hashes: tuple[tuple[int, ...], ...] | None = None
    sha256: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, index: NDArray[np.int64], *notes: str) -> Trace:
        """The rows of `index`, in its order, with further notes; arrivals are taken along unchanged."""

        def rows(column: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if column is None else _frozen(column[index])

        prefixes = self.prefix_hashes
        return replace(
            self,
            arrival_s=rows(self.arrival_s),
            prompt_tokens=_frozen(self.prompt_tokens[index]),
            output_tokens=_frozen(self.output_tokens[index]),
            max_new_tokens=rows(self.max_new_tokens),
            slo_class=rows(self.slo_class),
            priority=rows(self.priority),
            session_id=rows(self.session_id),
            prefix_hashes=None if prefixes is None else tuple(prefixes[i] for i in index.tolist()),
            notes=(*self.notes, *notes),
        )


def load_trace(
    path: Path,
    *,
    format: str | None = None,
    time_unit: str | None = None,
    on_zero: str = "drop",
    rename: tuple[tuple[str, str], ...] = (),
) -> Trace:
    """Read a trace file; the same unchanged file is parsed once.

    `format` and `time_unit` (s, ms, us, ns, iso) override what the reader would recognise; `rename` pairs our
    column names with the file's. `on_zero`: rows with a zero length are dropped, or clamped to one token.
    Raises SimctlError, with file and line, for anything that cannot be read without guessing.
    """
    if on_zero not in ON_ZERO:
        raise SimctlError(f"on_zero '{on_zero}' is not one of {', '.join(ON_ZERO)}")
    try:
        found = path.stat()
    except OSError as error:
        raise SimctlError(f"cannot read trace {path}: {error.strerror or error}") from None
    return _load(path, found.st_mtime_ns, found.st_size, format, time_unit, on_zero, rename)


@lru_cache(maxsize=16)
def _load(
    path: Path,
    _mtime_ns: int,
    _size: int,
    format: str | None,
    time_unit: str | None,
    on_zero: str,
    rename: tuple[tuple[str, str], ...],
) -> Trace:
    raw = _renamed(read_table(path), rename)
    form = _format_of(raw, format)
    have = {formats.fold(name): name for name in raw.table.column_names}
    for column, reason in form.refuse.items():
        if formats.fold(column) in have:
            raise SimctlError(f"trace {path} has the column '{column}': {reason}")
    used = {
        ours: have[formats.fold(theirs)] for ours, theirs in _mapping(form) if formats.fold(theirs) in have
    }
    trace = _columns(raw, form, used, time_unit)
    trace = _sorted(_without_zeros(trace, form.zero_means, on_zero))
    return replace(trace, notes=(*trace.notes, *_remarks(raw, form, used), *_timing(trace)))


def _format_of(raw: RawTable, name: str | None) -> formats.TraceFormat:
    columns_there = raw.table.column_names
    if name is None:
        form = formats.recognise(columns_there)
        if form is None:
            known = "; ".join(f"{f.name}: {', '.join(f.order())}" for f in formats.built_in().values())
            if len(columns_there) == 1 and (mark := next((m for m in ";\t|" if m in columns_there[0]), "")):
                raise SimctlError(
                    f"trace {raw.path} seems to separate its fields by {mark!r}; save it with commas"
                )
            raise SimctlError(
                f"trace {raw.path} has the columns {', '.join(columns_there[:8])}, which no format has "
                f"({known}); map them with columns: "
                "{prompt_tokens: NAME, output_tokens: NAME, arrival_s: NAME}"
            )
        return form
    form = formats.find(name)
    there = {formats.fold(column) for column in columns_there}
    need = [form.prompt, form.output, *([form.arrival] if form.arrival and form.arrival_required else [])]
    missing = [column for column in need if formats.fold(column) not in there]
    if missing and not any(formats.fold(column) in there for column in form.refuse):
        raise SimctlError(
            f"trace {raw.path} has no column '{missing[0]}', which the format {form.name} needs; it has "
            f"{', '.join(columns_there[:8])}.{nearest(missing[0], columns_there)}"
        )
    return form


def _mapping(form: formats.TraceFormat) -> list[tuple[str, str]]:
    arrival = [("arrival_s", form.arrival)] if form.arrival else []
    return [*arrival, ("prompt_tokens", form.prompt), ("output_tokens", form.output), *form.optional.items()]


def _renamed(raw: RawTable, rename: tuple[tuple[str, str], ...]) -> RawTable:
    names = list(raw.table.column_names)
    for ours, theirs in rename:
        if ours not in (*COLUMNS, "prefix_hashes"):
            hint = nearest(ours, COLUMNS) or f" Ours are {', '.join(COLUMNS)}."
            raise SimctlError(f"columns: '{ours}' is not a column of ours.{hint}")
        if theirs not in names:
            raise SimctlError(f"trace {raw.path} has no column '{theirs}'; it has {', '.join(names[:8])}")
        names[names.index(theirs)] = ours
    return replace(raw, table=raw.table.rename_columns(names)) if rename else raw


def _columns(raw: RawTable, form: formats.TraceFormat, used: dict[str, str], time_unit: str | None) -> Trace:
    arrival, notes = None, [f"{raw.kind}, format {form.name} ({form.title})"]
    if "arrival_s" in used:
        stamps = read_stamps(
            raw, used["arrival_s"], unit=form.time_unit, stated=form.unit_stated, override=time_unit
        )
        if time_unit is None:
            check_rate(raw, stamps)
        arrival = stamps.seconds
        notes.append(stamps.note)
    elif time_unit is not None:
        raise SimctlError(f"trace {raw.path} has no arrivals, so time_unit '{time_unit}' does not apply")
    else:
        notes.append("lengths only, no arrivals")
    classes = columns.codes(raw, used["slo_class"]) if "slo_class" in used else (None, ())
    return Trace(
        name=raw.path.name.removesuffix(".gz").rsplit(".", 1)[0],
        format=form.name,
        arrival_s=arrival,
        prompt_tokens=columns.tokens(raw, used["prompt_tokens"]),
        output_tokens=columns.tokens(raw, used["output_tokens"]),
        max_new_tokens=columns.tokens(raw, used["max_new_tokens"], least=1)
        if "max_new_tokens" in used
        else None,
        slo_class=classes[0],
        slo_classes=classes[1],
        priority=columns.tokens(raw, used["priority"], least=-32768, most=32767)
        if "priority" in used
        else None,
        session_id=columns.sessions(raw, used["session_id"]) if "session_id" in used else None,
        prefix_hashes=columns.hashes(raw, used["prefix_hashes"]) if "prefix_hashes" in used else None,
        sha256=raw.sha256,
        notes=tuple(notes),
    )


def _without_zeros(trace: Trace, meaning: str, on_zero: str) -> Trace:
    empty = (trace.prompt_tokens == 0) | (trace.output_tokens == 0)
    count = int(empty.sum())
    if count == 0:
        return trace
    if on_zero == "clamp":
        return replace(
            trace,
            prompt_tokens=np.maximum(trace.prompt_tokens, 1),
            output_tokens=np.maximum(trace.output_tokens, 1),
            notes=(*trace.notes, f"{count:,} rows with zero tokens ({meaning}) clamped to one token"),
        )
    if count == len(trace):
        raise SimctlError(f"trace {trace.name}: every row has zero prompt or output tokens; nothing is left")
    note = f"{count:,} of {len(trace):,} rows with zero tokens ({meaning}) dropped"
    kept = trace.take(np.flatnonzero(~empty), note)
    if kept.arrival_s is None:
        return kept
    return replace(kept, arrival_s=_frozen(kept.arrival_s - kept.arrival_s.min()))


def _sorted(trace: Trace) -> Trace:
    if trace.arrival_s is None:
        return trace.take(np.arange(len(trace)))
    late = int(np.sum(np.diff(trace.arrival_s) < 0))
    if late == 0:
        return trace.take(np.arange(len(trace)))
    order = np.argsort(trace.arrival_s, kind="stable")
    return trace.take(order, f"{late:,} rows out of order; sorted by arrival")


def _remarks(raw: RawTable, form: formats.TraceFormat, used: dict[str, str]) -> list[str]:
    notes = list(raw.notes)
    ignored = [name for name in raw.table.column_names if name not in used.values()]
    if ignored:
        notes.append(f"columns not used: {', '.join(ignored)}")
    usual = [formats.fold(column) for column in form.order()]
    there = [name for name in map(formats.fold, raw.table.column_names) if name in usual]
    if there != [name for name in usual if name in there]:
        notes.append("columns in another order than usual; read by name")
    if "prefix_hashes" in used and form.block_tokens:
        notes.append(f"prefix hashes of {form.block_tokens}-token blocks")
    return notes


def _timing(trace: Trace) -> list[str]:
    if trace.arrival_s is None:
        return [f"{len(trace):,} requests"]
    span = float(trace.arrival_s[-1])
    if span == 0.0:
        return [f"{len(trace):,} requests, all at once"]
    rate = (len(trace) - 1) / span
    note = f"{len(trace):,} requests over {span:.3f} s, mean rate {rate:.4g} requests/s"
    equal = int(np.sum(np.diff(trace.arrival_s) == 0))
    return [note, f"{equal:,} requests share their stamp with the one before"] if equal else [note]


def _frozen(column: NDArray[Any]) -> NDArray[Any]:
    column.flags.writeable = False
    return column

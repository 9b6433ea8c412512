"""Rows as text."""

from __future__ import annotations

from benchmarks.measure import Row

COLUMNS = (
    ("GROUP", 9),
    ("WHAT", 28),
    ("BY", 9),
    ("REQUESTS", 10),
    ("ITERATIONS", 11),
    ("DEC/IT", 7),
    ("US/IT", 8),
    ("M TOK/S", 9),
    ("LOOP S", 9),
    ("START S", 8),
    ("PROCESS S", 10),
    ("PEAK MIB", 9),
    ("SPREAD", 7),
)


def cells(row: Row) -> list[str]:
    """A row's figures; empty where there is nothing to tell."""
    some = row.iterations > 0
    return [
        row.group,
        row.name,
        row.executor,
        f"{row.requests:,}" if row.requests else "",
        f"{row.iterations:,}" if some else "",
        f"{row.decisions / row.iterations:.2f}" if some else "",
        f"{row.us_per_iteration:.2f}" if some else "",
        f"{row.tokens_per_s / 1e6:.2f}" if row.loop_s else "",
        f"{row.loop_s:.3f}" if row.loop_s else "",
        f"{row.startup_s:.2f}" if row.loop_s else "",
        f"{row.process_s:.2f}" if row.process_s else "",
        f"{row.peak_mib:.0f}" if row.peak_mib else "",
        f"{100 * row.spread:.0f} %" if len(row.loops_s) > 1 else "",
    ]


def header() -> str:
    """The table's head."""
    return " ".join(
        name.ljust(width) if n < 3 else name.rjust(width) for n, (name, width) in enumerate(COLUMNS)
    )


def line(row: Row) -> str:
    """A row of the table, or why it is missing."""
    if row.note:
        return f"{row.group.ljust(9)} {row.name.ljust(28)} {row.executor.ljust(9)} {row.note}"
    widths = [width for _, width in COLUMNS]
    return " ".join(
        cell.ljust(width) if n < 3 else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(cells(row), widths, strict=True))
    )

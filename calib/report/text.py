"""Markdown tables and how numbers are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Section:
    """`lead`: one sentence of what the section shows; `body`: Markdown blocks; `pictures`: SVG text by name."""

    title: str
    lead: str
    body: Sequence[str]
    pictures: Mapping[str, str] = field(default_factory=dict)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table; columns after the first `words` are aligned right."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * words + " ---: |" * (len(head) - words)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def number(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits, never in powers of ten; a dash if there is none."""
    if not np.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if places > digits else text


def us(seconds: float) -> str:
    """Microseconds."""
    return number(seconds * 1e6)


def ms(seconds: float) -> str:
    """Milliseconds."""
    return number(seconds * 1e3)


def ratio(value: float) -> str:
    """A ratio with two decimals."""
    return f"{value:.2f}" if np.isfinite(value) else "–"


def percent(share: float, digits: int = 0) -> str:
    """A share as percent."""
    return f"{share * 100:.{digits}f} %" if np.isfinite(share) else "–"


def tokens(value: float) -> str:
    """A count without decimals."""
    return f"{value:.0f}" if np.isfinite(value) else "–"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= 0.999 * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


def spread_of(values: pd.Series) -> list[str]:
    """n, median, 95th percentile and maximum of slowdowns, as cells."""
    if values.empty:
        return ["0", "–", "–", "–"]
    return [
        str(len(values)),
        ratio(values.median()),
        ratio(values.quantile(0.95)),
        ratio(values.max()),
    ]


def counted(values: pd.Series) -> str:
    """Median and n in one cell."""
    return f"{ratio(values.median())} (n {len(values)})" if len(values) else "–"


def interquartile(rows: pd.DataFrame) -> float:
    """Median over rows of (p75 − p25) / median."""
    return float(((rows.p75_s - rows.p25_s) / rows.time_s).median())

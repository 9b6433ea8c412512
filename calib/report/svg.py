"""Charts as small hand-written SVG: lines and dots on linear or logarithmic axes, a white ground of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 34, 44
LEGEND_LINE = 16
LETTER = 7.2  # pixels of one character of a legend
DASHED = "#222"
# Okabe and Ito's palette, without its yellow: told apart on white with every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#7A4B9E")


@dataclass(frozen=True)
class Series:
    """One line (`joined`) or cloud of dots; `points` are (x, y). `colour`: instead of the next of the palette."""

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    colour: str = ""


@dataclass(frozen=True)
class Axis:
    """`log`: 0 linear, else the base of the ticks (2 or 10). `low`/`high`: range, from the data where None."""

    title: str
    log: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line; its note, if any, stands in the legend."""

    y: float
    note: str


class _Scale:
    """Data to pixels along one axis."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if high <= low:
            high = low * 2 if low > 0 else low + 1.0
        self.ticks = _ticks(low, high, axis.log)
        self.low = min(low, self.ticks[0]) if axis.low is None else low
        self.high = max(high, self.ticks[-1]) if axis.high is None else high

    def __call__(self, value: float) -> float:
        if self.axis.log:
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _ticks(low: float, high: float, log: int) -> list[float]:
    if log:
        of = log2 if log == 2 else log10
        first, last = floor(of(low) + 1e-9), ceil(of(high) - 1e-9)
        steps = [float(log) ** i for i in range(first, last + 1)]
        if log == 10 and last - first <= 2:
            steps = sorted({s * f for s in steps for f in (1, 2, 5)})
            return [s for s in steps if low * 0.5 <= s <= high * 2]
        return steps[:: max(1, len(steps) // 10)]
    step = 10.0 ** floor(log10((high - low) / 4))
    step *= next(f for f in (1, 2, 2.5, 5, 10) if (high - low) / (step * f) <= 7)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _label(value: float) -> str:
    if value >= 1024 and log2(value) == int(log2(value)):
        return f"{value / 1024:g}k" if value < 2**20 else f"{value / 2**20:g}M"
    return f"{value:.6g}"


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], levels: Sequence[Level] = ()) -> str:
    """An SVG picture of `series`; bare axes if none has a point."""
    shown = [s for s in series if s.points]
    xs = [p[0] for s in shown for p in s.points] or [1.0]
    ys = [p[1] for s in shown for p in s.points] + [level.y for level in levels] or [1.0]
    colours = [s.colour or COLOURS[i % len(COLOURS)] for i, s in enumerate(shown)]
    noted = [level for level in levels if level.note]
    names = [s.name for s in shown] + [f"{level.note} ({level.y:.4g})" for level in noted]
    rows = _legend_rows(names)
    top = TOP + LEGEND_LINE * len(rows)
    height = HEIGHT + LEGEND_LINE * (len(rows) - 1)
    across = _Scale(x, xs, LEFT, WIDTH - RIGHT)
    up = _Scale(y, ys, height - BOTTOM, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui,sans-serif" font-size="12" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
        *_axes(across, up, height, top),
        *_legend(rows, colours),
        *(_drawn(s, colours[i], across, up) for i, s in enumerate(shown)),
        *_levels(levels, up),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def frame(
    title: str, x: Axis, y_title: str, height: int, legend: Sequence[tuple[str, str]]
) -> tuple[_Scale, int, list[str], list[str]]:
    """A picture without a scale upwards, for what draws its own rows `height` pixels high: (scale along `x`, top of the
    rows, lines before what is drawn, lines after it). `legend`: names and colours."""
    rows = _legend_rows([name for name, _ in legend])
    top = TOP + LEGEND_LINE * len(rows)
    bottom = top + height
    across = _Scale(x, [x.low or 0.0, x.high or 1.0], LEFT, WIDTH - RIGHT)
    inside = [t for t in across.ticks if across.low <= t <= across.high * (1 + 1e-9)]
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" width="{WIDTH}" '
        f'height="{bottom + BOTTOM}" font-family="system-ui,sans-serif" font-size="12" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{bottom + BOTTOM}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
        *_legend(rows, [colour for _, colour in legend]),
    ]
    centre = (top + bottom) // 2
    tail = [
        f'<path d="M{LEFT} {top}V{bottom}H{WIDTH - RIGHT}" stroke="#555" fill="none"/>',
        *(
            f'<text x="{across(t):.0f}" y="{bottom + 16}" text-anchor="middle">{_label(t)}</text>'
            for t in inside
        ),
        f'<text x="{(LEFT + WIDTH - RIGHT) // 2}" y="{bottom + 36}" text-anchor="middle">{escape(x.title)}</text>',
        f'<text x="{LEFT - 24}" y="{centre}" text-anchor="middle" transform="rotate(-90 {LEFT - 24} {centre})">'
        f"{escape(y_title)}</text>",
        "</svg>",
    ]
    return across, top, head, tail


def _axes(across: _Scale, up: _Scale, height: int, top: int) -> list[str]:
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    inside = [t for t in across.ticks if across.low <= t <= across.high * (1 + 1e-9)]
    heights = [t for t in up.ticks if up.low <= t <= up.high * (1 + 1e-9)]
    grid = "".join(f"M{LEFT} {up(t):.1f}H{right}" for t in heights)
    grid += "".join(f"M{across(t):.1f} {top}V{bottom}" for t in inside)
    made = [f'<path d="{grid}" stroke="#e3e3e3" fill="none"/>']
    made.append(f'<path d="M{LEFT} {top}V{bottom}H{right}" stroke="#555" fill="none"/>')
    made += [
        f'<text x="{across(t):.0f}" y="{bottom + 16}" text-anchor="middle">{_label(t)}</text>' for t in inside
    ]
    made += [
        f'<text x="{LEFT - 6}" y="{up(t) + 4:.0f}" text-anchor="end">{_label(t)}</text>' for t in heights
    ]
    middle = (LEFT + right) // 2
    made.append(
        f'<text x="{middle}" y="{height - 8}" text-anchor="middle">{escape(across.axis.title)}</text>'
    )
    centre = (top + bottom) // 2
    made.append(
        f'<text x="16" y="{centre}" text-anchor="middle" transform="rotate(-90 16 {centre})">'
        f"{escape(up.axis.title)}</text>"
    )
    return made


def _levels(levels: Sequence[Level], up: _Scale) -> list[str]:
    return [
        f'<path d="M{LEFT} {up(level.y):.1f}H{WIDTH - RIGHT}" stroke="{DASHED}" stroke-dasharray="5 4"/>'
        for level in levels
    ]


def _legend_rows(names: Sequence[str]) -> list[list[tuple[int, int, str]]]:
    """Names dealt into lines that fit: (index of the series, x, name)."""
    rows: list[list[tuple[int, int, str]]] = [[]]
    at = float(LEFT)
    for index, name in enumerate(names):
        needed = 24 + LETTER * len(name) + 10
        if rows[-1] and at + needed > WIDTH - RIGHT:
            rows.append([])
            at = float(LEFT)
        rows[-1].append((index, int(at), name))
        at += needed
    return rows


def _legend(rows: Sequence[Sequence[tuple[int, int, str]]], colours: Sequence[str]) -> list[str]:
    """Samples and names; entries without a colour are of dashed lines."""
    made = []
    for line, row in enumerate(rows):
        y = 36 + LEGEND_LINE * line
        for index, x, name in row:
            style = f'stroke="{DASHED}" stroke-dasharray="5 3"'
            if index < len(colours):
                style = f'stroke="{colours[index]}" stroke-width="4" stroke-linecap="round"'
            made.append(f'<path d="M{x} {y}h16" {style}/>')
            made.append(f'<text x="{x + 22}" y="{y + 4}">{escape(name)}</text>')
    return made


def _drawn(series: Series, colour: str, across: _Scale, up: _Scale) -> str:
    places = [(across(a), up(b)) for a, b in series.points]
    if not series.joined:
        places = sorted({(round(a), round(b)) for a, b in places})
    dots = "".join(f"M{a:.4g} {b:.4g}h0" for a, b in places)
    cloud = "" if series.joined else ' stroke-opacity=".6"'
    made = f'<path d="{dots}" stroke="{colour}" stroke-width="5" stroke-linecap="round" fill="none"{cloud}/>'
    if series.joined and len(places) > 1:
        line = "M" + "L".join(f"{a:.4g} {b:.4g}" for a, b in places)
        made += f'\n<path d="{line}" stroke="{colour}" stroke-width="1.6" fill="none"/>'
    return made

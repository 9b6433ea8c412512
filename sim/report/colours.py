"""One colour and one marker per policy, the same in every figure.

Colours are those of Okabe and Ito (Color Universal Design, 2008), told apart with any colour vision; the marker
tells them apart in print and past the seventh policy. Figures are written in the light colours; the page swaps
each for its partner in `DARK` when the reader's system is dark.
"""

from __future__ import annotations

from collections.abc import Sequence

POLICY = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot")
INK, MUTED, GRID, PAPER = "#1b1f24", "#59636e", "#e4e7eb", "#fefefe"
DARK = {
    "#0072b2": "#5aa2ff",
    "#d55e00": "#ff8a4c",
    "#009e73": "#34c99a",
    "#cc79a7": "#e79cc6",
    "#e69f00": "#f2b632",
    "#56b4e9": "#a5dcff",
    "#7a7a7a": "#a3a3a3",
    INK: "#e6e8eb",
    MUTED: "#9aa4af",
    GRID: "#2d333b",
    PAPER: "#161a20",
}


def colour(policies: Sequence[str], policy: str) -> str:
    """The policy's colour (light)."""
    return POLICY[policies.index(policy) % len(POLICY)]


def symbol(policies: Sequence[str], policy: str) -> str:
    """The policy's marker, a plotly symbol."""
    return SYMBOLS[policies.index(policy) % len(SYMBOLS)]


def dash(policies: Sequence[str], policy: str) -> str:
    """Solid for the first seven policies, then other patterns as the colours repeat."""
    return DASHES[policies.index(policy) // len(POLICY) % len(DASHES)]

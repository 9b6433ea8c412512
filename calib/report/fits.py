"""Held-out errors of the fitted curves, as profile.yaml states them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calib.report.data import Profile
from calib.report.text import Section, percent, table

REGIMES = ("under_20us", "over_20us")
NEEDED = ("points", "median")


def held_out(profile: Profile) -> Section | None:
    """Every error summary under profile.yaml's `about`; None without one."""
    rows = [
        (
            " / ".join(path),
            leaf["points"],
            percent(leaf["median"], 1),
            *(percent(leaf[k], 1) if k in leaf else "–" for k in ("p90", "p95", "max", "bias")),
        )
        for path, leaf in _leaves(profile.about, ())
        if leaf["points"]
    ]
    if not rows:
        return None
    lead = f"Errors of the fitted curves on points that were held out of the fit ({len(rows)} tables)."
    head = ("of / held out", "n", "median", "p90", "p95", "max", "bias")
    note = (
        "Errors are |predicted / measured − 1|, bias is signed. Folds: *random* fifths, whole *rows* (one size), "
        "one partition size (*sms*), the *frontier* (largest 20 % along an axis), whole *shapes*."
    )
    return Section("How well the fitted curves predict", lead, [table(head, rows), note])


def _leaves(
    node: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if all(key in node for key in NEEDED):
        yield path, node
        return
    for key, value in node.items():
        if isinstance(value, Mapping) and key not in REGIMES:
            yield from _leaves(value, (*path, str(key)))

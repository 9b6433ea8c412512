"""`simctl reproduce`: what papers published, ours beside it, and whether that counts as reproduced."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from sim.errors import SimctlError


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="All groups of checks; some minutes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reproduce(names: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Run groups of checks of published figures; without a name, list the groups.

    GPUs that nobody has measured are priced by their data sheets. Ends with 1 if a figure is not reproduced.

    Example: simctl reproduce sarathi pod-offline
    """
    from sim.study.papers import GROUPS
    from sim.suggest import nearest

    for name in names:
        if name not in GROUPS:
            raise SimctlError(
                f"unknown group '{name}'.{nearest(name, GROUPS) or ' Known: ' + ', '.join(GROUPS)}"
            )
    chosen = list(GROUPS) if everything else list(dict.fromkeys(names))
    if not chosen:
        _list(as_json)
        return 0
    rows: list[dict[str, Any]] = []
    for name in chosen:
        if sys.stderr.isatty():
            click.echo(f"{name}: {GROUPS[name].title}, about {GROUPS[name].seconds} s", err=True)
        rows += [
            {
                "name": check.name,
                "source": check.source,
                "published": check.published,
                "ours": check.ours,
                "interval": [_finite(check.low), _finite(check.high)],
                "verdict": "reproduced" if check.holds else "missed",
            }
            for check in GROUPS[name].checks()
        ]
    _show(rows, as_json)
    return 0 if all(row["verdict"] == "reproduced" for row in rows) else 1


def _finite(bound: float) -> float | None:
    """A bound, None where there is none."""
    return bound if abs(bound) < 1e6 else None


def _list(as_json: bool) -> None:
    from sim.cli.tables import table
    from sim.study.papers import GROUPS

    if as_json:
        found = [{"name": n, "title": g.title, "seconds": g.seconds} for n, g in GROUPS.items()]
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(table(("NAME", "SECONDS", "CHECKS"), [(n, g.seconds, g.title) for n, g in GROUPS.items()]))


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    from sim.cli.tables import table

    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return

    def band(bounds: list[float | None]) -> str:
        low, high = ("" if bound is None else f"{bound:.3g}" for bound in bounds)
        return f"{low}..{high}"

    shown = [
        (r["name"], r["source"], r["published"], band(r["interval"]), f"{r['ours']:.3g}", r["verdict"])
        for r in rows
    ]
    click.echo(table(("CHECK", "SOURCE", "PUBLISHED", "COUNTS AS REPRODUCED", "OURS", "VERDICT"), shown))

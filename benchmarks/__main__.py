"""Measure and print: `python -m benchmarks [--only GROUP]... [--write docs/speed.md]`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.groups import BOTH, GROUPS, Options, machine
from benchmarks.measure import ROOT, Row
from benchmarks.table import header, line
from benchmarks.verdicts import verdicts
from benchmarks.where import profile

PROFILE = "profile"


@click.command()
@click.option(
    "--only", type=click.Choice([*GROUPS, PROFILE]), multiple=True, help="Groups to measure (default: all)."
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--requests", type=click.IntRange(min=10), default=10_000, show_default=True)
@click.option("--sizes", default="1000,10000,100000,1000000", show_default=True, help="Of the group `size`.")
@click.option("--by", type=click.Choice(BOTH), multiple=True, help="Who runs the hot code (default: both).")
@click.option("--slow", is_flag=True, help="CPython on a million requests too: minutes.")
@click.option("--mocker-python", help="An interpreter that has ai-dynamo-runtime, if this one has not.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=ROOT / "out" / "benchmarks")
@click.option(
    "--write", type=click.Path(path_type=Path), help="Rewrite this page from all groups measured so far."
)
def main(
    only: tuple[str, ...],
    repeats: int,
    requests: int,
    sizes: str,
    by: tuple[str, ...],
    slow: bool,
    mocker_python: str | None,
    output: Path,
    write: Path | None,
) -> None:
    """How fast the simulator is: one table, a group at a time; results stay in out/benchmarks.

    Example: python -m benchmarks --only peers --only load
    """
    counts = tuple(int(n) for n in sizes.split(","))
    options = Options(output.resolve(), counts, requests, repeats, slow, mocker_python, by or BOTH)
    output.mkdir(parents=True, exist_ok=True)
    click.echo(" | ".join(f"{key}: {value}" for key, value in machine().items()))
    click.echo(header())
    rows: dict[str, list[Row]] = {}
    for group in [name for name in GROUPS if not only or name in only]:
        rows[group] = []
        for row in GROUPS[group](options):
            click.echo(line(row))
            rows[group].append(row)
        result = {"machine": machine(), "rows": [asdict(row) for row in rows[group]]}
        (output / f"{group}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if not only or PROFILE in only:
        found = profile(options.trace(requests))
        (output / f"{PROFILE}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    for verdict in verdicts([row for group in rows.values() for row in group]):
        click.echo(verdict.sentence)
    if write:
        from benchmarks.page import write_page

        write_page(output, write)


if __name__ == "__main__":
    main()

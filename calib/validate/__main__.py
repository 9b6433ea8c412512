"""python -m calib.validate FOLDER... -o OUT: compare the cases of folders again and write the pages."""

from __future__ import annotations

from pathlib import Path

import click

from calib.validate.page import opened, write_pages
from calib.validate.study import fit_hosts_of


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("docs"), show_default=True)
@click.option(
    "--hosts-from",
    type=click.Path(path_type=Path, exists=True),
    help="Fit the host terms of the first folder anew from this folder of cases.",
)
def main(folders: tuple[Path, ...], output: Path, hosts_from: Path | None) -> None:
    """Write fidelity.json and fidelity.md from measured cases, a folder a study; no GPU is needed."""
    if hosts_from is not None:
        fit_hosts_of(hosts_from, folders[0], opened(folders[0])[1])
    rows = write_pages(folders, output)
    click.echo(f"{len(rows)} rows in {output / 'fidelity.json'}")


main()

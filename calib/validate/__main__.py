"""python -m calib.validate FOLDER -o OUT: compare the cases of a folder again and write the pages."""

from __future__ import annotations

from pathlib import Path

import click

from calib.validate.page import write_pages


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("docs"), show_default=True)
def main(folder: Path, output: Path) -> None:
    """Write fidelity.json and fidelity.md from measured cases; no GPU is needed."""
    rows = write_pages(folder, output)
    click.echo(f"{len(rows)} rows in {output / 'fidelity.json'}")


main()

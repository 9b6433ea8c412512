"""`simctl report`: redraw the page of a result folder from its files."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page to write [DIR/report.html].")
@click.option(
    "--plotlyjs",
    type=click.Choice(["inline", "shared"]),
    default="inline",
    show_default=True,
    help="Put plotly's script (4.8 MB) into the page, or once beside it for all pages there.",
)
def report(folder: Path, output: Path | None, plotlyjs: str) -> None:
    """Redraw the report of a result folder.

    Reads summary.json and requests.parquet, whatever version of the simulator wrote them; no simulation runs.

    Example: simctl report out/quickstart -o quickstart.html
    """
    from sim.errors import SimctlError
    from sim.report.html import write_report

    if output is not None and output.is_dir():
        raise SimctlError(f"{output} is a folder; give the page to write, such as {output / 'report.html'}")
    click.echo(write_report(folder, output, shared_script=plotlyjs == "shared"))

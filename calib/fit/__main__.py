"""`python -m calib.fit FOLDER`: fit a calibration and write the profile's files beside its measurements."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from calib.fit.make import make_profile
from sim.errors import SimctlError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Another folder; measurements are copied."
)
@click.option("--name", help="Name of the profile (default: that of the output folder).")
@click.option("--gpu", help="Built-in GPU that was measured (default: by the device's name).")
def main(folder: Path, output: Path | None, name: str | None, gpu: str | None) -> None:
    """Fit a calibration's measurements and write profile.yaml, curves.json, contention.json and errors.json.

    Example: python -m calib.fit out/h200 -o calib/profiles/h200-sxm
    """
    start = time.monotonic()

    def tick(text: str) -> None:
        click.echo(f"{time.monotonic() - start:6.1f} s  {text}", err=True)

    click.echo(str(make_profile(folder, output, name, gpu, tick)))


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (SimctlError, click.ClickException) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)

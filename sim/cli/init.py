"""`simctl init`: a commented experiment to start from."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option("--force", is_flag=True, help="Overwrite an experiment.yaml that is there.")
def init(folder: Path, force: bool) -> None:
    """Write a commented experiment.yaml into FOLDER (default: here); it runs as it is.

    Example: simctl init my-study && simctl run my-study/experiment.yaml
    """
    from importlib.resources import files

    from sim.errors import SimctlError

    target = folder / "experiment.yaml"
    if target.exists() and not force:
        raise SimctlError(f"{target} exists already; --force overwrites it")
    text = files("sim").joinpath("data/experiments/template.yaml").read_text(encoding="utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SimctlError(f"cannot write {target}: {error.strerror or error}") from None
    click.echo(f"Wrote {target}. Next: simctl run {target} -o {folder / 'out'}")

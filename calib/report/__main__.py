"""`python -m calib.report FOLDER -o PAGE`: write the page of a profile folder and its pictures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from calib.report.data import load
from calib.report.page import write
from sim.errors import SimctlError


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 written, 2 the folder is no profile."""
    parser = argparse.ArgumentParser(
        prog="python -m calib.report",
        description="Write a page of what a measured profile shows; its pictures go to img/<page> beside it.",
        epilog="Example: python -m calib.report calib/profiles/h200-sxm -o docs/h200.md",
    )
    parser.add_argument("folder", type=Path, help="profile folder: run.yaml and measurements/")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the Markdown file to write")
    given = parser.parse_args(arguments)
    try:
        written = write(load(given.folder), given.folder.as_posix(), given.output)
    except SimctlError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

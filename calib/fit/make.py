"""From a folder of measurements to a profile: fit, score on random shapes, write the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from calib.fit.assemble import named_curves
from calib.fit.build import fit_run
from calib.fit.folder import contents, write
from calib.fit.scoring import score_random


def make_profile(
    folder: Path,
    target: Path | None = None,
    name: str | None = None,
    gpu: str | None = None,
    tick: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write profile.yaml, curves.json, contention.json and errors.json beside the measurements, or into `target`
    with a copy of them. `gpu`: built-in GPU that was measured (default: by the device's name). Returns the
    profile's folder; raises SimctlError where the measurements do not make a profile."""
    target = target or folder
    built = fit_run(folder, gpu, tick)
    tick("random shapes")
    curves = named_curves(built.solo)
    held = score_random(folder, built, built.run["model"], curves)
    files = contents(built, name or target.resolve().name, held)
    if target.resolve() != folder.resolve():
        shutil.copytree(folder / "measurements", target / "measurements", dirs_exist_ok=True)
        shutil.copy(folder / "run.yaml", target / "run.yaml")
    write(target, files)
    tick("done")
    return target

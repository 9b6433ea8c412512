"""The result folder: runs are written as they finish beside the target, which appears when all are done.

While a study runs, `DIR.partial` holds `study.json` (whose results these are) and `parts/`, a JSON file and
parquet files a run; the JSON is written last and marks the run as finished.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sim.config.resolve import content_hash
from sim.errors import SimctlError
from sim.study.execute import Outcome
from sim.study.plan import Study


class ResultFolder:
    """Where the results of one study go. `steps`: does it hold a row a launch?"""

    def __init__(self, target: Path, study: Study, *, steps: bool = False) -> None:
        # "." and ".." have no name to put the partial folder beside
        self.target = target if target.name not in ("", "..") else target.resolve()
        if not self.target.name:
            raise SimctlError(f"{target} cannot hold results; give a folder of their own with -o")
        target = self.target
        self.partial = target.with_name(target.name + ".partial")
        self.parts = self.partial / "parts"
        self.study = study
        self.steps = steps
        self.key = content_hash([study.resolved, steps])

    def check_target(self, *, force: bool = False) -> None:
        """Refuse a target that holds anything but an older result of this very experiment."""
        try:
            self.target.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:
            raise SimctlError(
                f"{self.target} cannot hold results: {_why(error)}; choose another -o"
            ) from None
        if self.target.exists() and not self.target.is_dir():
            raise SimctlError(f"{self.target} is a file; give a folder for the results with -o")
        if not self.target.exists() or not any(self.target.iterdir()):
            return
        held = self.target / "experiment.yaml"
        if not (held.is_file() and (self.target / "summary.json").is_file()):
            raise SimctlError(f"{self.target} holds files that are not results; give another folder with -o")
        if force:
            return
        try:
            other = yaml.safe_load(held.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            other = None
        if not isinstance(other, dict) or _inputs(other) != _inputs(self.study.resolved):
            raise SimctlError(
                f"{self.target} holds the results of another experiment; "
                "give another folder with -o, or --force to replace them"
            )

    def open(self, *, resume: bool = False) -> set[int]:
        """Make the partial folder, or with `resume` take up the one that is there; returns finished runs."""
        marker = self.partial / "study.json"
        if self.partial.exists() and not marker.is_file():
            raise SimctlError(f"{self.partial} is in the way and not an interrupted run; move it away")
        self._lock()
        if resume and marker.is_file():
            if marker.read_text(encoding="utf-8") == json.dumps({"sha256": self.key}):
                return {int(path.stem) for path in self.parts.glob("*.json")}
            self.release()
            raise SimctlError(
                f"{self.partial} holds an interrupted run of another experiment, version or set of outputs; "
                "remove it, or leave out --resume to start over"
            )
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir()
        marker.write_text(json.dumps({"sha256": self.key}))
        return set()

    def _lock(self) -> None:
        """Hold the partial folder; the system lets go of it when the process ends, however it ends."""
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._held = (self.partial / "lock").open("a")
        except OSError as error:
            raise SimctlError(f"cannot write {self.target}: {_why(error)}; choose another -o") from None
        if sys.platform == "win32":
            return  # has no such lock: two studies in one folder are not told apart there
        import fcntl

        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SimctlError(
                f"another simctl is writing {self.target}; wait for it, or choose another -o"
            ) from None

    def release(self) -> None:
        """Let others take up the partial folder."""
        self._held.close()

    def discard(self) -> None:
        """Remove the partial folder."""
        self.release()
        shutil.rmtree(self.partial, ignore_errors=True)

    def add(self, outcome: Outcome) -> None:
        """Write one finished run."""
        stem = self.parts / f"{outcome.index:06d}"
        outcome.requests.to_parquet(stem.with_suffix(".requests.parquet"), index=False)
        if outcome.steps is not None:
            outcome.steps.to_parquet(stem.with_suffix(".steps.parquet"), index=False)
        waiting = stem.with_suffix(".tmp")
        waiting.write_text(
            json.dumps({"summary": outcome.summary, "timing": outcome.timing}, allow_nan=False)
        )
        os.replace(waiting, stem.with_suffix(".json"))

    def finished(self) -> Iterator[dict[str, Any]]:
        """The finished runs' {"summary", "timing"}, in the order of the runs."""
        for path in sorted(self.parts.glob("*.json")):
            yield json.loads(path.read_text(encoding="utf-8"))

    def part(self, index: int, kind: str) -> Path:
        """Where a run's `requests` or `steps` are."""
        return self.parts / f"{index:06d}.{kind}.parquet"

    def table(self, index: int, kind: str) -> pd.DataFrame:
        """A run's `requests` or `steps`."""
        return pd.read_parquet(self.part(index, kind))

    def has(self, index: int, kind: str) -> bool:
        """Did that run leave such a table?"""
        return self.part(index, kind).is_file()

    def publish(self) -> None:
        """Drop the parts and put the folder in place of the target."""
        shutil.rmtree(self.parts)
        for name in ("study.json", "lock"):
            (self.partial / name).unlink()
        old = self.target.with_name(self.target.name + ".old")
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.target, old)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial, self.target)
        self.release()
        shutil.rmtree(old, ignore_errors=True)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _inputs(resolved: dict[str, Any]) -> dict[str, Any]:
    """What the user asked for and on which data, whatever the versions."""
    block = resolved.get("resolved") or {}
    return {**resolved, "resolved": {k: v for k, v in block.items() if k != "versions"}}

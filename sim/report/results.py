"""A result folder as the reports read it: `summary.json` must be there, the rest adds to the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sim.errors import SimctlError

SCHEMA_VERSION = 1
REQUEST_COLUMNS = (
    "policy",
    "request_rate",
    "arrival_s",
    "output_tokens",
    "status",
    "first_token_s",
    "finish_s",
)


@dataclass(frozen=True)
class Results:
    """What a result folder holds; `requests` is None and `missing` says why if its file cannot be used."""

    name: str
    experiment: dict[str, Any]
    profile: dict[str, Any]
    runs: list[dict[str, Any]]
    requests: pd.DataFrame | None = None
    missing: str = ""


def read_results(folder: Path) -> Results:
    """Read a result folder of any age; raises SimctlError if it has no usable `summary.json`."""
    summary = _summary(folder)
    experiment = _mapping(summary.get("experiment")) or _written_experiment(folder)
    requests, missing = _requests(folder)
    return Results(
        str(experiment.get("name") or folder.resolve().name),
        experiment,
        _mapping(summary.get("profile")),
        summary["runs"],
        requests,
        missing,
    )


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not folder.is_dir():
        raise SimctlError(f"{folder} is not a folder; give a result folder that `simctl run -o` wrote.")
    if not path.is_file():
        raise SimctlError(f"{folder} holds no summary.json; give a result folder that `simctl run -o` wrote.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimctlError(f"{path} cannot be read as JSON: {error}.") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise SimctlError(f"{path}: schema_version is {version!r}, this version reads {SCHEMA_VERSION}.")
    runs = data.get("runs")
    if not isinstance(runs, list) or not runs:
        raise SimctlError(f"{path}: key 'runs' must be a list of at least one run.")
    for number, run in enumerate(runs):
        if not isinstance(run, dict) or "policy" not in run:
            raise SimctlError(f"{path}: runs[{number}] must be a mapping with the key 'policy'.")
    return dict(data)


def _written_experiment(folder: Path) -> dict[str, Any]:
    import yaml

    path = folder / "experiment.yaml"
    try:
        return _mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def _requests(folder: Path) -> tuple[pd.DataFrame | None, str]:
    path = folder / "requests.parquet"
    if not path.is_file():
        return None, "requests.parquet is missing, so the latency distributions are not drawn"
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        return None, f"requests.parquet cannot be read ({error}), so the latency distributions are not drawn"
    absent = [name for name in REQUEST_COLUMNS if name not in frame.columns]
    if absent:
        return (
            None,
            f"requests.parquet lacks {', '.join(absent)}, so the latency distributions are not drawn",
        )
    return frame, ""


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}

"""`profile.yaml` of a profile's folder: what it may hold, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sim.cost.base import EXTRAPOLATION, OPERATORS
from sim.errors import SimctlError
from sim.suggest import nearest


@dataclass(frozen=True)
class CurveEntry:
    """One curve of a folder: its form, its file and what is claimed for it."""

    operator: str
    form: str
    file: str
    label: str
    coverage: str
    extrapolation: str


@dataclass(frozen=True)
class FolderSchema:
    """`profile.yaml`: `schema_version`, `name`, `gpu`, `curves` (a list), optional `host` and `energy` terms, and
    `contention` (`file`, `label`, `coverage`): the surface of `sim.cost.measured_contention`, `fused` likewise that
    of `sim.cost.measured_fused`, `collectives` the file of `sim.cost.collectives_file` and `activity` that of
    `sim.cost.activity`. `steps` (`file`, `label`, `jitter_sd`): terms of whole steps, under `composition` of a
    `curves.json`.

    Each curve has `operator`, `form` (one of `FORMS`), `file` (relative to the folder), `label`, and
    optionally `coverage` (a sentence) and `extrapolation` (raise, flag or clip; default flag). Everything under
    `about` (clocks, driver, versions, date, protocol, error table) is carried along unread.
    """

    name: str
    gpu: str
    curves: tuple[CurveEntry, ...]
    host: Mapping[str, Any]
    energy: Mapping[str, Any]
    contention: Mapping[str, Any]
    fused: Mapping[str, Any]
    steps: Mapping[str, Any]
    collectives: Mapping[str, Any]
    activity: Mapping[str, Any]


SCHEMA_VERSION = 1
FORMS = ("roofline", "measured")
FOLDER_KEYS = (
    "schema_version",
    "name",
    "gpu",
    "curves",
    "host",
    "energy",
    "contention",
    "fused",
    "steps",
    "collectives",
    "activity",
    "about",
)
STEP_KEYS = ("file", "label", "jitter_sd")
SURFACE_KEYS = ("file", "label", "coverage")
CURVE_KEYS = ("operator", "form", "file", "label", "coverage", "extrapolation")


def read_yaml(folder: Path) -> dict[str, Any]:
    """The mapping in a folder's `profile.yaml`, unchecked; SimctlError if it is not readable or no mapping."""
    path = folder / "profile.yaml"
    try:
        # the error table makes it long, and the loader in C is ten times as fast where PyYAML has it
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SimctlError(f"Profile file '{path}' is not readable: {error}.") from error
    if not isinstance(data, dict):
        raise SimctlError(f"{path} must hold a mapping with the keys {', '.join(FOLDER_KEYS)}.")
    return data


def read_schema(folder: Path) -> FolderSchema:
    """`profile.yaml` of a folder, checked; SimctlError names the file and the key."""
    data = read_yaml(folder)
    path = folder / "profile.yaml"
    known_keys(data, FOLDER_KEYS, str(path))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise SimctlError(
            f"{path}: schema_version is {data.get('schema_version')!r}, but {SCHEMA_VERSION} is read."
        )
    for key in ("name", "gpu", "curves"):
        if not data.get(key):
            raise SimctlError(f"{path}: key '{key}' is missing.")
    entries = tuple(_entry(row, f"{path}, curves[{index}]") for index, row in enumerate(data["curves"]))
    contention, fused, collectives, activity = (
        _surface_entry(data, name, path) for name in ("contention", "fused", "collectives", "activity")
    )
    host, energy = data.get("host") or {}, data.get("energy") or {}
    steps = data.get("steps") or {}
    known_keys(steps, STEP_KEYS, f"{path}, steps")
    for key in ("file", "label"):
        if steps and not isinstance(steps.get(key), str):
            raise SimctlError(f"{path}, steps: key '{key}' is missing or no text.")
    return FolderSchema(
        data["name"], data["gpu"], entries, host, energy, contention, fused, steps, collectives, activity
    )


def _surface_entry(data: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """The section `name` of a surface in a file of its own, empty if there is none."""
    entry = data.get(name) or {}
    known_keys(entry, SURFACE_KEYS, f"{path}, {name}")
    for key in ("file", "label"):
        if entry and not isinstance(entry.get(key), str):
            raise SimctlError(f"{path}, {name}: key '{key}' is missing or no text.")
    return entry


def _entry(row: Any, where: str) -> CurveEntry:
    if not isinstance(row, dict):
        raise SimctlError(f"{where} must be a mapping with the keys {', '.join(CURVE_KEYS)}.")
    known_keys(row, CURVE_KEYS, where)
    for key in ("operator", "form", "file", "label"):
        if not isinstance(row.get(key), str):
            raise SimctlError(f"{where}: key '{key}' is missing or no text.")
    family = row["operator"].split("/")[0]
    if family not in OPERATORS:
        raise SimctlError(f"{where}: unknown operator '{row['operator']}'.{nearest(family, OPERATORS)}")
    if row["form"] not in FORMS:
        raise SimctlError(f"{where}: unknown form '{row['form']}'; known: {', '.join(FORMS)}.")
    label = row["label"]
    if label != "measured" and not label.startswith(("fitted from ", "extrapolated from ")):
        raise SimctlError(
            f"{where}: label '{label}' must be 'measured', 'fitted from …' or 'extrapolated from … by …'."
        )
    extrapolation = row.get("extrapolation", "flag")
    if extrapolation not in EXTRAPOLATION:
        raise SimctlError(f"{where}: extrapolation '{extrapolation}' is none of {', '.join(EXTRAPOLATION)}.")
    return CurveEntry(
        row["operator"], row["form"], row["file"], label, row.get("coverage", ""), extrapolation
    )


def known_keys(data: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise SimctlError for a key of `data` that is none of `keys`."""
    for key in data:
        if key not in keys:
            raise SimctlError(f"{where}: unknown key '{key}'.{nearest(str(key), keys)}")

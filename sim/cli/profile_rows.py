"""Rows of `simctl profile predict`: read from CSV, answered in their order."""

from __future__ import annotations

import csv
from pathlib import Path

from sim.cost.gpu import load_gpu
from sim.cost.measured_predict import COLUMNS, Answer, Predictor
from sim.cost.profile import find_folder, load_folder, spec_profile
from sim.cost.profile_schema import read_yaml
from sim.errors import SimctlError
from sim.suggest import nearest

DEFAULT_MODEL = "llama-3.1-8b"


def predictor(name: str) -> Predictor:
    """Of a built-in profile, a folder, or `spec:GPU`."""
    if name.startswith("spec:"):
        return Predictor(spec_profile(load_gpu(name.removeprefix("spec:"))), DEFAULT_MODEL)
    folder = find_folder(name)
    data = read_yaml(folder)
    model = (data.get("about") or {}).get("model") or DEFAULT_MODEL
    return Predictor(load_folder(folder, load_gpu(str(data.get("gpu")))), model)


def answers(name: str, path: Path) -> list[Answer]:
    """One answer a row; SimctlError names the file, the row and the column."""
    asked = predictor(name)
    return [_answer(asked, row, f"{path}, row {i}") for i, row in enumerate(read_rows(path), 1)]


def _answer(asked: Predictor, row: dict[str, str], where: str) -> Answer:
    try:
        return asked.answer(row, where)
    except SimctlError as error:
        # a model's own complaint does not know of the row
        if str(error).startswith(where):
            raise
        raise SimctlError(f"{where}: {error}") from error


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file with known columns; cells are stripped text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = [(name or "").strip() for name in reader.fieldnames or []]
            rows = [list(row.values()) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SimctlError(f"'{path}' is not readable: {error}.") from error
    if "kind" not in names:
        raise SimctlError(f"'{path}' has no column 'kind'; columns are {', '.join(COLUMNS)}.")
    for column in names:
        if column not in COLUMNS:
            raise SimctlError(f"'{path}': unknown column '{column}'.{nearest(column, COLUMNS)}")
        if names.count(column) > 1:
            raise SimctlError(f"'{path}': column '{column}' is there twice.")
    found = []
    for i, cells in enumerate(rows, 1):
        if any(isinstance(cell, list) for cell in cells):
            raise SimctlError(f"{path}, row {i} has more cells than there are columns.")
        found.append({name: (cell or "").strip() for name, cell in zip(names, cells, strict=False)})
    return found

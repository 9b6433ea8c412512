"""`collectives.json` of a profile: read and checked.

An object with `curves`, and optionally `beside`, `transfers` and `about` (unread). Keys and units are the fields of
`sim.cost.collectives`: bytes, seconds, SMs, errors as fractions; `points` of a curve are [bytes, seconds] pairs, and
those of other rows how many measurements stand behind one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from sim.cost.collectives import (
    COLLECTIVES,
    COMPUTE,
    LAUNCHES,
    LAYOUTS,
    METHODS,
    OVERLAPS,
    SIDES,
    Beside,
    Collectives,
    HeldOut,
    Knots,
    Measured,
    SideFactors,
    Transfer,
)
from sim.errors import SimctlError
from sim.suggest import nearest

NEEDED_OF_CURVE = ("collective", "gpus", "launch", "points")
CURVE = (
    *NEEDED_OF_CURVE,
    "sms",
    "sms_by_bytes",
    "host_s",
    "sms_given",
    "in_step_s",
    "sd",
    "measured_points",
    "held_out",
)
NEEDED_BESIDE = (
    "collective",
    "gpus",
    "bytes",
    "compute",
    "overlap",
    "compute_sms",
    "collective_factor",
    "compute_factor",
)
BESIDE = (*NEEDED_BESIDE, "points", "spread")
NEEDED_OF_TRANSFER = ("method", "layout", "piece_bytes", "gpus", "points")
TRANSFER = (
    *NEEDED_OF_TRANSFER,
    "sms",
    "sd",
    "default",
    "measured_points",
    "held_out",
    "beside",
    "layered",
)
HELD_OUT = ("points", "median", "p95", "bias")
FACTORS = ("transfer_factor", "compute_factor")
LAYERED = ("layers", "factor", "points")


def load_collectives(path: Path, label: str, coverage: str = "") -> Collectives:
    """The collectives of a profile's file; SimctlError names the file, the row and the key."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimctlError(f"'{path}' is not a readable file of collectives: {error}.") from error
    return collectives_from_data(data, label, coverage, str(path))


def collectives_from_data(data: Any, label: str, coverage: str, where: str) -> Collectives:
    """As `load_collectives`, of the parsed content."""
    _keys(data, ("curves",), ("curves", "beside", "transfers", "about"), where)
    curves = tuple(_curve(row, at) for row, at in _rows(data, "curves", where))
    beside = tuple(_beside(row, at) for row, at in _rows(data, "beside", where))
    transfers = [
        (_transfer(row, at), bool(row.get("default"))) for row, at in _rows(data, "transfers", where)
    ]
    for kind, names in (
        ("curves", [one.name for one in curves]),
        ("transfers", [f"{one.name}-{one.gpus}" for one, _ in transfers]),
    ):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SimctlError(f"{where}: {kind} hold '{twice}' twice.")
    chosen = [one for one, default in transfers if default]
    if transfers and len(chosen) != 1:
        raise SimctlError(f"{where}: one of the transfers must be the default, not {len(chosen)} of them.")
    kept = tuple(one for one, _ in transfers)
    return Collectives(curves, beside, kept, chosen[0] if chosen else None, label, coverage)


def _rows(data: Mapping[str, Any], name: str, where: str) -> list[tuple[Any, str]]:
    rows = data.get(name) or []
    if not isinstance(rows, list):
        raise SimctlError(f"{where}: '{name}' must be a list.")
    return [(row, f"{where}, {name}[{i}]") for i, row in enumerate(rows)]


def _curve(row: Any, where: str) -> Measured:
    _keys(row, NEEDED_OF_CURVE, CURVE, where)
    return Measured(
        collective=_word(row, "collective", COLLECTIVES, where),
        gpus=_gpus(row, where),
        launch=_word(row, "launch", LAUNCHES, where),
        knots=_knots(row, where),
        sms=_number(row, "sms", where),
        sms_by_bytes=_pairs(row, "sms_by_bytes", where),
        host_s=_number(row, "host_s", where),
        sms_given=_pairs(row, "sms_given", where, 1),
        in_step_s=_number(row, "in_step_s", where),
        sd=_number(row, "sd", where),
        measured_points=int(_number(row, "measured_points", where)),
        held_out=_held_out(row, where),
    )


def _beside(row: Any, where: str) -> Beside:
    _keys(row, NEEDED_BESIDE, BESIDE, where)
    return Beside(
        collective=_word(row, "collective", COLLECTIVES, where),
        gpus=_gpus(row, where),
        size=_number(row, "bytes", where),
        compute=_word(row, "compute", COMPUTE, where),
        overlap=_word(row, "overlap", OVERLAPS, where),
        compute_sms=int(_number(row, "compute_sms", where)),
        collective_factor=_factor(row, "collective_factor", where),
        compute_factor=_factor(row, "compute_factor", where),
        points=int(_number(row, "points", where)),
        spread=_number(row, "spread", where),
    )


def _transfer(row: Any, where: str) -> Transfer:
    _keys(row, NEEDED_OF_TRANSFER, TRANSFER, where)
    beside, layered = row.get("beside") or {}, row.get("layered") or {}
    _keys(beside, (), SIDES, f"{where}, beside")
    _keys(layered, ("layers", "factor") if layered else (), LAYERED, f"{where}, layered")
    sides = {name: _side(one, f"{where}, beside.{name}") for name, one in beside.items()}
    return Transfer(
        method=_word(row, "method", METHODS, where),
        layout=_word(row, "layout", LAYOUTS, where),
        piece_bytes=int(_number(row, "piece_bytes", where)),
        gpus=_gpus(row, where),
        knots=_knots(row, where),
        sms=_number(row, "sms", where),
        sd=_number(row, "sd", where),
        measured_points=int(_number(row, "measured_points", where)),
        held_out=_held_out(row, where),
        prefill=sides.get("prefill"),
        decode=sides.get("decode"),
        layered=_factor(layered, "factor", f"{where}, layered") if layered else 1.0,
    )


def _side(row: Any, where: str) -> SideFactors:
    _keys(row, FACTORS, (*FACTORS, "points"), where)
    of_transfer, of_compute = (_factor(row, name, where) for name in FACTORS)
    return SideFactors(of_transfer, of_compute, int(_number(row, "points", where)))


def _held_out(row: Mapping[str, Any], where: str) -> HeldOut:
    found = row.get("held_out") or {}
    _keys(found, (), HELD_OUT, f"{where}, held_out")
    errors = {name: None if found.get(name) is None else float(found[name]) for name in HELD_OUT[1:]}
    return HeldOut(points=int(found.get("points") or 0), **errors)


def _knots(row: Mapping[str, Any], where: str) -> Knots:
    pairs = _pairs(row, "points", where)
    if len(pairs) < 2 or any(size < 0 or seconds <= 0 for size, seconds in pairs):
        raise SimctlError(f"{where}: 'points' must be at least two pairs of bytes and seconds above 0.")
    sizes, seconds = zip(*pairs, strict=True)
    return Knots(sizes, seconds)


def _pairs(
    row: Mapping[str, Any], name: str, where: str, least: float = 0.0
) -> tuple[tuple[float, float], ...]:
    """Pairs whose first numbers ascend, from `least` on."""
    given = row.get(name) or []
    right = isinstance(given, list) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(_is_number(value) for value in pair)
        for pair in given
    )
    if not right:
        raise SimctlError(f"{where}: '{name}' must be a list of pairs of numbers.")
    pairs = tuple((float(a), float(b)) for a, b in given)
    firsts = [a for a, _ in pairs]
    if any(a < least for a in firsts) or any(b <= a for a, b in pairwise(firsts)):
        raise SimctlError(f"{where}: '{name}' must have ascending first numbers from {least:g} on.")
    return pairs


def _keys(row: Any, needed: Sequence[str], known: Sequence[str], where: str) -> None:
    if not isinstance(row, dict):
        raise SimctlError(f"{where} must be an object with the keys {', '.join(known)}.")
    for key in row:
        if key not in known:
            raise SimctlError(f"{where}: unknown key '{key}'.{nearest(str(key), known)}")
    missing = next((key for key in needed if key not in row), None)
    if missing is not None:
        raise SimctlError(f"{where}: key '{missing}' is missing.")


def _word(row: Mapping[str, Any], name: str, known: Sequence[str], where: str) -> str:
    value = row[name]
    if value not in known:
        raise SimctlError(
            f"{where}: {name} '{value}' is none of {', '.join(known)}.{nearest(str(value), known)}"
        )
    return str(value)


def _gpus(row: Mapping[str, Any], where: str) -> int:
    value = row["gpus"]
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise SimctlError(f"{where}: gpus must be a whole number from 2 on, not {value!r}.")
    return value


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name, 0)
    if not _is_number(value) or value < 0:
        raise SimctlError(f"{where}: {name} must be a number of 0 or more, not {value!r}.")
    return float(value)


def _factor(row: Mapping[str, Any], name: str, where: str) -> float:
    if not _number(row, name, where) > 0:
        raise SimctlError(f"{where}: {name} must be a factor above 0, not {row.get(name)!r}.")
    return float(row[name])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)

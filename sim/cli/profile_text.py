"""What `simctl profile list` and `show` print of a profile's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.cli.tables import table
from sim.cost.collectives import COLLECTIVES, Measured, Transfer
from sim.cost.collectives_file import load_collectives
from sim.cost.profile_schema import FolderSchema, read_schema, read_yaml

FOLD = "rows"  # of the solo operators, where no other run has measured random shapes
PAIR_FOLD = "split"
FUSED_DEFAULT = "batch_pod"


def summary(folder: Path) -> dict[str, Any]:
    """One line of `profile list`."""
    schema, data = read_schema(folder), read_yaml(folder)
    about = data.get("about") or {}
    operators = _operators(about)
    return {
        "name": schema.name,
        "gpu": schema.gpu,
        "date": str(about.get("date", "")),
        "model": about.get("model", ""),
        "operators": len({entry.operator for entry in schema.curves}),
        "points": sum(_points(one) for one in operators.values()),
        "driver": (about.get("device") or {}).get("driver", ""),
        "folder": str(folder),
    }


def shown(folder: Path) -> dict[str, Any]:
    """`profile show --json`: `operators` and `contention`, each with label, points, median_error and p95_error."""
    schema, data = read_schema(folder), read_yaml(folder)
    about = data.get("about") or {}
    errors = about.get("errors") or {}
    labels = {entry.operator: entry for entry in schema.curves}
    facts = _operators(about)
    fresh = _other_run(errors, "operators")
    operators: dict[str, Any] = {}
    for name, entry in labels.items():
        found = facts.get(name) or facts.get(_same(folder, name), {})
        other_run = fresh.get(name) or fresh.get(_same(folder, name))
        held = other_run or (found.get("held_out") or {}).get(FOLD)
        operators[name] = {
            "label": entry.label,
            **_fields(held, _points(found)),
            "method": found.get("method", entry.form),
            "held_out": "another run" if other_run else FOLD,
            "coverage": entry.coverage,
        }
    operators |= _fused(data, errors, fresh)
    operators |= _collectives(folder, schema)
    label = (data.get("steps") or {}).get("label", "measured")
    steps = _other_run(errors, "steps")
    for kind, methods in (errors.get("steps") or {}).items():
        held = steps.get(kind) or methods.get("composed")
        operators[kind] = {
            "label": label,
            **_fields(held, (methods.get("composed") or {}).get("points", 0)),
            "method": "composed",
            "held_out": "another run" if kind in steps else "random",
        }
    return {
        "name": schema.name,
        "gpu": schema.gpu,
        "operators": operators,
        "contention": _contention(data, errors),
    }


def _fused(data: Mapping[str, Any], errors: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Attention of mixed batches by variant; the plain name is that of the kernel a request for `pod` gets."""
    entry, found = data.get("fused") or {}, {}
    for variant, held in (errors.get("fused_attention") or {}).items() if entry else ():
        name = f"fused_attention/{variant}"
        found[name] = {
            "label": entry["label"],
            **_fields(fresh.get(name) or held.get(FOLD), (held.get("random") or {}).get("points", 0)),
            "method": "schedule of the kernel's plan" if "grid" in held else "ratio to separate kernels",
            "held_out": "another run" if name in fresh else FOLD,
            "coverage": entry.get("coverage", ""),
        }
    plain = found.get(f"fused_attention/{FUSED_DEFAULT}")
    return {"fused_attention": plain, **found} if plain else found


def _collectives(folder: Path, schema: FolderSchema) -> dict[str, Any]:
    """Collectives by launch and number of GPUs, and transfers of KV; the plain name is that of captured calls of the
    most GPUs, or of the transfer that hand-overs are priced by."""
    entry, found = schema.collectives, {}
    if not entry:
        return {}
    source = load_collectives(folder / entry["file"], entry["label"], entry.get("coverage", ""))
    rows: list[Measured | Transfer] = [*source.curves, *source.transfers]
    for one in rows:
        found[one.name] = {
            "label": source.label,
            "points": one.measured_points,
            "median_error": one.held_out.median,
            "p95_error": one.held_out.p95,
            "held_out_points": one.held_out.points,
            "method": "line by bytes",
            "held_out": "sizes",
            "coverage": f"to {one.knots.sizes[-1] / 2**20:g} MiB",
        }
    for name in COLLECTIVES:
        kept = source.basis(name, max((one.gpus for one in source.curves), default=2), "graph")
        if kept is not None:
            found[name] = found[kept.name]
    if source.default is not None:
        found["kv_transfer"] = found[source.default.name]
    return found


def _contention(data: Mapping[str, Any], errors: Mapping[str, Any]) -> dict[str, Any]:
    """By mode and side, on splits left out (or another run's random co-runs), beside the baselines."""
    entry = data.get("contention") or {}
    fresh = _other_run(errors, "contention")
    found = {}
    folds = errors.get("contention") or {}
    for mode, sides in (folds.get(PAIR_FOLD) or {}).items():
        for side, methods in sides.items():
            kept = methods.get("surface") or methods.get("base") or {}
            held = (fresh.get(mode) or {}).get(side) or kept
            found[f"{mode}/{side}"] = {
                "label": entry.get("label", ""),
                **_fields(held, kept.get("points", 0)),
                "baselines": {
                    name: {"median_error": one.get("median"), "p95_error": one.get("p95")}
                    for name, one in methods.items()
                    if name in ("constant", "none")
                },
                "held_out": "another run" if (fresh.get(mode) or {}).get(side) else PAIR_FOLD,
            }
    return found


def _other_run(errors: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Errors on random shapes that runs of their own measured after the fits; of two such runs the last."""
    found: dict[str, Any] = {}
    for key, run in (errors.get("random_shapes") or {}).items():
        if key.startswith("run "):
            found |= run.get(part) or {}
    return found


def _fields(held: Mapping[str, Any] | None, points: int) -> dict[str, Any]:
    held = held or {}
    return {
        "points": points,
        "median_error": held.get("median"),
        "p95_error": held.get("p95"),
        "held_out_points": held.get("points", 0),
    }


def _operators(about: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (about.get("errors") or {}).get("operators") or {}
    return found


def _points(record: Mapping[str, Any]) -> int:
    """Every point is held out once by the random folds."""
    held = (record.get("held_out") or {}).get("random") or {}
    return int(held.get("points", 0))


def _same(folder: Path, name: str) -> str:
    """The variant that a family's plain name stands for."""
    path = folder / "curves.json"
    if not path.is_file():
        return name
    entry = json.loads(path.read_text(encoding="utf-8")).get("curves", {}).get(name) or {}
    return str(entry.get("same_as", name))


def described(folder: Path, facts: Mapping[str, Any]) -> str:
    """The text of `profile show`."""
    data = read_yaml(folder)
    about = data.get("about") or {}
    device = about.get("device") or {}
    lines = [
        f"{facts['name']}: {device.get('name', facts['gpu'])}, {about.get('date', '')}, {about.get('model', '')}"
    ]
    versions = {"driver": device.get("driver"), "CUDA": device.get("cuda"), **(device.get("libraries") or {})}
    lines.append("  " + ", ".join(f"{key} {value}" for key, value in versions.items() if value))
    head = ("OPERATOR", "LABEL", "METHOD", "POINTS", "MEDIAN", "P95", "HELD OUT")
    keys = ("label", "method", "points", "median_error", "p95_error", "held_out")
    rows = [[name, *(_cell(key, one[key]) for key in keys)] for name, one in facts["operators"].items()]
    lines += ["", table(head, rows)]
    if facts["contention"]:
        pairs = [
            [name, one["points"], _percent(one["median_error"]), _percent(one["p95_error"])]
            + [
                _percent((one["baselines"].get(key) or {}).get("median_error"))
                for key in ("constant", "none")
            ]
            for name, one in facts["contention"].items()
        ]
        lines += ["", table(("SIDE BY SIDE", "POINTS", "MEDIAN", "P95", "CONSTANT", "NONE"), pairs)]
    for key in ("host", "energy"):
        if data.get(key):
            lines.append(f"\n{key}: {data[key].get('label', '')}")
            lines += [f"  {name:20}{value:.4g}" for name, value in data[key].items() if name != "label"]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _cell(key: str, value: Any) -> Any:
    return _percent(value) if key.endswith("_error") else value

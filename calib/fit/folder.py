"""The files of a profile's folder, out of everything that was fitted.

`curves.json` and `contention.json` are what `sim.cost` reads, `errors.json` is every method on every fold, and
`profile.yaml` says where the numbers are from and how far off they were on points that the fit had not seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from calib.collectives.curves import coverage as group_coverage
from calib.fit.assemble import DEFAULTS
from calib.fit.build import Built
from calib.fit.points import Points
from calib.fit.shapes import clause
from calib.fit.solo import Solo
from sim.cost.activity import activity_data
from sim.cost.measured import KINDS, curve_data
from sim.cost.measured_steps import composition_data
from sim.cost.profile_schema import SCHEMA_VERSION

CURVES, CONTENTION, FUSED, ERRORS = "curves.json", "contention.json", "fused.json", "errors.json"
COLLECTIVES = "collectives.json"
ACTIVITY = "activity.json"
# what a reader of the error table has to know
NOTES = (
    "The first held-out run (770 random points on another GPU of the same kind) was scored at decode attention 7.8 %, "
    "p95 45 %, before the term of ragged batches was refined (12 longest contexts, no interpolation between split and "
    "unsplit batches); every other curve is as it was before that run.",
    "Solo kernels are timed for 20 ms at the top clock; the factor on steps with a chunk holds the clock under load "
    "(about 1500 MHz), on the whole GPU only.",
    "Half of the GEMM points on partitions are within 5 %, one in twenty is off by more than 23 %: the library picks "
    "its kernel by tokens and for the whole GPU, and its waves on a partition follow no grid that was measured.",
)
FORM_NAMES = {"waves": "wave form", "flat": "roofline", "persistent": "block form", "split": "block form"}


def coverage(points: Points) -> str:
    """The measured range as a sentence."""
    parts = [f"{name} {v.min():g}-{v.max():g}" for name, v in points.features.items()]
    if points.kind == "gemm":
        parts.append("(n, k) " + ", ".join(f"{key[0]}x{key[1]}" for key in points.groups()))
    elif points.kind == "experts":
        shapes = (f"{n}x{k} of {experts}, {chosen} a token" for n, k, experts, chosen, _ in points.groups())
        parts.append("experts of (n, k) " + ", ".join(shapes))
    elif points.kind != "elementwise":
        key = points.keys[0]
        parts.append(f"{key[0]} query and {key[1]} KV heads of {key[2]}")
    return ", ".join([*parts, f"{int(points.sms.min())}-{int(points.sms.max())} SMs"])


def covered(one: Solo) -> str:
    """The measured range of an operator, other models' shapes included."""
    others = one.record.get("other_models")
    return coverage(one.points) + (clause(others) if others else "")


def curve_entries(name: str, solo: Mapping[str, Solo]) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(entries of `profile.yaml`, curves of `curves.json`)."""
    entries, curves = [], {}
    for operator, one in solo.items():
        # what answers for sizes that were not measured, where there is such a curve
        other = one.fitted.curve.other
        kind = one.fitted.form.kind if other is None else KINDS[type(other.form)]
        form = FORM_NAMES.get(kind, "block form")
        curves[operator] = {
            **curve_data(one.fitted.curve, one.fitted.form.terms),
            "other_label": f"extrapolated from {name} by {form}",
        }
        entries.append(_entry(operator, covered(one)))
    for family, order in DEFAULTS.items():
        found = next((one for one in order if one in solo), None)
        if found is not None:
            curves[family] = {"same_as": found}
            entries.append(_entry(family, covered(solo[found])))
    return entries, curves


def _entry(operator: str, where: str) -> dict[str, str]:
    return {"operator": operator, "form": "measured", "file": CURVES, "label": "measured", "coverage": where}


def contents(built: Built, name: str, held: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a profile's folder by name. `held`: errors on random shapes, by origin."""
    entries, curves = curve_entries(name, built.solo)
    data: dict[str, Any] = {"curves": curves}
    if built.composition is not None:
        data["composition"] = composition_data(built.composition)
    files = {CURVES: _json(data), ERRORS: _json({**built.errors, "random_shapes": held})}
    profile: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "gpu": built.gpu.name,
        "curves": entries,
        "host": dict(built.host),
        "energy": dict(built.energy),
    }
    if built.composition is not None:
        label = built.composition.label
        profile["steps"] = {"file": CURVES, "label": label, "jitter_sd": built.jitter_sd}
    if built.contention is not None:
        files[CONTENTION] = _json(built.contention.as_data())
        surface = built.contention
        profile["contention"] = {"file": CONTENTION, "label": surface.label, "coverage": surface.coverage}
    if built.fused is not None:
        files[FUSED] = _json(built.fused.as_data())
        profile["fused"] = {"file": FUSED, "label": built.fused.label, "coverage": built.fused.coverage}
    if built.counted is not None:
        files[ACTIVITY] = _json(activity_data(built.counted))
        profile["activity"] = {"file": ACTIVITY, "label": built.counted.label}
    if built.collectives is not None:
        files[COLLECTIVES] = _json(built.collectives)
        where = group_coverage(built.collectives)
        profile["collectives"] = {"file": COLLECTIVES, "label": "measured", "coverage": where}
    profile["about"] = about(built, held, files)
    files["profile.yaml"] = yaml.safe_dump(profile, sort_keys=False, allow_unicode=True, width=110).encode()
    return files


def about(built: Built, held: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Where the numbers are from, and the short table of errors."""
    run = built.run
    return {
        "device": {key: run["gpu"][key] for key in ("name", "driver", "cuda", "libraries", "power_limit_w")},
        "date": str(run["date"]),
        "model": run["model"],
        "protocol": run["protocol"],
        "partitions": {"mechanism": run["bench"].get("mechanism"), "splits": len(run["partitions"])},
        "long_runs": built.hot,
        "activity": built.activity,
        "errors": short_table(built, held),
        "notes": list(NOTES),
        "frozen": hashlib.sha256(files[CURVES]).hexdigest(),
    }


def short_table(built: Built, held: Mapping[str, Any]) -> dict[str, Any]:
    """Held-out errors of what is shipped, with the medians of the baselines; `errors.json` has all of it."""
    operators = {}
    for operator, one in built.solo.items():
        record = one.record
        kept = record["errors"][record["method"]]
        others = {n: t for n, t in record["errors"].items() if n != record["method"]}
        operators[operator] = {
            "method": record["method"],
            "held_out": {kind: _plain(summary) for kind, summary in kept.items()},
            "baselines": {
                n: {kind: [s["median"], s["p95"]] for kind, s in t.items()} for n, t in others.items()
            },
        }
        for key in ("several_chunks", "ragged"):
            if key in record:
                operators[operator][key] = {n: _plain(summary) for n, summary in record[key].items()}
        if "other_models" in record:
            operators[operator]["other_models"] = _of_others(record["other_models"])
    steps = {
        kind: {n: _plain(s) for n, s in entry["errors"].items()}
        for kind, entry in built.errors["steps"].items()
    }
    return {
        "operators": operators,
        "steps": steps,
        "contention": _plain_tree(built.errors["contention"].get("folds", {})),
        "fused_attention": _plain_tree(built.errors["fused_attention"]),
        "power": _plain_tree(built.errors["power"]),
        "activity": _plain_tree(built.errors["activity"]),
        **(
            {"collectives": _plain_tree(built.errors["collectives"])} if "collectives" in built.errors else {}
        ),
        "random_shapes": _plain_tree(held),
    }


def _of_others(record: Mapping[str, Any]) -> dict[str, Any]:
    """Errors on other models' shapes, of all and (median, p95) of each, and which got a residual of their own."""
    parts = ("without", "random", "unseen")
    found: dict[str, Any] = {n: _plain(record[n]) for n in parts if n in record}
    found["each"] = {
        name: {n: [summary["median"], summary["p95"]] for n, summary in one.items()}
        for name, one in record["each"].items()
    }
    if "refitted" in record:
        found["refitted"] = list(record["refitted"])
    return found


def _plain(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without its regimes."""
    return {key: value for key, value in summary.items() if not isinstance(value, Mapping)}


def _plain_tree(node: Mapping[str, Any]) -> dict[str, Any]:
    if "median" in node or "points" in node:
        return _plain(node)
    return {str(key): _plain_tree(value) for key, value in node.items() if isinstance(value, Mapping)}


def _json(data: Any) -> bytes:
    """JSON with one line a curve, so that a change shows where it is."""
    if isinstance(data, dict):
        lines = []
        for key, value in data.items():
            if isinstance(value, dict) and value:
                inner = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
                lines.append(f"{json.dumps(key)}: {{\n  {inner}\n }}")
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
        return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()
    return (json.dumps(data) + "\n").encode()


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files beside and move each into place, `profile.yaml` last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda one: one == "profile.yaml"):
        part = folder / f".{name}.part"
        part.write_bytes(files[name])
        part.replace(folder / name)

"""A calibration run: sweeps share a time budget by weight, everything measured is kept, `run.yaml` says how."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calib import rows
from calib.bench import Bench
from calib.sweep import CARD, Run, Sweep, advance, open_run
from sim.errors import SimctlError

FORMAT = 1
UNLIMITED_S = 1e9
SLICE_S = 0.05  # budgets below this are not worth starting a sweep for


@dataclass(frozen=True)
class Order:
    """What to run and where to put it."""

    folder: Path
    sweeps: Sequence[Sweep]
    full: bool = False
    seed: int = 0
    resume: bool = False
    time_limit_s: float | None = None


def check_folder(order: Order) -> None:
    """Raise SimctlError where the result would overwrite another, or there is nothing to resume."""
    held = (order.folder / "run.yaml").exists()
    if held and not order.resume:
        raise SimctlError(
            f"{order.folder} holds a calibration already: go on with --resume, or choose another -o."
        )
    if not held and order.folder.exists() and any(order.folder.iterdir()) and not order.resume:
        raise SimctlError(f"{order.folder} is not empty and holds no calibration: choose another -o.")


def check_same_gpu(order: Order, lab: Bench) -> None:
    """Raise SimctlError if the folder's measurements are of another GPU or model."""
    path = order.folder / "run.yaml"
    if not path.exists():
        return
    held = yaml.safe_load(path.read_text()) or {}
    found = (held.get("gpu", {}).get("name"), held.get("model"))
    if found != (lab.facts.name, lab.model.name):
        raise SimctlError(
            f"{path} is of {found[1]} on {found[0]}, and this is {lab.model.name} on {lab.facts.name}: "
            "measurements of two are never mixed, choose another -o."
        )


def calibrate(
    lab: Bench, order: Order, tick: Callable[[Sequence[Run], Run, float], None] = lambda runs, run, left: None
) -> dict[str, Any]:
    """Run the sweeps of `order` on `lab`; returns what `run.yaml` says.

    `tick(runs, current, seconds left)` is called about every second. Raises SimctlError before anything is
    written, BrokenContext with everything so far written. Interrupting keeps what was measured.
    """
    check_folder(order)
    check_same_gpu(order, lab)
    (order.folder / "measurements").mkdir(parents=True, exist_ok=True)
    runs = [
        open_run(lab, sweep, order.folder, order.full, order.seed, order.resume) for sweep in order.sweeps
    ]
    record = describe(lab, order)
    write_record(order, record, runs)
    try:
        share_out(lab, runs, order, tick)
    finally:
        for run in runs:
            run.checkpoint.close()
            if run.checkpoint.rows:
                table = order.folder / "measurements" / f"{run.sweep.name}.csv.gz"
                rows.write_table(rows.latest(run.checkpoint.rows), table)
        record = write_record(order, record, runs)
    if record["complete"]:
        for run in runs:
            run.checkpoint.path.unlink(missing_ok=True)
        folder = order.folder / "checkpoint"
        if not any(folder.iterdir()):
            folder.rmdir()
    return record


def share_out(
    lab: Bench, runs: list[Run], order: Order, tick: Callable[[Sequence[Run], Run, float], None]
) -> None:
    """Give each unfinished sweep its weight's share of what is left; what it does not use goes to the others."""
    start, limit = lab.clock(), order.time_limit_s or UNLIMITED_S

    def left() -> float:
        return limit - (lab.clock() - start)

    while left() > SLICE_S and (waiting := [run for run in runs if not run.finished]):
        for i, run in enumerate(waiting):
            weights = sum(other.sweep.weight for other in waiting[i:])
            budget = left() * run.sweep.weight / weights
            if budget > SLICE_S:
                advance(lab, run, budget, order.seed, lambda current: tick(runs, current, left()))


def describe(lab: Bench, order: Order) -> dict[str, Any]:
    """What a reader has to know about the run. A group of GPUs adds its part to what one of them says."""
    record = {
        "format": FORMAT,
        "model": lab.model.name,
        "gpu": lab.facts.as_dict(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seed": order.seed,
        "size": "full" if order.full else "quick",
        "protocol": lab.protocol.as_dict(),
        "bench": lab.description(),
        "partitions": lab.proofs(),
    }
    group = getattr(lab, "group", None)
    if group is None:
        return record
    mine = {**group(), **{key: record[key] for key in ("date", "seed", "size", "protocol")}}
    mine = deepcopy(mine | {key: record["gpu"][key] for key in ("name", "driver", "libraries")})
    return {**record, **_earlier(order), "group": mine}


def _earlier(order: Order) -> dict[str, Any]:
    """What `run.yaml` says of the run on one GPU that the folder holds already, if any."""
    path = order.folder / "run.yaml"
    held = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    return {key: value for key, value in held.items() if key not in ("sweeps", "complete", "group")}


def write_record(order: Order, record: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Write `run.yaml` with the state of the sweeps; returns its content. Sweeps of an earlier run are kept."""
    path = order.folder / "run.yaml"
    before = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    held = before.get("sweeps", {})
    group = {"group": before["group"]} if "group" in before else {}
    card = record["gpu"].get("uuid", "")[:CARD]
    state: dict[str, Any] = {
        run.sweep.name: {
            "points": run.total,
            "measured": run.total - len(run.pending),
            "rows": len(kept := rows.latest(run.checkpoint.rows)),
            "skipped": sum("skip" in item for item in kept),
            "spent_s": round(run.spent_s, 1),
            **({"card": card} if card else {}),
        }
        for run in runs
    }
    content = {**group, **record, "sweeps": {**held, **state}, "complete": all(run.finished for run in runs)}
    part = path.with_name("run.yaml.part")
    part.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110))
    part.replace(path)
    return content

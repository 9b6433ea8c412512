"""A sweep: points in an order that covers the space coarsely first, rows on disk as they come, a time budget."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib import rows
from calib.bench import Bench
from calib.kernels import make
from calib.partition import LeakError
from sim.errors import CalibrationError

Point = dict[str, Any]
BROKE = "broke the CUDA context"
# of a lack of memory or of a module that was not built: they say nothing of the point, and a resumed sweep asks again
LACKS = ("OutOfMemoryError", "MissingJITCacheError", "RuntimeError: 'aligned_alloc'")
CARD = 8  # characters of a GPU's uuid that tell cards apart
BLOCK_S = 1.0  # rows are on disk at least this often, in measuring time


class BrokenContext(CalibrationError):
    """The CUDA context is unusable after a failed kernel; a new process can resume behind that point."""


class Sweep:
    """One family of points. `weight` is its share of a time budget.

    `points(lab, full)` lists points in any order; `axes` are the keys along which they are ordered coarse to
    fine. `measure(lab, point)` returns the rows of one point, without origin columns.
    """

    name: str
    weight: float = 1.0
    axes: Sequence[str] = ()

    def points(self, lab: Bench, full: bool) -> list[Point]:
        raise NotImplementedError

    def measure(self, lab: Bench, point: Point) -> list[dict[str, Any]]:
        raise NotImplementedError

    def order(self, lab: Bench, points: Sequence[Point], seed: int) -> list[Point]:
        """The order in which points are measured, such that any prefix is a fair sample of the space."""
        return coarse_first(points, self.axes, seed, lab.facts.sms)

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        """Columns that name the point when it could not be measured."""
        try:
            kernel = make(lab.model, point)
        except Exception:  # a point that cannot even be built: its kind is all there is
            return {"kind": str(point.get("kind", self.name)), "sms": point.get("sms")}
        label = kernel.label
        return {"kind": kernel.kind, "label": label, **kernel.columns(), "sms": point.get("sms")}


def bisection_levels(count: int) -> list[int]:
    """Refinement level of each of `count` ordered values: the ends 0, the middle 1, the quarters 2, ..."""
    levels = [0] * count
    spans, level = [(0, count - 1)], 0
    while spans:
        level, halves = level + 1, []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                levels[middle] = level
                halves += [(low, middle), (middle, high)]
        spans = halves
    return levels


def coarse_first(
    points: Sequence[Point], axes: Iterable[str], seed: int, top: int | None = None
) -> list[Point]:
    """Order points by the sum of their refinement levels along `axes`, at random within a level.

    An interrupted sweep then has a sparse grid over the whole space, and drifting clocks are no function of the
    shape. On the axis `sms` the value `top` (the whole GPU) comes first of all; on the axis `late` a value is
    its own level.
    """
    level_of: dict[str, dict[str, int]] = {}
    for axis in axes:
        values = sorted({_rank(p[axis]) for p in points if axis in p})
        if axis == "late":
            level_of[axis] = {str(v): int(v) for v in values}
        elif axis == "sms" and top in values:
            values.remove(top)
            level_of[axis] = {
                str(v): n + 1 for v, n in zip(values, bisection_levels(len(values)), strict=True)
            }
            level_of[axis][str(top)] = 0
        else:
            level_of[axis] = {str(v): n for v, n in zip(values, bisection_levels(len(values)), strict=True)}
    tie = np.random.default_rng(seed).permutation(len(points))
    totals = [sum(known.get(str(_rank(p[a])), 0) for a, known in level_of.items() if a in p) for p in points]
    return [points[i] for i in sorted(range(len(points)), key=lambda i: (totals[i], tie[i]))]


def _rank(value: Any) -> float:
    # lists (chunks, contexts) are ranked by their sum
    return float(sum(value)) if isinstance(value, list | tuple) else float(value)


def point_key(sweep: str, point: Mapping[str, Any]) -> str:
    """A short stable name of a point."""
    text = json.dumps([sweep, point], sort_keys=True, separators=(",", ":"))
    return hashlib.sha1(text.encode()).hexdigest()[:12]


@dataclass
class Run:
    """One sweep under way in one result folder."""

    sweep: Sweep
    pending: list[Point]
    total: int
    checkpoint: rows.Checkpoint
    spent_s: float = 0.0

    @property
    def finished(self) -> bool:
        return not self.pending


def open_run(lab: Bench, sweep: Sweep, folder: Path, full: bool, seed: int, resume: bool) -> Run:
    """List the sweep's points and drop those that have rows already and lacked nothing (`LACKS`)."""
    checkpoint = rows.Checkpoint(folder / "checkpoint" / f"{sweep.name}.jsonl", resume)
    table = folder / "measurements" / f"{sweep.name}.csv.gz"
    if resume and not checkpoint.rows and table.exists():
        records = rows.read_table(table).to_dict("records")
        checkpoint.append({k: v for k, v in r.items() if not rows.absent(v)} for r in records)
    points = sweep.order(lab, sweep.points(lab, full), seed)
    held = rows.latest(checkpoint.rows)
    lacking = {item["point"] for item in held if str(item.get("skip", "")).startswith(LACKS)}
    done = {item["point"] for item in held if "point" in item} - lacking
    pending = [p for p in points if point_key(sweep.name, p) not in done]
    return Run(sweep, pending, len(points), checkpoint)


def advance(
    lab: Bench, run: Run, budget_s: float, seed: int, tick: Callable[[Run], None] = lambda run: None
) -> None:
    """Measure pending points for `budget_s` of the lab's clock; what was measured is on disk at the end.

    Raises BrokenContext or LeakError, with everything so far on disk.
    """
    start = last = lab.clock()
    block: list[dict[str, Any]] = []
    try:
        while run.pending and lab.clock() - start < budget_s:
            point = run.pending.pop(0)
            block += _rows(lab, run.sweep, point, seed)
            if block and str(block[-1].get("skip", "")).startswith(BROKE):
                raise BrokenContext(f"{block[-1]['skip']}; --resume goes on behind that point.")
            if lab.clock() - last > BLOCK_S:
                run.checkpoint.append(block)
                block, last = [], lab.clock()
                tick(run)
    finally:
        run.checkpoint.append(block)
        run.spent_s += lab.clock() - start
        tick(run)


def _rows(lab: Bench, sweep: Sweep, point: Point, seed: int) -> list[dict[str, Any]]:
    origin = {
        "model": point.get("model", lab.model.name),
        "seed": seed,
        "unix_s": round(time.time(), 1),
        "card": lab.facts.uuid[:CARD],
        "point": point_key(sweep.name, point),
    }
    try:
        measured = sweep.measure(lab, point)
    except LeakError:
        raise
    except Exception as error:  # whatever a library raises: recorded, and the run goes on
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        measured = [{**sweep.shape(lab, point), "skip": reason}]
        if not lab.healthy():
            measured[0]["skip"] = f"{BROKE}: {reason}"[:300]
    return [rows.row(sweep.name, **{**origin, **values}) for values in measured]

"""`fidelity.json` and `fidelity.md` with its pictures, from one folder of cases or several, each a study."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calib.validate import sections
from calib.validate.compare import Group, groups_of, ranking, rows_of
from calib.validate.files import finished, read_case
from calib.validate.hosts import FILE as HOST_FILE
from calib.validate.pictures import pictures, slug
from calib.validate.sections import off, percent
from sim.config.load import load_experiment
from sim.config.schema import Experiment
from sim.cost import load_cost
from sim.cost.profiled import ProfiledCost

EXPERIMENT = "_experiment.yaml"
ABOUT, NOTES = "_study.yaml", "_notes.md"
# errors with the host's pace of each run itself; the rows of a commit that was frozen before the first run
OWN_HOST, FROZEN = "_own_host.json", "_frozen.json"
TITLE = "# Fidelity: the same scheduler code on a real GPU and in the simulator"


@dataclass(frozen=True)
class Study:
    """A folder of cases: its short name (empty for the only or first one), title, and what it is."""

    folder: Path
    name: str
    title: str
    about: str
    e: Experiment
    groups: tuple[Group, ...]
    rows: tuple[dict[str, Any], ...]


def write_pages(folders: Path | Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Write fidelity.json, fidelity.md and fidelity/*.svg under `out` from the cases in each of `folders`; returns the
    rows."""
    wanted = [folders] if isinstance(folders, Path) else list(folders)
    studies = [read_study(folder) for folder in wanted if finished(folder)]
    images = out / "fidelity-img"
    images.mkdir(parents=True, exist_ok=True)
    for study in studies:
        for group in study.groups:
            for name, text in pictures(group).items():
                (images / name).write_text(text, encoding="utf-8")
    rows = [row for study in studies for row in study.rows]
    orders = [{"study": s.name, **row} for s in studies for row in ranking(list(s.groups))]
    body = {"schema_version": 1, "rows": rows, "ranking": orders}
    (out / "fidelity.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (out / "fidelity.md").write_text(page(studies), encoding="utf-8")
    return rows


def read_study(folder: Path) -> Study:
    """Replay and simulate the cases of a folder. `_study.yaml` beside them holds `study`, `title` and `about`."""
    told = {"study": "", "title": "", "about": ""}
    if (folder / ABOUT).exists():
        told |= yaml.safe_load((folder / ABOUT).read_text(encoding="utf-8"))
    e, cost = opened(folder)
    groups = groups_of(e, folder, cost, told["study"])
    groups = sorted(groups, key=lambda g: (g.policy, g.mode != "open", g.load))
    title, about = told["title"], told["about"].strip()
    return Study(folder, told["study"], title, about, e, tuple(groups), tuple(rows_of(groups)))


def opened(folder: Path) -> tuple[Experiment, ProfiledCost]:
    """The experiment of a folder of cases, and its prices with the profile's own host terms."""
    e, _ = load_experiment(folder / EXPERIMENT)
    return e, load_cost(e.model, e.gpu, e.profile, kernels={"launch": e.kernels.launch})


def page(studies: Sequence[Study]) -> str:
    """The whole page."""
    lines = [
        TITLE,
        "",
        "*Replay*: the simulator prices the launches that the GPU ran, one by one. *Open*: each side schedules by its",
        "own clock. *Load step*: the rate is 1.5 times as high for a quarter of the span. The load is a fraction of",
        "the throughput that the simulator predicted past saturation before the runs. Errors are simulated / real - 1;",
        "the spread is that of the real repeats (largest - smallest over their mean). A launch's time has a part of",
        "the GPU and one of the host, whose pace differs from run to run: errors of the GPU's seconds are told beside.",
    ]
    if len(studies) > 1:
        lines += ["", "## All studies", "", *_overview(studies)]
    for study in studies:
        lines += ["", *_study(study, "##" if len(studies) == 1 else "###")]
    return "\n".join(lines) + "\n"


def _overview(studies: Sequence[Study]) -> list[str]:
    lines = [
        "| study | model | launches | replay, median | p95 | of the GPU's seconds, median | p95 | replay's aims met | "
        "requests' aims met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for study in studies:
        ranges = [
            *_ranges([off(g.step_simulated_s, g.step_real_s) for g in study.groups]),
            # a dry run has none
            *_ranges([off(g.gpu_simulated_s, g.gpu_real_s) for g in study.groups if len(g.gpu_real_s)]),
        ]
        kept = [
            sum(not missed for missed in column)
            for column in (
                [sections.missed_steps(g) for g in study.groups],
                [sections.missed_requests(g, study.rows) for g in study.groups],
            )
        ]
        launches = sum(len(g.step_real_s) for g in study.groups)
        cells = [
            study.title,
            study.e.model,
            f"{launches:,}",
            *ranges,
            *(f"{n} of {len(study.groups)}" for n in kept),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ranges(errors: Sequence[tuple[float, float]]) -> list[str]:
    """From the least to the largest of the medians, and of the p95."""
    columns = zip(*errors, strict=True) if errors else ()
    return [f"{percent(min(column))} to {percent(max(column))}" for column in columns] or ["-", "-"]


def _study(study: Study, level: str) -> list[str]:
    groups, rows = study.groups, study.rows
    lines = [f"{level[:-1]} {study.title}", ""] if level == "###" else []
    lines += [_facts(study), ""]
    if study.about:
        lines += [study.about, ""]
    lines += [_host_note(study.folder), *_frozen_note(study)]
    own = study.folder / OWN_HOST
    held = json.loads(own.read_text(encoding="utf-8")) if own.exists() else []
    more = [("With each run's own host pace", sections.own_host(held))] if held else []
    for title, part in (
        ("Steps (replay)", sections.steps(groups)),
        ("Requests (open and load step)", sections.requests(groups, rows)),
        ("Aims", sections.aims(groups, rows)),
        *more,
        ("Order of the policies", sections.order(groups)),
        ("Worst launches", sections.worst(groups)),
        ("Pictures", [_shown(group) for group in groups]),
    ):
        lines += ["", f"{level} {title}", "", *part]
    notes = study.folder / NOTES
    if notes.exists():
        text = notes.read_text(encoding="utf-8").strip()
        lines += ["", f"{level} What is missed, and why", "", text]
    return lines


def _shown(group: Group) -> str:
    return (
        f"![launches](fidelity-img/steps-{slug(group)}.svg) ![requests](fidelity-img/cdf-{slug(group)}.svg)"
    )


def _facts(study: Study) -> str:
    """What was measured on what, in a sentence."""
    facts, _, _ = read_case(study.folder, finished(study.folder)[0])
    gpu = facts["gpu"]
    driver = f" (driver {gpu['driver']}, CUDA {gpu['cuda']})" if gpu.get("driver") else ""
    requests = len(study.groups[0].real_requests) if study.groups else 0
    folder = "/".join(study.folder.parts[-2:]) if study.name else study.folder.name
    return (
        f"{study.e.model} on {gpu['name']}{driver}, {requests} requests a run, measured {facts['date']}; made by "
        f"`python -m calib.validate` from `{folder}/`, which holds every launch and every request."
    )


def _frozen_note(study: Study) -> list[str]:
    """How far today's errors are from those by the commit that was frozen before the runs."""
    path = study.folder / FROZEN
    if not path.exists():
        return []
    frozen = json.loads(path.read_text(encoding="utf-8"))
    keys = ("policy", "load", "mode", "metric", "of")
    today = {tuple(row.get(key) for key in keys): row["error"] for row in study.rows}
    moved = [
        abs(today[tuple(row.get(key) for key in keys)] - row["error"])
        for row in frozen["rows"]
        if row["metric"] in sections.COMPARED and tuple(row.get(key) for key in keys) in today
    ]
    return [
        "",
        f"By the commit that was frozen before the first run ({frozen['commit']}, rows in `{FROZEN}`) the errors of "
        f"launches, TTFT and TPOT are the same to {percent(max(moved, default=0.0))}; what has changed in between was "
        "found elsewhere.",
    ]


def _host_note(folder: Path) -> str:
    if (folder / HOST_FILE).exists():
        return (
            "Host terms (planning, launching, reading tokens back) are fitted from runs set apart "
            f"(`hosts/cases`; the terms are in `{folder.name}/{HOST_FILE}`); nothing is fitted to the runs below."
        )
    return "Host terms are the profile's own."

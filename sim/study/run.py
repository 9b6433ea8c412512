"""Run a study into a result folder: spread, stream to disk, resume, publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from sim.engine.building import hot_loops
from sim.engine.gate import unwrapped
from sim.jit import should_compile
from sim.study.execute import Outcome, execute
from sim.study.files import write_rows, write_summary, write_timing
from sim.study.folder import ResultFolder
from sim.study.plan import Study
from sim.study.pool import map_runs

Progress = Callable[[int, dict[str, Any]], None]


def run_study(
    study: Study,
    target: Path,
    *,
    jobs: int = 1,
    backend: str = "local",
    resume: bool = False,
    force: bool = False,
    steps: bool = False,
    timeline: bool = False,
    finish: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
    outcomes: Iterable[Outcome] | None = None,
    startup_s: float = 0.0,
) -> list[dict[str, Any]]:
    """Run what is not finished yet and publish `target`; returns the runs' summaries in order.

    `finish(folder)` may add files (the report) before the folder appears. `progress(index, summary)` is called
    for each run, finished ones of an earlier attempt included. A study that stops midway leaves
    `target.partial` with the finished runs, or nothing if there are none. `outcomes` are written instead of
    running anything, if the study has been run in memory.
    """
    folder = ResultFolder(target, study, steps=steps or timeline)
    folder.check_target(force=force)
    done = folder.open(resume=resume)
    if progress:
        for part in folder.finished():
            progress(part["summary"]["run"], part["summary"])
    try:
        if outcomes is None:
            todo = [task for task in _tasks(study, folder.steps) if task[1].index not in done]
            outcomes = map_runs(execute, todo, jobs=jobs, backend=backend)
        for outcome in outcomes:
            folder.add(outcome)
            if progress:
                progress(outcome.index, outcome.summary)
            del outcome  # a row a request: not to be kept beside the next
        return _write(folder, finish, steps, timeline, startup_s)
    except BaseException as error:
        _keep_or_discard(folder, error)
        raise


def run_in_memory(
    study: Study, *, jobs: int = 1, backend: str = "local", steps: bool = False
) -> list[Outcome]:
    """Run a study without touching the disk; outcomes in the order of the runs."""
    outcomes = map_runs(execute, _tasks(study, steps), jobs=jobs, backend=backend)
    return sorted(outcomes, key=lambda outcome: outcome.index)


def _tasks(study: Study, steps: bool) -> list[tuple[Any, ...]]:
    """Arguments of `execute` for each run; machine code where it pays for a policy's requests."""
    first = study.runs[0]
    requests = len(study.setting.workload(first.request_rate, first.seed))
    runs_of = Counter(run.label for run in study.runs)
    compiled = {}
    for run in {run.label: run for run in study.runs}.values():
        policy = study.setting.policy(run.policy) if isinstance(run.policy, str | Mapping) else run.policy
        compiled[run.label] = should_compile(requests * runs_of[run.label], hot_loops(unwrapped(policy)))
    return [(study.setting, run, steps, compiled[run.label]) for run in study.runs]


def _write(
    folder: ResultFolder, finish: Callable[[Path], None] | None, steps: bool, timeline: bool, startup_s: float
) -> list[dict[str, Any]]:
    began = perf_counter()
    parts = list(folder.finished())
    runs = [part["summary"] for part in parts]
    out, indices = folder.partial, [run["run"] for run in runs]
    write_summary(out, folder.study, runs)
    if folder.study.setting.experiment.measure.request_rows != 0:
        write_rows(out / "requests.parquet", [folder.part(i, "requests") for i in indices])
    # a run that rejects every request has no steps
    stepped = [i for i in indices if folder.has(i, "steps")]
    if steps:
        write_rows(out / "steps.parquet", [folder.part(i, "steps") for i in stepped])
    if timeline and stepped:
        from sim.report.timeline import write_timeline

        launches, requests = (
            pd.concat([folder.table(i, kind) for i in stepped], ignore_index=True)
            for kind in ("steps", "requests")
        )
        write_timeline(launches, requests, out / "timeline.json.gz")
    if finish:
        finish(out)
    write_timing(out, [part["timing"] for part in parts], startup_s, perf_counter() - began)
    folder.publish()
    return runs


def _keep_or_discard(folder: ResultFolder, error: BaseException) -> None:
    """Keep finished runs for --resume and say so; leave nothing behind when there are none."""
    kept = sum(1 for _ in folder.parts.glob("*.json"))
    if not kept:
        folder.discard()
    else:
        folder.release()
        error.add_note(f"{kept} finished runs are kept in {folder.partial}; --resume continues there")

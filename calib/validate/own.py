"""What is left when the host's pace is the run's own: `python -m calib.validate.own FOLDER...` writes `_own_host.json`.

Host terms are fitted to each run itself, so this predicts nothing; it tells how much of the errors is the model of the
GPU and of the schedulers, and how much a host whose pace differs from run to run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from calib.validate.compare import METRICS, deployment_of, simulated
from calib.validate.files import finished, read_case
from calib.validate.hosts import fit_hosts
from calib.validate.page import OWN_HOST, opened
from calib.validate.replay import Replay, shapes_of
from calib.validate.sections import AIMED, off
from sim.config.schema import Experiment
from sim.cost.profiled import ProfiledCost
from sim.policies import make_policy


def own_host(e: Experiment, cost: ProfiledCost, folder: Path, name: str) -> dict[str, Any]:
    """Errors of a case with host terms fitted to its own log: of its launches, and of TTFT and TPOT."""
    facts, steps, requests = read_case(folder, name)
    terms = fit_hosts(steps, cost.launching.terms, cost.model.layers, "fitted to the run itself")
    launching = replace(cost.launching, terms=replace(terms, gap_cools=0.0))
    cost = replace(cost, launching=launching)
    shapes = shapes_of(steps)
    attention = make_policy(facts["entry"]).attention(deployment_of(cost, facts))
    whole, _ = Replay(cost, shapes, attention).seconds(shapes)
    median, p95 = off(whole, (steps["end_s"] - steps["start_s"]).to_numpy(float))
    summary, _ = simulated(e, facts, requests, cost)
    row: dict[str, Any] = {key: facts[key] for key in ("policy", "load", "mode", "repeat")}
    row |= {"step_s": round(median, 4), "step_s_p95": round(p95, 4)}
    for metric in AIMED:
        key, _ = METRICS[metric]
        row[metric] = round(float(summary[key]) / float(facts["summary"][key]) - 1.0, 4)
    return row


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def main(folders: tuple[Path, ...]) -> None:
    """Write `_own_host.json` beside the cases of each folder."""
    for folder in folders:
        e, cost = opened(folder)
        rows = [own_host(e, cost, folder, name) for name in finished(folder)]
        (folder / OWN_HOST).write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
        click.echo(f"{len(rows)} cases in {folder / OWN_HOST}")


if __name__ == "__main__":
    main()

"""The folder of a validation: the experiment beside its cases, and host terms fitted from a case set apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from calib.validate.cases import capacity
from calib.validate.compare import deployment_of
from calib.validate.files import finished, read_case
from calib.validate.hosts import fit_hosts, write_hosts
from calib.validate.page import EXPERIMENT
from calib.validate.pauses import fit_gap_cools
from sim.cost.profiled import ProfiledCost
from sim.errors import SimctlError
from sim.policies import make_policy
from sim.study.plan import Setting, Study

CAPACITY = "_capacity.yaml"


def check_folder(folder: Path, resume: bool) -> None:
    """Raise SimctlError where cases of another validation would be mixed in."""
    if finished(folder) and not resume:
        raise SimctlError(f"{folder} holds cases already: go on with --resume, or choose another -o")


def keep_experiment(folder: Path, study: Study) -> None:
    """Write the experiment that the comparison reads: without versions and hashes, which the cases carry."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {key: value for key, value in study.resolved.items() if key != "resolved"}
    (folder / EXPERIMENT).write_text(yaml.safe_dump(plain, sort_keys=False, width=100), encoding="utf-8")


def fit_hosts_of(cases: Path, folder: Path, cost: ProfiledCost) -> None:
    """Fit host terms from all cases in `cases`, of another window than those of `folder`, and keep them there."""
    names = finished(cases)
    if not names:
        raise SimctlError(f"--hosts-from {cases}: holds no measured case")
    logs: dict[int, list[pd.DataFrame]] = {}
    alone: list[tuple[pd.DataFrame, Any]] = []
    for name in names:
        facts, steps, _ = read_case(cases, name)
        if "plan_s" not in steps.columns:
            raise SimctlError(f"--hosts-from {cases}: its cases are of a dry run, which has no host time")
        policy = make_policy(facts["entry"])
        logs.setdefault(policy.lanes, []).append(steps)
        if policy.lanes == 1:
            alone.append((steps, policy.attention(deployment_of(cost, facts))))
    fitted = {}
    for lanes, parts in sorted(logs.items()):
        rows = pd.concat(parts, ignore_index=True)
        source = f"fitted from {len(rows):,} launches on {lanes} lane(s) in {len(parts)} run(s) set apart"
        fitted[lanes] = fit_hosts(rows, cost.launching.terms, cost.model.layers, source)
    if 1 in fitted:
        fitted[1] = fit_gap_cools(cost, fitted[1], alone)
    write_hosts(folder, fitted)


def capacities(
    setting: Setting, entries: Sequence[tuple[Any, str]], cost: ProfiledCost, folder: Path
) -> dict[str, float]:
    """Requests/s that the simulator predicts for each policy past saturation, of which loads are fractions.

    Kept in the folder, so that cases added later, by another version of the prices too, are offered the same load.
    """
    path = folder / CAPACITY
    held: dict[str, float] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = [(entry, label) for entry, label in entries if label not in held]
    for entry, label in missing:
        held[label] = float(f"{capacity(setting, entry, setting.experiment.seed, cost):.6g}")
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(held, sort_keys=False), encoding="utf-8")
    return held

"""The folder of a validation: the experiment beside its cases, and host terms fitted from a case set apart."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

from calib.validate.files import finished, read_case
from calib.validate.hosts import fit_hosts, write_hosts
from calib.validate.page import EXPERIMENT
from sim.errors import SimctlError
from sim.study.plan import Setting, Study


def check_folder(folder: Path, resume: bool) -> None:
    """Raise SimctlError where cases of another validation would be mixed in."""
    if finished(folder) and not resume:
        raise SimctlError(f"{folder} holds cases already: go on with --resume, or choose another -o")


def keep_experiment(folder: Path, study: Study) -> None:
    """Write the experiment that the comparison reads: without versions and hashes, which the cases carry."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {key: value for key, value in study.resolved.items() if key != "resolved"}
    (folder / EXPERIMENT).write_text(yaml.safe_dump(plain, sort_keys=False, width=100), encoding="utf-8")


def fit_hosts_of(cases: Path, folder: Path, setting: Setting) -> None:
    """Fit host terms from all cases in `cases`, of another window than those of `folder`, and keep them there."""
    names = finished(cases)
    if not names:
        raise SimctlError(f"--hosts-from {cases}: holds no measured case")
    logs = pd.concat([read_case(cases, name)[1] for name in names])
    if "plan_s" not in logs.columns:
        raise SimctlError(f"--hosts-from {cases}: its cases are of a dry run, which has no host time")
    cost = setting.cost()
    source = f"fitted from {len(logs):,} launches of the executor under {len(names)} other runs"
    write_hosts(folder, fit_hosts(logs, cost.launching.terms, cost.model.layers, source))

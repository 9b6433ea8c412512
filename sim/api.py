"""The Python side of `simctl run`: experiments and policy objects in, data frames out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from sim.config import load_experiment, parse_experiment
from sim.study.execute import RunResult
from sim.study.plan import make_study
from sim.study.run import Options, run_in_memory


@dataclass(frozen=True)
class Result:
    """Runs of an experiment as pandas frames: one row a run, a request, a launch."""

    results: Sequence[RunResult]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run, with the keys of `summary.json`."""
        return pd.DataFrame([result.summary for result in self.results])

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request and run, times in seconds."""
        return pd.concat([result.requests for result in self.results], ignore_index=True)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a launch and run."""
        return pd.concat(
            [result.steps for result in self.results if result.steps is not None], ignore_index=True
        )


def run(
    experiment: str | Path | Mapping[str, Any],
    *,
    policy: Any = None,
    overrides: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> Result:
    """Run an experiment file or mapping.

    `policy` (one object or a list) is run beside the experiment's own policies: anything with `plan(view)`.
    `overrides` maps dotted keys to values, as `--set` does. Raises SimctlError for bad input.
    """
    pairs = [("overrides", f"{key}={value}") for key, value in (overrides or {}).items()]
    if isinstance(experiment, Mapping):
        loaded, source = parse_experiment(dict(experiment), pairs)
    else:
        loaded, source = load_experiment(experiment, pairs)
    policies = policy if isinstance(policy, list | tuple) else [] if policy is None else [policy]
    study = make_study(loaded, source.folder, policies)
    return Result(run_in_memory(study, Options(jobs=jobs, steps=True)))

"""The Python side of `simctl run`: experiments and policy objects in, data frames and figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sim.errors import SimctlError
from sim.study.execute import Outcome
from sim.study.files import runs_table, summary_of
from sim.study.plan import Study, prepare
from sim.study.run import run_in_memory, run_study
from sim.suggest import nearest

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# figure -> (title, axis, key of a run for a statistic, limit's key in the SLO block)
FIGURES = {
    **{
        name: (title, f"{title}, ms", "{stat}_" + name + "_ms", f"{name}_ms")
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2E latency"))
    },
    "slo": ("SLO attainment", "requests that meet every limit, %", "slo_attainment", "attainment"),
    "goodput": ("Goodput", "good requests/s", "request_goodput", ""),
    "throughput": ("Output tokens", "output tokens/s", "output_throughput", ""),
}
STATISTICS = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}


@dataclass(frozen=True)
class Result:
    """Results of a study: `summary` (as summary.json has it) and frames with a row a run, request or launch."""

    study: Study
    outcomes: Sequence[Outcome]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return summary_of(self.study, [outcome.summary for outcome in self.outcomes])

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run, with the columns of `runs.parquet`."""
        return runs_table(self.summary["runs"])

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request and run, with the columns of `requests.parquet`."""
        return pd.concat([outcome.requests for outcome in self.outcomes], ignore_index=True)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a launch and run."""
        return pd.concat([o.steps for o in self.outcomes if o.steps is not None], ignore_index=True)

    def figure(self, name: str = "slo", stat: str = "p99") -> Figure:
        """A Plotly figure against the offered rate: slo, ttft, tpot, itl, e2el, goodput or throughput.

        `stat`, for latencies: mean, p50, p90, p95 or p99.
        """
        from plotly.graph_objects import Figure

        from sim.report.panels import Metric, panel
        from sim.report.points import points_of

        for what, given, known in (("figure", name, FIGURES), ("statistic", stat, STATISTICS)):
            if given not in known:
                raise SimctlError(
                    f"unknown {what} '{given}'.{nearest(given, known)} Known: {', '.join(known)}"
                )
        title, axis, key, limit_key = FIGURES[name]
        limit = self.summary["experiment"]["slo"].get(limit_key)
        share = name == "slo"
        scale = 100.0 if share else 1.0
        metric = Metric(
            title,
            axis,
            {stat: key.format(stat=STATISTICS[stat])},
            scale=scale,
            log=limit_key.endswith("_ms"),
            limit=None if limit is None else limit * scale,
            limit_name="target" if share else "SLO",
            share=share,
        )
        return Figure(panel(metric, points_of(self.summary["runs"])))


def run(
    experiment: str | Path | Mapping[str, Any],
    *,
    policy: Any = None,
    overrides: Mapping[str, Any] | None = None,
    jobs: int = 1,
    out: str | Path | None = None,
) -> Result:
    """Run an experiment file or mapping; with `out` also write the result folder that `simctl run` writes.

    `policy` (one or a list: names, entries or objects with `plan(view)`) is run beside the experiment's own
    policies. `overrides` maps dotted keys to values, as `--set` does. Raises SimctlError for bad input.
    """
    study = prepare(experiment, settings=overrides, extra=_listed(policy))
    outcomes = run_in_memory(study, jobs=jobs, steps=True)
    if out is not None:
        run_study(study, Path(out), outcomes=outcomes, finish=_report)
    return Result(study, outcomes)


def _listed(policy: Any) -> list[Any]:
    return [] if policy is None else list(policy) if isinstance(policy, list | tuple) else [policy]


def _report(folder: Path) -> None:
    from sim.report.html import write_report

    write_report(folder)

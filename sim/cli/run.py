"""`simctl run`: an experiment file in, a result folder out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

SLO_WORD = re.compile(r"^[a-z0-9_]+:[^:]+$")


class GoodputCommand(click.Command):
    """Lets `--goodput ttft:200 tpot:50` take several words, as `vllm bench serve` does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before every further word that looks like an SLO."""
        spread: list[str] = []
        after_slo = False
        for word in args:
            if after_slo and SLO_WORD.match(word) and spread[-1] != "--goodput":
                spread.append("--goodput")
            after_slo = word == "--goodput" or (after_slo and bool(SLO_WORD.match(word)))
            spread.append(word)
        return super().parse_args(ctx, spread)


@click.command(cls=GoodputCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Result folder (default: out/NAME).")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. memory.block_size=32."
)
@click.option("--seed", type=int, help="Same as --set seed=N.")
@click.option("--num-runs", type=int, help="Replicates with other seeds.")
@click.option("--request-rate", metavar="R[,R...]", help="Requests per second to sweep.")
@click.option("--goodput", multiple=True, metavar="SLO:MS...", help="SLOs in ms, e.g. ttft:200 tpot:50.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Worker processes.")
@click.option("--backend", type=click.Choice(["local", "ray", "dask"]), default="local", show_default=True)
@click.option("--resume", is_flag=True, help="Keep the runs that a killed study has finished.")
@click.option("--dry-run", is_flag=True, help="Show the runs and the memory arithmetic; write nothing.")
@click.option("--steps", is_flag=True, help="Write steps.parquet: one row a launch.")
@click.option("--timeline", is_flag=True, help="Write timeline.json.gz for Perfetto (implies --steps).")
@click.option("--no-report", is_flag=True, help="Do not write report.html.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table.")
def run(
    experiment: Path,
    output: Path | None,
    sets: tuple[str, ...],
    seed: int | None,
    num_runs: int | None,
    request_rate: str | None,
    goodput: tuple[str, ...],
    jobs: int,
    backend: str,
    resume: bool,
    dry_run: bool,
    steps: bool,
    timeline: bool,
    no_report: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate EXPERIMENT under its policies and rates, and write a result folder.

    Example: simctl run experiments/quickstart.yaml -o out/quickstart
    """
    from sim.config import load_experiment
    from sim.study.plan import make_study
    from sim.study.run import Options, run_study

    overrides = [("--set", text) for text in sets]
    for option, key, value in (("--seed", "seed", seed), ("--num-runs", "num_runs", num_runs)):
        if value is not None:
            overrides.append((option, f"{key}={value}"))
    if request_rate is not None:
        overrides.append(("--request-rate", f"sweep.request_rate=[{request_rate}]"))
    overrides += [("--goodput", _slo(text)) for text in goodput]
    loaded, source = load_experiment(experiment, overrides)
    study = make_study(loaded, source.folder)
    if dry_run:
        click.echo(_describe(study, as_json))
        return
    target = output or Path("out") / loaded.name
    runs = run_study(study, target, Options(jobs, backend, resume, steps or timeline, quiet))
    _finish(target, runs, timeline, no_report, as_json, quiet)


def _finish(
    target: Path, runs: list[dict[str, Any]], timeline: bool, no_report: bool, as_json: bool, quiet: bool
) -> None:
    if timeline:
        import pandas as pd

        from sim.report.timeline import write_timeline

        steps, requests = (pd.read_parquet(target / f"{name}.parquet") for name in ("steps", "requests"))
        write_timeline(steps, requests, target / "timeline.json.gz")
    if not no_report:
        from sim.report.html import write_report

        write_report(target)
    if as_json:
        click.echo(json.dumps(runs, indent=1))
    elif not quiet:
        from sim.report.terminal import summary_table

        click.echo(summary_table(runs))
        click.echo(
            f"Results in {target}" + ("" if no_report else f"; open {target / 'report.html'}"), err=True
        )


def _slo(text: str) -> str:
    """`ttft:200` as an override of the SLO block."""
    from sim.errors import SimctlError
    from sim.suggest import nearest

    name, colon, value = text.partition(":")
    known = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2el_ms"}
    if not colon or name not in known:
        raise SimctlError(
            f"--goodput {text}: write NAME:MS with NAME of {', '.join(known)}.{nearest(name, known)}"
        )
    return f"slo.{known[name]}={value}"


def _describe(study: Any, as_json: bool) -> str:
    """The expanded runs and the memory of each policy's replica."""
    from sim.cli.tables import table
    from sim.engine.cluster import deploy

    first = study.check()
    rows = []
    for run in study.numbered():
        d = deploy(
            study.policy(run), study.cost, **study.memory_settings(), mechanism=study.experiment.mechanism
        )
        rows.append((run.index, run.label, run.request_rate or "-", run.seed, d.num_blocks, d.block_size))
    memory = study.cost.memory(**{k: v for k, v in study.memory_settings().items() if v is not None})
    if as_json:
        names = ("index", "policy", "request_rate", "seed", "kv_blocks", "kv_block_size")
        return json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1)
    gib = 2**30
    lines = [
        f"{len(first)} requests, {study.cost.model.name} on {study.cost.gpu.name}, profile {study.cost.profile.name}",
        *(f"  {note}" for note in first.notes),
        f"memory: budget {memory.budget_bytes / gib:.1f} GiB = weights {memory.weight_bytes / gib:.1f} + activations "
        f"{memory.activation_bytes / gib:.1f} + runtime {memory.runtime_bytes / gib:.1f} + KV {memory.kv_bytes / gib:.1f} "
        f"(for a step of the default size; each policy's blocks are below)",
        table(("RUN", "POLICY", "REQUESTS/S", "SEED", "KV BLOCKS", "BLOCK SIZE"), rows),
    ]
    return "\n".join(lines)

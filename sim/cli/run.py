"""`simctl run`: an experiment file in, a result folder out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from sim.units import GIB

if TYPE_CHECKING:
    from sim.study.plan import Study

SLO_WORD = re.compile(r"^[A-Za-z0-9_]+:[^:/\\]+$")
SLO_KEYS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2el_ms"}
PARTS = ("budget", "weight", "activation", "runtime", "graph", "kv")


class RunCommand(click.Command):
    """Lets `--goodput ttft:200 tpot:50` take several words, as `vllm bench serve` does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before every further word that looks like an SLO."""
        spread: list[str] = []
        after_slo = False
        for word in args:
            if after_slo and SLO_WORD.match(word) and spread[-1] != "--goodput":
                spread.append("--goodput")
            after_slo = word.partition("=")[0] == "--goodput" or (after_slo and bool(SLO_WORD.match(word)))
            spread.append(word)
        return super().parse_args(ctx, spread)


@click.command(cls=RunCommand)
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Result folder (default: out/NAME).")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. memory.block_size=32."
)
@click.option("--seed", metavar="N", help="Same as --set seed=N.")
@click.option("--num-runs", metavar="N", help="Replicates with seeds N, N+1, …; same as --set num_runs=N.")
@click.option("--request-rate", metavar="R[,R…]", help="Requests/s; same as --set sweep.request_rate=[R,…].")
@click.option("--goodput", multiple=True, metavar="SLO:MS…", help="SLOs in ms, e.g. ttft:200 tpot:50.")
@click.option(
    "--jobs", type=click.IntRange(min=0), default=1, show_default=True, help="Processes; 0: one a core."
)
@click.option(
    "--backend",
    type=click.Choice(["local", "ray", "dask"]),
    default="local",
    show_default=True,
    help="Where the jobs run; ray and dask are extras.",
)
@click.option("--resume", is_flag=True, help="Keep the runs that an interrupted study has finished.")
@click.option("--force", is_flag=True, help="Replace the results of another experiment in the folder.")
@click.option("--dry-run", is_flag=True, help="Show the runs and the memory arithmetic; write nothing.")
@click.option("--steps", is_flag=True, help="Also write steps.parquet: one row a launch.")
@click.option("--timeline", is_flag=True, help="Also write timeline.json.gz, for Perfetto.")
@click.option("--no-report", is_flag=True, help="Do not write report.html.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no messages, no table.")
def run(
    experiment: Path,
    output: Path | None,
    jobs: int,
    backend: str,
    resume: bool,
    force: bool,
    dry_run: bool,
    steps: bool,
    timeline: bool,
    no_report: bool,
    as_json: bool,
    quiet: bool,
    **shorthands: Any,
) -> None:
    """Simulate EXPERIMENT under its policies and rates, and write a result folder.

    Example: simctl run experiments/quickstart.yaml -o out/quickstart --goodput ttft:200 tpot:50
    """
    began = perf_counter()
    from sim.study.plan import prepare
    from sim.study.run import run_study

    study = prepare(experiment, overrides=_overrides(**shorthands))
    if dry_run:
        click.echo(_dry_run(study, as_json))
        return
    target = output.expanduser() if output else _default_folder(study.setting.experiment.name)
    with _progress(study, quiet) as progress:
        runs = run_study(
            study,
            target,
            jobs=jobs,
            backend=backend,
            resume=resume,
            force=force,
            steps=steps,
            timeline=timeline,
            finish=None if no_report else _report,
            progress=progress,
            startup_s=perf_counter() - began,
        )
    if as_json:
        click.echo(json.dumps(runs, indent=1))
    elif not quiet:
        from sim.report.terminal import summary_table

        click.echo(summary_table(runs))
    if not quiet:
        click.echo(
            f"Results in {target}" + ("" if no_report else f"; open {target / 'report.html'}"), err=True
        )


def _default_folder(name: str) -> Path:
    """`out/NAME`, whatever the name holds of folders of its own."""
    last = Path(name.replace("\0", "")).name
    return Path("out") / (last if last not in ("", "..") else "experiment")


def _overrides(
    sets: tuple[str, ...],
    seed: str | None,
    num_runs: str | None,
    request_rate: str | None,
    goodput: tuple[str, ...],
) -> list[tuple[str, str]]:
    """(option, key=value) pairs: `--set` first, so that a shorthand wins over it."""
    pairs = [("--set", text) for text in sets]
    for option, key, value in (("--seed", "seed", seed), ("--num-runs", "num_runs", num_runs)):
        if value is not None:
            pairs.append((option, f"{key}={value}"))
    if request_rate is not None:
        pairs.append(("--request-rate", f"sweep.request_rate=[{request_rate}]"))
    return pairs + [("--goodput", _slo(text)) for text in goodput]


def _slo(text: str) -> str:
    """`ttft:200` as an override of the SLO block."""
    from sim.errors import SimctlError
    from sim.suggest import nearest

    name, colon, value = text.partition(":")
    if not colon or name not in SLO_KEYS:
        known = ", ".join(SLO_KEYS)
        raise SimctlError(f"--goodput {text}: write NAME:MS with NAME of {known}.{nearest(name, SLO_KEYS)}")
    if not value.strip():
        raise SimctlError(f"--goodput {text}: the limit in ms is missing, as in {name}:200")
    return f"slo.{SLO_KEYS[name]}={value}"


@contextmanager
def _progress(study: Study, quiet: bool) -> Iterator[Callable[[int, dict[str, Any]], None] | None]:
    """A bar on stderr, one tick a run; nothing when stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=len(study.runs), unit="run", file=sys.stderr) as bar:

        def tick(_index: int, summary: dict[str, Any]) -> None:
            rate = summary["request_rate"]
            bar.set_postfix_str(
                summary["policy"] + ("" if rate is None else f" at {rate:g} req/s"), refresh=False
            )
            bar.update()

        yield tick


def _report(folder: Path) -> None:
    from sim.report.html import write_report

    write_report(folder)


def _dry_run(study: Study, as_json: bool) -> str:
    """The expanded runs and the arithmetic behind each policy's KV blocks."""
    from sim.cli.tables import table
    from sim.study.plan import memory_plans

    plans = memory_plans(study)
    if as_json:
        rows = [
            {"run": r.index, "policy": r.label, "request_rate": r.request_rate, "seed": r.seed}
            for r in study.runs
        ]
        memory = [
            {
                "policy": row["policy"],
                "max_tokens": row["max_tokens"],
                "max_seqs": row["max_seqs"],
                **vars(row["plan"]),
            }
            for row in plans
        ]
        return json.dumps({"runs": rows, "memory": memory}, indent=1)
    cost = study.setting.cost()
    first = study.setting.workload(study.runs[0].request_rate, study.runs[0].seed)
    runs = [
        (r.index, r.label, "own" if r.request_rate is None else f"{r.request_rate:g}", r.seed)
        for r in study.runs
    ]
    memory_rows = [
        (
            row["policy"],
            row["max_tokens"],
            row["max_seqs"],
            *(round(getattr(row["plan"], f"{part}_bytes") / GIB, 2) for part in PARTS),
            row["plan"].num_blocks,
            row["plan"].block_size,
            row["plan"].kv_tokens,
        )
        for row in plans
    ]
    header = ("POLICY", "STEP TOKENS", "SEQUENCES", *(f"{part.upper()} GIB" for part in PARTS))
    return "\n".join(
        [
            f"{len(first):,} requests of {first.name}; {cost.model.name} on {cost.gpu.name}, "
            f"profile {cost.profile.name}",
            *(f"  {note}" for note in first.notes),
            "",
            table(("RUN", "POLICY", "REQUESTS/S", "SEED"), runs),
            "",
            "Memory of a replica: budget - weights - activations - runtime - graphs = KV blocks",
            table((*header, "BLOCKS", "BLOCK TOKENS", "KV TOKENS"), memory_rows),
        ]
    )

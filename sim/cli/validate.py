"""`simctl validate`: the same workload on the real GPU and in the simulator, or against a server's own results."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from sim.errors import SimctlError


@click.command()
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("out/fidelity"), show_default=True
)
@click.option(
    "--load",
    "loads",
    default="0.8,1.05",
    show_default=True,
    metavar="F[,F…]",
    help="Offered loads as fractions of the capacity that the simulator predicts for each policy.",
)
@click.option(
    "--load-step",
    type=click.FloatRange(min=0, min_open=True),
    metavar="F",
    help="Also a load F that rises 1.5-fold for a quarter of the time.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Runs of each case."
)
@click.option("--policy", "only", multiple=True, metavar="NAME", help="Only this policy of the experiment.")
@click.option(
    "--case",
    "names",
    multiple=True,
    metavar="POLICY@LOAD[step][#N]",
    help="Only these cases, in this order, such as vllm@0.8, vllm@0.8step for a load step, vllm@0.8#1 for a repeat.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the experiment."
)
@click.option("--attention", type=click.Choice(["fa2", "fa3"]), default="fa3", show_default=True)
@click.option("--time-limit", type=click.FloatRange(min=0), metavar="SECONDS", help="Stop cleanly by then.")
@click.option("--resume", is_flag=True, help="Keep the finished cases of the output folder.")
@click.option(
    "--hosts-from",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Fit the host terms (planning, launching, reading back) from the cases of this folder, of another window.",
)
@click.option("--no-pages", is_flag=True, help="Measure only: compare later, where no GPU waits for it.")
@click.option("--dry-run", is_flag=True, help="No GPU: launches take what the price tables say.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compare with a result of vllm bench serve, sglang bench_serving or AIPerf instead of running anything.",
)
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def validate(experiment: Path, **options: Any) -> int:
    """Replay a workload through one scheduler on a real GPU and in the simulator.

    Needs a CUDA GPU and pip install 'lanesim[gpu-cu13]'; --dry-run and --against need none. Writes every launch and
    request, fidelity.json and fidelity.md. Give a workload window of a few hundred requests.

    Example: simctl validate experiments/validate_h200.yaml --load 0.8,1.05 -o out/fidelity
    """
    from sim.study.plan import prepare

    overrides = [("--set", pair) for pair in options["settings"]]
    study = prepare(experiment, overrides=overrides)
    if options["against"] is not None:
        return _against(study, options)
    return _measure(experiment, study, options)


def _dense_model(setting: Any) -> str:
    """The model's name, of one that the executor has kernels for."""
    spec = setting.cost().model
    if spec.experts or spec.quantization:
        raise SimctlError(f"simctl validate runs dense models of 16 bits, which {spec.name} is not.")
    return str(setting.experiment.model_entry().name)


def _measure(experiment: Path, study: Any, options: dict[str, Any]) -> int:
    from calib.validate.bench import DryBench, GpuBench
    from calib.validate.cases import expand, listed
    from calib.validate.files import finished
    from calib.validate.hosts import with_hosts
    from calib.validate.measure import broken_cases, measure
    from calib.validate.page import write_pages
    from calib.validate.study import capacities, check_folder, fit_hosts_of, keep_experiment

    output, setting = options["output"], study.setting
    folder = output / "cases"
    check_folder(folder, options["resume"])
    entries = _entries(study, options["only"])
    loads = _numbers(options["loads"])
    say = partial(_say, options["quiet"])
    bench = (
        DryBench(setting.cost())
        if options["dry_run"]
        else GpuBench(_dense_model(setting), setting.experiment.seed, options["attention"])
    )
    keep_experiment(folder, study)
    if options["hosts_from"] is not None:
        fit_hosts_of(options["hosts_from"] / "cases", folder, setting.cost())
    cost = with_hosts(setting.cost(), folder)
    say("predicting the policies' capacities")
    tops = capacities(setting, entries, cost, folder)
    if options["names"]:
        cases = listed(setting, entries, options["names"], tops)
    else:
        cases = expand(setting, entries, loads, options["load_step"], options["repeats"], tops)
    left = measure(setting, cost, cases, folder, bench, options["time_limit"] or 1e9, say)
    broken = broken_cases(folder)
    if not finished(folder):
        name, reason = next(iter(broken.items()), ("", ""))
        raise SimctlError(
            f"no case was measured; {name}: {reason}"
            if broken
            else f"the time limit left no room for a single case; {left} are to do"
        )
    if left:
        click.echo(f"{left} cases are left: go on with --resume", err=True)
    if options["no_pages"]:
        click.echo(f"{len(finished(folder))} cases in {folder}")
        return 1 if broken else 0
    rows = write_pages(folder, output)
    if options["as_json"]:
        click.echo(json.dumps(rows, indent=1))
    else:
        click.echo(f"{len(rows)} comparisons in {output / 'fidelity.md'}")
    return 1 if broken else 0


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        click.echo(text, err=True)


def _entries(study: Any, only: tuple[str, ...]) -> list[tuple[Any, str]]:
    entries = {run.label: run.policy for run in study.runs}
    for name in only:
        if name not in entries:
            raise SimctlError(f"--policy {name}: the experiment has {', '.join(entries)}")
    return [(entry, label) for label, entry in entries.items() if not only or label in only]


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise SimctlError(f"--load {text}: give fractions of the capacity such as 0.8,1.05") from None
    if any(not 0 < load < 100 for load in found):
        raise SimctlError(f"--load {text}: a load is a positive fraction of the capacity")
    return found


def _against(study: Any, options: dict[str, Any]) -> int:
    from calib.validate.servers import against, read_server
    from sim.study.run import run_in_memory

    tool, theirs = read_server(options["against"])
    if len(study.runs) != 1:
        raise SimctlError(
            f"--against compares one run with one result: this experiment has {len(study.runs)} "
            "(policies x rates x replicates); pick one, e.g. with --set"
        )
    (outcome,) = run_in_memory(study)
    rows = against(theirs, outcome.summary)
    if options["as_json"]:
        click.echo(json.dumps(rows, indent=1))
        return 0
    click.echo(f"{study.runs[0].label} against {tool}'s {options['against']}")
    width = max(len(row["metric"]) for row in rows)
    click.echo(f"{'METRIC'.ljust(width)}  {'REAL':>12}  {'SIMULATED':>12}  {'ERROR':>8}")
    for row in rows:
        figures = f"{row['real']:12,.2f}  {row['simulated']:12,.2f}  {100 * row['error']:+7.1f}%"
        click.echo(f"{row['metric'].ljust(width)}  {figures}")
    return 0

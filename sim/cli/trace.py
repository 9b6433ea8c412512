"""`simctl trace`: look at request traces, convert them to our columns, generate new ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.errors import SimctlError

if TYPE_CHECKING:
    from sim.workload.trace import Trace
    from sim.workload.workload import Workload

Command = Callable[..., Any]


@click.group()
def trace() -> None:
    """Show, convert or generate request traces.

    Example: simctl trace show sample-conv
    """


def reading(command: Command) -> Command:
    """The overrides for what the reader would otherwise recognise."""
    options = [
        click.option("--format", "format_", metavar="NAME", help="Format, if not recognised by the columns."),
        click.option("--time-unit", metavar="UNIT", help="Unit of the arrivals: s, ms, us, ns or iso."),
        click.option(
            "--column", "renames", multiple=True, metavar="OURS=THEIRS", help="Name of a column; repeatable."
        ),
        click.option(
            "--on-zero", default="drop", show_default=True, help="Rows with zero tokens: drop or clamp."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@trace.command()
@click.argument("file", required=False)
@reading
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write plots to an HTML page (offline)."
)
def show(
    file: str | None,
    format_: str | None,
    time_unit: str | None,
    renames: tuple[str, ...],
    on_zero: str,
    as_json: bool,
    output: Path | None,
) -> None:
    """Print the statistics of a trace and what the reader took it for; without FILE, list the bundled ones.

    Example: simctl trace show traces/mine.csv -o mine.html
    """
    if file is None:
        _list(as_json)
        return
    from sim.workload.stats import describe

    loaded = _load(file, format_, time_unit, renames, on_zero)
    facts = describe(loaded)
    click.echo(json.dumps(facts, indent=2) if as_json else _text(facts))
    if output is not None:
        from sim.cli.trace_page import trace_page

        _write(output, trace_page(loaded, facts).encode())


@trace.command()
@click.argument("file")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help=".csv, .parquet or .jsonl"
)
@reading
@click.option("--arrivals", help="Arrival process, for a file without arrivals or to draw new ones.")
@click.option("--request-rate", type=float, help="Rescale to this mean rate, requests/s.")
@click.option("--rescale", help="How: stretch (default) or redraw.")
@click.option("--burstiness", type=float, help="Shape of Gamma gaps (1 is Poisson).")
@click.option("--max-requests", type=int, help="Keep the first N requests.")
@click.option(
    "--window", nargs=2, type=float, metavar="A B", help="Keep arrivals from A until before B seconds."
)
@click.option("--subsample", type=float, help="Keep a random share (below 1) or number of requests.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def convert(
    file: str,
    output: Path,
    format_: str | None,
    time_unit: str | None,
    renames: tuple[str, ...],
    on_zero: str,
    arrivals: str | None,
    request_rate: float | None,
    rescale: str | None,
    burstiness: float | None,
    max_requests: int | None,
    window: tuple[float, float] | None,
    subsample: float | None,
    seed: int,
) -> None:
    """Write a trace in our columns; the ending of the output picks CSV, Parquet or JSON lines.

    Example: simctl trace convert AzureLLMInferenceTrace_conv.csv -o conv.parquet
    """
    spec = {
        "trace": file,
        "format": format_,
        "time_unit": time_unit,
        "columns": dict(_renames(renames)) or None,
        "on_zero": on_zero,
        "arrivals": arrivals,
        "rescale": rescale,
        "burstiness": burstiness,
        "max_requests": max_requests,
        "window_s": list(window) if window else None,
        "subsample": subsample,
    }
    _build_and_write(spec, output, seed, request_rate)


@trace.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help=".csv, .parquet or .jsonl"
)
@click.option("--num-prompts", type=int, default=1000, show_default=True)
@click.option("--request-rate", type=float, required=True, help="Mean rate, requests/s.")
@click.option("--arrivals", help="poisson, gamma, deterministic or bursts; default by --burstiness.")
@click.option("--burstiness", type=float, help="Shape of Gamma gaps: 1 is Poisson, below 1 burstier.")
@click.option("--on-s", type=float, help="Bursts: seconds with arrivals.")
@click.option("--off-s", type=float, help="Bursts: seconds without.")
@click.option("--minute-profile", metavar="NAME", help="Bursts: a table whose requests per minute to follow.")
@click.option("--prompt-tokens", metavar="LENGTHS", help="A number or YAML such as '{uniform: [100, 2000]}'.")
@click.option("--output-tokens", metavar="LENGTHS", help="The same for outputs.")
@click.option("--quantiles", metavar="NAME", help="Both lengths from a bundled table.")
@click.option("--spearman", type=float, help="Rank correlation of prompt and output.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def synth(
    output: Path,
    num_prompts: int,
    request_rate: float,
    arrivals: str | None,
    burstiness: float | None,
    on_s: float | None,
    off_s: float | None,
    minute_profile: str | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    quantiles: str | None,
    spearman: float | None,
    seed: int,
) -> None:
    """Generate a trace from an arrival process and length distributions.

    Example: simctl trace synth --request-rate 5.5 --num-prompts 500 --quantiles azure-conv-2023 -o conv.csv
    """
    if arrivals is None:
        bursts = minute_profile is not None or on_s is not None or off_s is not None
        arrivals = "bursts" if bursts else "poisson" if burstiness in (None, 1.0) else "gamma"
    spec = {
        "arrivals": arrivals,
        "burstiness": burstiness,
        "on_s": on_s,
        "off_s": off_s,
        "minute_profile": minute_profile,
        "num_prompts": num_prompts,
        "prompt_tokens": _lengths("--prompt-tokens", prompt_tokens, quantiles),
        "output_tokens": _lengths("--output-tokens", output_tokens, quantiles),
        "spearman": spearman,
    }
    _build_and_write(spec, output, seed, request_rate)


def _list(as_json: bool) -> None:
    from sim.workload.bundled import list_bundled

    entries = list_bundled()
    if as_json:
        fields = ("name", "kind", "title", "source")
        click.echo(
            json.dumps([{field: getattr(entry, field) for field in fields} for entry in entries], indent=2)
        )
        return
    for entry in entries:
        click.echo(f"{entry.name:24}{entry.kind:11}{entry.title}\n{'':35}{entry.source}")


def _load(
    file: str, format_: str | None, time_unit: str | None, renames: tuple[str, ...], on_zero: str
) -> Trace:
    from sim.workload.bundled import find_trace
    from sim.workload.trace import load_trace

    _, path = find_trace(file, [Path()])
    return load_trace(path, format=format_, time_unit=time_unit, on_zero=on_zero, rename=_renames(renames))


def _renames(pairs: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    out = []
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not equals:
            raise SimctlError(f"--column '{pair}' is not OURS=THEIRS, such as prompt_tokens=input_length")
        out.append((ours, theirs))
    return tuple(out)


def _lengths(option: str, text: str | None, quantiles: str | None) -> Any:
    """A length option as the workload block has it."""
    if text is None:
        if quantiles is None:
            raise SimctlError(f"{option} is missing; give it, or --quantiles NAME for both lengths")
        return {"quantiles": quantiles}
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SimctlError(
            f"{option} '{text}' is neither a number nor YAML such as '{{uniform: [1, 9]}}'"
        ) from None


def _build_and_write(spec: dict[str, Any], output: Path, seed: int, request_rate: float | None) -> None:
    from sim.workload.build import build_workload
    from sim.workload.export import encode

    workload: Workload = build_workload(
        spec, seed=seed, request_rate=request_rate, context_limit=None, base_dirs=[Path()]
    )
    _write(output, encode(workload, output))
    for note in workload.notes:
        click.echo(f"  {note}", err=True)
    rate = f", {workload.request_rate:.4g} requests/s" if isfinite(workload.request_rate) else ""
    click.echo(f"{output}: {len(workload):,} requests{rate}", err=True)


def _write(path: Path, content: bytes) -> None:
    """Write beside and move into place, so that a failure leaves no half-written file."""
    if path.is_dir() or not path.name:
        raise SimctlError(f"cannot write {path}: it is a folder; give a file name")
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SimctlError(f"cannot write {path}: {error.strerror or error}") from None


def _text(facts: dict[str, Any]) -> str:
    arrivals = facts["arrivals"]
    lines = [f"{facts['name']}: {facts['requests']:,} requests, {facts['total_tokens']:,} tokens"]
    lines += [f"  {note}" for note in facts["notes"]]
    if arrivals is not None:
        lines.append("arrivals")
        lines += [f"  {name:16}{_number(value)}" for name, value in arrivals.items()]
    names = list(facts["prompt_tokens"])
    lines.append(f"{'tokens':10}" + "".join(f"{name:>9}" for name in names))
    for column in ("prompt", "output"):
        values = facts[f"{column}_tokens"]
        lines.append(f"  {column:8}" + "".join(f"{values[name]:>9,.0f}" for name in names))
    lines.append(f"spearman (prompt, output)  {_number(facts['spearman'])}")
    over = "  ".join(f"{limit}: {100 * share:.2f} %" for limit, share in facts["over_context_limit"].items())
    lines.append(f"over a context limit of  {over}")
    lines.append(f"sha256  {facts['sha256']}")
    return "\n".join(lines)


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"

"""`simctl profile`: what measured profiles there are, what they say, whether it holds, and their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sim.errors import SimctlError

SETTINGS = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=SETTINGS)
def profile() -> None:
    """List, show, check, compare and query cost profiles.

    Example: simctl profile show h200-sxm
    """


@profile.command(name="list", context_settings=SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the profiles that come with the package.

    A GPU without one gets `spec`: a roofline from its data sheet.

    Example: simctl profile list --json
    """
    from sim.cli.profile_text import summary
    from sim.cli.tables import table
    from sim.cost.profile import builtin_folders

    rows = [summary(folder) for folder in builtin_folders().values()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    header = ("PROFILE", "GPU", "DATE", "MODEL", "OPERATORS", "POINTS", "DRIVER")
    keys = ("name", "gpu", "date", "model", "operators", "points", "driver")
    click.echo(table(header, [[row[key] for key in keys] for row in rows]))


@profile.command(context_settings=SETTINGS)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Draw curves with points on an HTML page."
)
def show(name: str, as_json: bool, output: Path | None) -> None:
    """Show a profile: labels, points and errors on what the fits had not seen.

    Errors are those of a run of its own where there was one, else of whole rows left out. Side by side, those of a
    constant slowdown and of none stand beside the curves'.

    Example: simctl profile show h200-sxm -o h200.html
    """
    from sim.cli.profile_text import described, shown
    from sim.cost.profile import find_folder

    folder = find_folder(name)
    facts = shown(folder)
    click.echo(json.dumps(facts, indent=2) if as_json else described(folder, facts))
    if output is not None:
        from sim.cli.profile_page import profile_page

        _write(output, profile_page(folder).encode())
        click.echo(f"{output}", err=True)


@profile.command(context_settings=SETTINGS)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(name: str, as_json: bool) -> int:
    """Recompute a profile's errors from its measurements; exit 1 where they are not as stated.

    Folds are fitted anew without what they leave out. Takes a minute or two.

    Example: simctl profile check h200-sxm
    """
    from calib.fit.check import check as recompute
    from sim.cost.profile import find_folder

    found = recompute(find_folder(name), lambda text: click.echo(f"  {text}", err=True))
    wrong = [one for one in found if not one.ok]
    if as_json:
        rows = [{"where": one.where, "stated": one.stated, "found": one.found} for one in wrong]
        click.echo(json.dumps({"compared": len(found), "different": rows}, indent=2))
    else:
        for one in wrong:
            click.echo(f"{one.where}: stated {one.stated}, found {one.found}")
        click.echo(f"{len(found)} numbers recomputed, {len(wrong)} different.")
    return 1 if wrong else 0


@profile.command(context_settings=SETTINGS)
@click.argument("first")
@click.argument("second")
@click.option("--model", help="Model whose shapes are compared (default: the first profile's).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(first: str, second: str, model: str | None, as_json: bool) -> None:
    """Compare two profiles of one GPU operator by operator: time by SECOND over time by FIRST.

    `spec` is the analytic profile of the other's GPU.

    Example: simctl profile diff h200-sxm spec
    """
    from sim.cli.profile_diff import compared
    from sim.cli.tables import table

    rows = compared(first, second, model)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    header = ("OPERATOR", "SHAPES", "MEDIAN", "LOWEST", "HIGHEST", "FIRST", "SECOND")
    keys = ("operator", "shapes", "median", "lowest", "highest", "first", "second")
    click.echo(table(header, [[row[key] for key in keys] for row in rows]))


@profile.command(context_settings=SETTINGS)
@click.argument("name")
@click.option(
    "--points", type=click.Path(path_type=Path), required=True, metavar="FILE.csv", help="Rows to answer."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strict", is_flag=True, help="Exit 2 if any row cannot be answered or is off coverage.")
def predict(name: str, points: Path, as_json: bool, strict: bool) -> int:
    """Answer rows of operators and steps: seconds on the GPU, with host time, standard error, label, flags.

    Columns: kind (gemm, moe, prefill_attention, decode_attention, fused_attention, step, allreduce and other
    collectives, kv_transfer), model, tp (GPUs that share the model), m, n, k, prefill_tokens, history_tokens,
    decode_contexts (512;2048;...), bytes and gpus of a collective, sms, attention (fa2, fa3, pod), launch (graph,
    eager), and neighbour_* for what runs beside. Empty cells are absent.

    Example: simctl profile predict h200-sxm --points rows.csv --json
    """
    from sim.cli.profile_rows import answers
    from sim.cli.tables import table

    found = answers(name, points)
    if as_json:
        click.echo(json.dumps([one.as_data() for one in found], indent=2))
    else:
        header = ("GPU_S", "STEP_S", "SD_S", "LABEL", "FLAGS")
        rows = [
            [*(_seconds(v) for v in (a.gpu_s, a.step_s, a.sd_s)), a.label or "-", "; ".join(a.flags)]
            for a in found
        ]
        click.echo(table(header, rows))
    lacking = [i for i, one in enumerate(found, 1) if one.gpu_s is None]
    if strict and (lacking or any(one.flags for one in found)):
        at = next(i for i, one in enumerate(found, 1) if one.gpu_s is None or one.flags)
        reason = "; ".join(found[at - 1].flags)
        raise SimctlError(f"{points}, row {at}: outside what profile '{name}' covers: {reason}.")
    return 0


def _seconds(value: float | None) -> Any:
    return "-" if value is None else f"{value:.6g}"


def _write(path: Path, content: bytes) -> None:
    """Write beside and move into place, so that a failure leaves no half-written file."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SimctlError(f"cannot write {path}: {error.strerror or error}") from None

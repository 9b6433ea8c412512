"""`simctl calibrate`: measure kernels, partitions and co-runs on a GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from sim.errors import SimctlError

QUICK_LIMIT_S = 285.0
RESTARTS = "LANESIM_CALIBRATE_RESTARTS"  # restarts left after a broken CUDA context; set by ourselves only
MOST_RESTARTS = 3


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("out/calibration"), show_default=True
)
@click.option(
    "--quick", "size", flag_value="quick", default=True, help="Coarse grids, under 5 minutes (default)."
)
@click.option("--full", "size", flag_value="full", help="Dense grids and longer windows.")
@click.option(
    "--smoke", "size", flag_value="smoke", help="Touch every kernel and mechanism once; writes nothing."
)
@click.option(
    "--operator", "operators", multiple=True, metavar="NAME", help="Only this sweep; may be repeated."
)
@click.option("--model", default="llama-3.1-8b", show_default=True, help="Whose shapes to time.")
@click.option("--resume", is_flag=True, help="Go on with the calibration in the output folder.")
@click.option("--time-limit", type=click.FloatRange(min=0), metavar="SECONDS", help="Stop cleanly by then.")
@click.option(
    "--random", type=click.IntRange(min=0), default=None, metavar="N", help="Held-out shapes of each kind."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--libsmctrl", type=click.Path(), default="", help="Partition by this libsmctrl.so, not green contexts."
)
@click.option(
    "--fit/--no-fit",
    default=True,
    show_default=True,
    help="Fit curves and write profile.yaml (minutes of CPU: on a leased GPU fit later, python -m calib.fit DIR).",
)
@click.option("--fake", is_flag=True, help="A simulated GPU: shows what would run.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def calibrate(size: str, **options: Any) -> int:
    """Measure kernels on a GPU and write their times to a folder.

    Needs a CUDA GPU of compute capability 8.0 or newer that nothing else is using, and
    pip install 'lanesim[gpu-cu13]'. Stopping with Ctrl-C keeps what was measured; --resume goes on.
    '--operator collectives' measures what GPUs of one host do together (NCCL, KV transfers, tensor
    parallelism), and needs two or more of them.

    Example: simctl calibrate --quick -o out/h200
    """
    from calib.sweeps import chosen_sweeps, needs_crew

    started = time.monotonic()
    random = options["random"] if options["random"] is not None else (200 if size == "full" else 40)
    sweeps = chosen_sweeps(options["operators"], random, options["seed"])
    if needs_crew(sweeps) and size != "smoke":
        lab = _crew_lab(size, options)
        try:
            return _measure(lab, size, options, sweeps, started)
        finally:
            lab.crew.close()
    lab = _lab(size, options)
    if size == "smoke":
        return _smoke(lab)
    return _measure(lab, size, options, sweeps, started)


def _crew_lab(size: str, options: dict[str, Any]) -> Any:
    """The bench of all visible GPUs, one process each."""
    from calib.collectives.crew import Crew, CrewLab, visible_gpus
    from calib.collectives.fake import FAKE_GPUS, FakeCrew
    from calib.measure import FULL, QUICK
    from calib.models import model_shape

    model, protocol = model_shape(options["model"]), FULL if size == "full" else QUICK
    if options["fake"]:
        return CrewLab(model, protocol, FakeCrew(FAKE_GPUS, options["seed"]))
    visible = visible_gpus()
    click.echo(f"Starting a process on each of {len(visible)} GPUs…", err=True)
    return CrewLab(model, protocol, Crew(visible, options["seed"], protocol, model.name))


def _lab(size: str, options: dict[str, Any]) -> Any:
    from calib.measure import FULL, QUICK, SMOKE
    from calib.models import EXPERTS, model_shape

    if options["model"] in EXPERTS:
        raise SimctlError(
            f"--model {options['model']} is a mixture, or a slice of one: calibrate with a dense model; "
            "--operator moe and --operator experts time experts."
        )
    model, protocol = model_shape(options["model"]), {"quick": QUICK, "full": FULL, "smoke": SMOKE}[size]
    if options["fake"]:
        from calib.fake import FakeLab

        return FakeLab(model, protocol, options["seed"])
    from calib.device import Meter, gpu_facts

    gpu_facts(Meter())  # before anything heavy: the usual refusals
    from calib.lab import GpuLab

    click.echo(f"Preparing {model.name} and proving SM partitions…", err=True)
    return GpuLab(model, protocol, options["seed"], options["libsmctrl"])


def _smoke(lab: Any) -> int:
    from calib.smoke import smoke

    checks = smoke(lab)
    for check in checks:
        click.echo(f"{'ok' if check.ok else 'FAILED':7}{check.seconds:6.2f} s  {check.name:44} {check.shown}")
        if check.trace:
            click.echo(check.trace, err=True)
    failed = sum(not check.ok for check in checks)
    click.echo(f"{len(checks) - failed} ok, {failed} failed on {lab.facts.name}; bench: {lab.description()}")
    return 1 if failed else 0


def _measure(lab: Any, size: str, options: dict[str, Any], sweeps: Any, started: float) -> int:
    from calib.run import Order
    from calib.run import calibrate as run
    from calib.sweep import BrokenContext

    full, total = size == "full", options["time_limit"]
    if total is None and not full:
        total = QUICK_LIMIT_S
    limit = total
    if total is not None and not options["fake"]:
        limit = max(1.0, total - (time.monotonic() - started))
    order = Order(options["output"], sweeps, full, options["seed"], options["resume"], limit)
    # a scheduler's TERM stops like Ctrl-C: with everything measured so far written out
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tick = (lambda runs, run, left: None) if options["quiet"] else _Progress()
    try:
        record = run(lab, order, tick)
    except BrokenContext as error:
        if not options["fake"]:
            _restart(error, total, started)
        raise
    for name, state in record["sweeps"].items():
        click.echo(
            f"{name:18} {state['measured']:6} of {state['points']:6} points, {state['rows']:6} rows, "
            f"{state['skipped']:4} skipped, {state['spent_s']:7.1f} s"
        )
    if not record["complete"]:
        click.echo("Stopped at the time limit; --resume goes on.", err=True)
    if options["fit"] and not options["fake"]:
        _fit(order.folder, options["quiet"])
    click.echo(str(order.folder))
    return 0


def _fit(folder: Path, quiet: bool) -> None:
    """Make a profile of what was measured; measurements that do not suffice are kept, and it is said why."""
    from calib.fit.make import make_profile

    try:
        make_profile(folder, tick=lambda text: None if quiet else click.echo(f"fit: {text}", err=True))
    except (SimctlError, ImportError) as error:
        click.echo(f"Measured, but no profile was written: {error}", err=True)


def _restart(error: SimctlError, limit_s: float | None, started: float) -> None:
    """Replace this process by one that resumes: a broken CUDA context cannot be used again."""
    left = int(os.environ.get(RESTARTS, MOST_RESTARTS))
    if not left:
        return
    click.echo(f"{error} Restarting.", err=True)
    os.environ[RESTARTS] = str(left - 1)
    arguments = [*sys.argv[1:], "--resume"]  # of an option given twice, the last counts
    if limit_s is not None:
        arguments += ["--time-limit", str(max(1.0, limit_s - (time.monotonic() - started)))]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", "from sim.cli import main; main()", *arguments])


class _Progress:
    """A bar on a terminal; elsewhere a line every 20 seconds."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._last = 0.0

    def __call__(self, runs: Any, run: Any, left_s: float) -> None:
        measured = sum(r.total - len(r.pending) for r in runs)
        total = sum(r.total for r in runs)
        left = f", {left_s:.0f} s left" if left_s < 1e8 else ""
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = self._bar or tqdm(total=total, initial=measured, unit="point", file=sys.stderr)
            self._bar.set_description(f"{run.sweep.name}{left}")
            self._bar.update(measured - self._bar.n)
        elif time.monotonic() - self._last > 20:
            self._last = time.monotonic()
            click.echo(f"{measured} of {total} points, {run.sweep.name}{left}", err=True)

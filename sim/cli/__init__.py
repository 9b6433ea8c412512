"""The `simctl` command. Each verb lives in its own module and is imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from sim.errors import PlanError, SimctlError, StalledError

# verb -> "module:attribute"; a new verb is one line here and one module beside this file
COMMANDS = {
    "run": "sim.cli.run:run",
    "report": "sim.cli.report:report",
    "trace": "sim.cli.trace:trace",
    "policies": "sim.cli.listings:policies",
    "models": "sim.cli.listings:models",
    "gpus": "sim.cli.listings:gpus",
    "init": "sim.cli.init:init",
    "profile": "sim.cli.profile:profile",
    "calibrate": "sim.cli.calibrate:calibrate",
    "validate": "sim.cli.validate:validate",
    "reproduce": "sim.cli.reproduce:reproduce",
}
# shown by `simctl --help` without importing the verbs
SHORT_HELP = {
    "run": "Simulate an experiment and write a result folder.",
    "report": "Redraw the report of a result folder.",
    "trace": "Show, convert or generate request traces.",
    "policies": "List the serving policies with their sources.",
    "models": "List the built-in models.",
    "gpus": "List the built-in GPUs.",
    "init": "Write a commented experiment to start from.",
    "profile": "List, show, check and query cost profiles.",
    "calibrate": "Measure kernels on a GPU and write a profile.",
    "validate": "Run a workload on the real GPU and in the simulator, and compare.",
    "reproduce": "Check published figures of papers against the simulator.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use, so that `--help` stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SHORT_HELP[name]) for name in COMMANDS])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and name not in COMMANDS and not name.startswith("-"):
            from sim.suggest import nearest

            ctx.fail(f"No such command '{name}'.{nearest(name, COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lanesim", prog_name="simctl")
def cli() -> None:
    """Simulate LLM serving on GPUs: which policy holds which SLO at which load, and why.

    Example: simctl run experiments/quickstart.yaml -o out/quickstart
    """


def _tell(sentence: str, error: BaseException) -> None:
    """Print a message and what was noted about it on the way up, such as how to go on."""
    for line in (sentence, *getattr(error, "__notes__", ())):
        click.echo(line, err=True)


def main(argv: list[str] | None = None) -> Any:
    """Entry point: user errors become one sentence on stderr and exit code 2."""
    try:
        code = cli.main(args=argv, standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        # click turns an interrupt into Abort and keeps it as the cause
        _tell("Interrupted.", error.__cause__ or error)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SimctlError as error:
        _tell(f"Error: {error}", error)
        sys.exit(2)
    except (PlanError, StalledError) as error:
        _tell(f"Error: {error}", error)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)

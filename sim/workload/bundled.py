"""Traces and quantile tables that travel with the package, and where a trace path is looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.quantiles import quantile_tables

# how the sample was made; a test makes it again
_SAMPLE_COMMAND = (
    "simctl trace synth --request-rate 5.53 --burstiness 0.84 --num-prompts 500 --quantiles azure-conv-2023 "
    "--seed 0 -o sample-conv.csv"
)


@dataclass(frozen=True)
class Bundled:
    """`kind` is "trace" (requests with arrivals) or "quantiles" (for lengths and minute_profile)."""

    name: str
    kind: str
    title: str
    source: str
    path: Path | None = None


def list_bundled() -> list[Bundled]:
    """Everything that can be named without a path, traces first."""
    samples = [
        Bundled(
            "sample-conv",
            "trace",
            "500 synthetic requests after Azure conversation 2023",
            _SAMPLE_COMMAND,
            _data() / "sample-conv.csv",
        )
    ]
    tables = [
        Bundled(table.name, "quantiles", table.title, table.source) for table in quantile_tables().values()
    ]
    return [*samples, *tables]


def find_trace(name: str, base_dirs: Sequence[Path]) -> tuple[str, Path]:
    """(name, path) of a trace given as a path or a bundled name.

    A relative path is tried against each of `base_dirs` in turn, then among the bundled names. Raises
    SimctlError that says where it looked.
    """
    given = Path(name).expanduser()
    for base in [Path()] if given.is_absolute() else base_dirs:
        path = base / given
        if path.is_dir() and name:
            raise SimctlError(f"trace '{name}' is a folder; give one CSV, JSONL or Parquet file")
        if path.is_file():
            return given.name.removesuffix(".gz").rsplit(".", 1)[0], path.resolve()
    known = {entry.name: entry for entry in list_bundled()}
    if name in known:
        entry = known[name]
        if entry.path is None:
            raise SimctlError(
                f"'{name}' is a table of lengths, not a trace; use it as prompt_tokens: "
                f"{{quantiles: {name}}} and output_tokens: {{quantiles: {name}}}"
            )
        return name, entry.path
    places = (
        "that place"
        if given.is_absolute()
        else " or ".join(dict.fromkeys(str(base.resolve()) for base in base_dirs))
    )
    traces = [entry.name for entry in known.values() if entry.kind == "trace"]
    raise SimctlError(
        f"trace '{name}' was not found in {places}, and no bundled trace is called so "
        f"({', '.join(traces)}); give a path relative to the experiment file or to the working folder "
        f"(traces/README.md says where public traces come from).{nearest(name, known)}"
    )


def _data() -> Path:
    return Path(str(files("sim"))) / "data" / "traces"

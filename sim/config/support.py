"""Keys that the format defines and this version cannot simulate: refused, never silently ignored."""

from __future__ import annotations

from collections.abc import Callable

from sim.config.schema import Experiment
from sim.config.source import Key, Source, dotted
from sim.errors import SimctlError

# key, whether it asks for something that is not there, what that something is
Rule = tuple[Key, Callable[[Experiment], bool], str]
RULES: tuple[Rule, ...] = (
    (("parallel", "pp"), lambda e: e.parallel.pp > 1, "pipeline parallelism; the only value is 1"),
    (("parallel", "ep"), lambda e: e.parallel.ep > 1, "expert parallelism; the only value is 1"),
    (("parallel", "dp"), lambda e: e.parallel.dp > 1, "data parallelism; use `replicas`"),
    (
        ("memory", "prefix_caching"),
        lambda e: e.memory.prefix_caching,
        "prefix caching; the only value is false",
    ),
)


def refuse_unsupported(experiment: Experiment, source: Source) -> None:
    """Raise SimctlError for the first key that asks for a feature which does not exist here."""
    for key, asks, what in RULES:
        if asks(experiment):
            raise SimctlError(f"{source.where(key)}: `{dotted(key)}`: this version does not simulate {what}")

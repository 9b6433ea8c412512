"""Trace formats, one small file each: what the columns are called and what their numbers mean.

A new format is a module in this folder with one `FORMAT`; nothing else has to know of it. Formats of other
packages are entry points of the group `simctl.traces` (or written as `module:NAME`) and are used only when
asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.formats.base import TraceFormat

__all__ = ["TraceFormat", "built_in", "find", "recognise"]

GROUP = "simctl.traces"


@cache
def built_in() -> dict[str, TraceFormat]:
    """The formats of this folder by name."""
    modules = [
        import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__) if info.name != "base"
    ]
    return {module.FORMAT.name: module.FORMAT for module in modules}


def find(name: str) -> TraceFormat:
    """The format called `name`: built in, an entry point, or `module:NAME`."""
    formats = built_in()
    if name in formats:
        return formats[name]
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    try:
        if name in plugins:
            found = plugins[name].load()
        elif ":" in name:
            module, attribute = name.split(":", 1)
            found = getattr(import_module(module), attribute)
        else:
            known = [*formats, *plugins]
            raise SimctlError(
                f"no trace format '{name}'; there are {', '.join(known)}.{nearest(name, known)}"
            )
    except (ImportError, AttributeError) as error:
        raise SimctlError(f"trace format '{name}' cannot be loaded: {error}") from None
    if not isinstance(found, TraceFormat):
        raise SimctlError(f"trace format '{name}' is a {type(found).__name__}, not a TraceFormat")
    return found


def recognise(columns: Iterable[str]) -> TraceFormat | None:
    """The built-in format whose required columns are all there; the one with most of them if several fit."""
    names = {fold(column) for column in columns}
    fitting = [form for form in built_in().values() if form.fits(names)]
    return max(fitting, key=lambda form: form.score(names), default=None)


def fold(column: str) -> str:
    """Column names are compared without regard to case and surrounding blanks."""
    return column.strip().casefold()

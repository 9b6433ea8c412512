"""YAML with line numbers: a document becomes plain data plus the line of every key in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sim.errors import SimctlError

Key = tuple[str | int, ...]
MAX_KEYS = 100_000  # aliases of aliases multiply: a page of text can stand for billions


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e3` as a number, as YAML 1.2 does; YAML 1.1 asks for a dot in it."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass
class Source:
    """Where a document came from: its name, its data, and for each key path the line it stands on.

    Values given on the command line have `overrides[path]` = the option that set them.
    """

    name: str
    data: dict[str, Any]
    lines: dict[Key, int] = field(default_factory=dict)
    overrides: dict[Key, str] = field(default_factory=dict)
    folder: Path | None = None

    def where(self, path: Key) -> str:
        """Say where `path`, or the nearest key above it, was written: "file.yaml, line 7" or the option.

        An option that set a key within `path` comes first: what the file alone says was no fault.
        """
        within = [told for key, told in self.overrides.items() if path and key[: len(path)] == path]
        if within:
            return within[-1]
        for end in range(len(path), 0, -1):
            if path[:end] in self.overrides:
                return self.overrides[path[:end]]
            if path[:end] in self.lines:
                return f"{self.name}, line {self.lines[path[:end]]}"
        return self.name


def dotted(path: Key) -> str:
    """Return `a.b[2].c` for ("a", "b", 2, "c")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def parse_yaml_value(text: str) -> Any:
    """Read one YAML value, as in `--set key=value`; raise yaml.YAMLError if it is not one."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader subclass


def read_yaml(text: str, name: str, folder: Path | None = None) -> Source:
    """Parse one YAML mapping with its line numbers; any fault in it is one SimctlError with the line."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise SimctlError(f"{name}: the file is empty; `simctl init` writes an experiment to start from")
        lines: dict[Key, int] = {}
        _mark(node, (), lines, name)
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise SimctlError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SimctlError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SimctlError(f"{name}: mappings and lists are nested too deeply, or hold themselves") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        raise SimctlError(
            f"{name}: an experiment is a mapping of keys (workload:, model:, …), not a {_kind(data)}"
        )
    return Source(name, data, lines, folder=folder)


def _mark(node: yaml.Node, path: Key, lines: dict[Key, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            label = str(getattr(key, "value", key))
            if label in seen and key.tag != "tag:yaml.org,2002:merge":
                twice = f"`{dotted((*path, label))}` is there twice, first on line {seen[label]}"
                raise SimctlError(f"{name}, line {line}: {twice}")
            seen[label] = line
            lines[(*path, label)] = line
            if len(lines) > MAX_KEYS:
                raise SimctlError(f"{name}: more than {MAX_KEYS:,} keys and items: not an experiment file")
            _mark(value, (*path, label), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            if len(lines) > MAX_KEYS:
                raise SimctlError(f"{name}: more than {MAX_KEYS:,} keys and items: not an experiment file")
            _mark(value, (*path, index), lines, name)


def _kind(data: Any) -> str:
    return {list: "list", str: "text", type(None): "empty value"}.get(type(data), "single value")

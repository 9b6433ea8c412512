"""Read an experiment file, apply overrides, and turn any fault into one sentence: file, line and key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from sim.config.schema import Experiment, PolicyEntry
from sim.config.source import Key, Source, dotted, parse_yaml_value, read_yaml
from sim.config.support import refuse_unsupported
from sim.errors import SimctlError
from sim.suggest import nearest

MAX_BYTES = 1_000_000  # an experiment is a page; more is some other file given by mistake


def load_experiment(path: Path | str, overrides: Sequence[tuple[str, str]] = ()) -> tuple[Experiment, Source]:
    """Read, override and validate an experiment file.

    `overrides` are (option text, "key.sub=value") pairs, applied in order; the value is read as YAML.
    Raises SimctlError with the file, the line and the path of the bad key, and the nearest valid one.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise SimctlError(f"{path} is a folder; give the experiment's YAML file")
        if path.stat().st_size > MAX_BYTES:
            raise SimctlError(f"{path} is larger than {MAX_BYTES // 1_000_000} MB: not an experiment file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SimctlError(
            f"{path}: no such experiment file; `simctl init` writes one to start from"
        ) from None
    except UnicodeDecodeError:
        raise SimctlError(f"{path} is not text in UTF-8: not an experiment file") from None
    except OSError as error:
        raise SimctlError(f"{path} cannot be read: {error.strerror}") from None
    source = read_yaml(text, str(path), path.resolve().parent)
    source.data.setdefault("name", path.stem)
    return validate(source, overrides), source


def parse_experiment(
    data: dict[str, Any], overrides: Sequence[tuple[str, str]] = ()
) -> tuple[Experiment, Source]:
    """Validate an experiment given as a mapping, as in a notebook; errors name the key."""
    source = Source("experiment", data)
    return validate(source, overrides), source


def validate(source: Source, overrides: Sequence[tuple[str, str]] = ()) -> Experiment:
    """Apply overrides to `source` in place and return the checked experiment."""
    for option, assignment in overrides:
        apply_override(source, option, assignment)
    try:
        experiment = Experiment.model_validate(source.data)
    except ValidationError as error:
        raise SimctlError(_first_fault(error, source)) from None
    _check_workload(experiment, source)
    refuse_unsupported(experiment, source)
    return experiment


def _check_workload(experiment: Experiment, source: Source) -> None:
    """Have the owner of the `workload:` block check which of its keys go together."""
    from sim.workload.process import parse_process
    from sim.workload.spec import check_keys

    block = experiment.workload.model_dump(exclude_none=True)
    try:
        check_keys(block)
        parse_process(block)
    except SimctlError as error:
        key = str(error).split(":")[0].split(" ")[0]
        raise SimctlError(f"{source.where(tuple(key.split('.')))}: {error}") from None


def apply_override(source: Source, option: str, assignment: str) -> None:
    """Set one `key.sub=value`; list items are addressed by index (`policies.0.token_budget=256`)."""
    key, equals, text = assignment.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise SimctlError(
            f"{option} {assignment}: write key.sub=value, for example --set memory.block_size=32"
        )
    try:
        value = parse_yaml_value(text)
    except yaml.YAMLError:
        raise SimctlError(f"{option} {assignment}: '{text}' is not a YAML value") from None
    node: Any = source.data
    parts = key.split(".")
    path: Key = ()
    for depth, part in enumerate(parts):
        step: str | int = part
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise SimctlError(
                    f"{option} {assignment}: `{dotted(path)}` is a list of {len(node)}; "
                    f"its items are 0 to {len(node) - 1}"
                )
            step = int(part)
        path = (*path, step)
        if depth == len(parts) - 1:
            node[step] = value
            break
        child = node.get(step) if isinstance(node, dict) else node[int(part)]
        if isinstance(child, str) and path[:1] == ("policies",):
            child = {"name": child}  # a bare policy name that is given a knob
        if not isinstance(child, dict | list):
            child = {}
        node[step] = child
        node = child
    # what the file says at or below this key no longer counts
    source.lines = {key: line for key, line in source.lines.items() if key[: len(path)] != path}
    source.overrides[path] = f"{option} {assignment}"


def _first_fault(error: ValidationError, source: Source) -> str:
    """One sentence for the most telling fault: an unknown key before what follows from it."""
    faults = error.errors(include_url=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    path = _real_path(fault["loc"], source.data, keep_last=fault["type"] in ("missing", "extra_forbidden"))
    where, key = source.where(path), dotted(path)
    kind, value = fault["type"], fault.get("input")
    context = fault.get("ctx", {})
    if kind == "extra_forbidden":
        valid = _keys_at(path[:-1], source.data)
        hint = nearest(str(path[-1]), valid)
        if not hint and valid:
            hint = f" Valid here: {', '.join(valid)}."
        return f"{where}: unknown key `{key}`.{hint}"
    if kind == "missing":
        return f"{where}: `{key}` is missing"
    if kind == "value_error":
        message = str(context["error"])
        if not path:  # a rule across sections names its key first
            where = source.where(tuple(message.split(":")[0].split(" ")[0].split(".")))
        return f"{where}: {key + ': ' if key else ''}{message}"
    if kind == "literal_error":
        hint = _near_literal(value, context)
        return f"{where}: `{key}` is {_show(value)}, but must be {context['expected']}.{hint}"
    if kind == "invalid_key":
        return f"{where}: the key `{key}` is not text; keys are names"
    if kind in ("model_type", "dict_type", "model_attributes_type") and path[:1] == ("policies",):
        return f"{where}: `{key}` must be a policy's name or a mapping with `name`, not {_show(value)}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"{where}: `{key}` must be a mapping of keys, not {_show(value)}"
    return f"{where}: `{key}` is {_show(value)}, but must be {_rule(kind, fault['msg'], context)}"


def _rule(kind: str, message: str, context: dict[str, Any]) -> str:
    """What would be right, in the words of the experiment file rather than of the validator."""
    words = {
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "string_too_short": "text of at least one character",
    }
    if kind in words:
        return words[kind]
    if kind == "too_short":
        return f"a list of at least {context['min_length']} item{'s'[: context['min_length'] > 1]}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']} items"
    return message.removeprefix("Input should be ").removeprefix("a valid ")


def _near_literal(value: Any, context: dict[str, Any]) -> str:
    words = [w.strip("' ") for w in str(context.get("expected", "")).replace(" or ", ",").split(",")]
    return nearest(value, words) if isinstance(value, str) else ""


def _show(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 60 else value[:57] + '…'}'"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value != value:
        return "not a number (NaN)"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return str(value)


def _real_path(loc: Iterable[str | int], data: Any, keep_last: bool) -> Key:
    """Drop the tags of unions from a pydantic location: what is not in the data is not in the file."""
    path: list[str | int] = []
    parts = list(loc)
    node = data
    for index, part in enumerate(parts):
        here = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if here:
            path.append(part)
            node = node[part]
        elif keep_last and index == len(parts) - 1:
            path.append(part)
    return tuple(path)


def _keys_at(path: Key, data: Any) -> list[str]:
    """The valid keys of the mapping at `path`; those of every form of it while it has no key of any."""
    model: type[BaseModel] = Experiment
    forms: list[type[BaseModel]] = []
    for part in path:
        if isinstance(part, int):
            continue
        here = data = data.get(part) if isinstance(data, dict) else None
        if part not in model.model_fields:
            continue  # a name that the user chose, as in `slo.classes`
        forms = _models_in(model.model_fields[part].annotation)
        if forms:
            model = max(
                forms, key=lambda m: len(set(m.model_fields) & set(here if isinstance(here, dict) else ()))
            )
    if model is PolicyEntry:
        return []
    if len(forms) > 1 and not set(model.model_fields) & set(data if isinstance(data, dict) else ()):
        return list(dict.fromkeys(key for form in forms for key in form.model_fields))
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]

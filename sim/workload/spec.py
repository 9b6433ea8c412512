"""The keys of a `workload:` block and checked access to their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sim.errors import SimctlError
from sim.suggest import nearest

_TRACE = {
    "trace": "path or bundled name of a trace",
    "format": "format of the trace file, if it is not to be recognised by its columns",
    "time_unit": "unit of the arrival column: s, ms, us, ns or iso (dates)",
    "columns": "names of the file's columns, as {prompt_tokens: NAME, ...}",
    "on_zero": "rows with zero tokens: drop (default) or clamp to one",
    "window_s": "[a, b]: requests that arrive from a until before b",
    "max_requests": "the first so many requests",
    "subsample": "a random share (below 1) or number of the requests",
    "shuffle": "true: requests in random order over the same arrivals",
    "spread_s": "width of the grid on which arrivals were logged, to spread them within it",
    "rescale": "how a trace comes to a request rate: stretch (default) or redraw",
}
_GENERATED = {
    "num_prompts": "number of requests",
    "prompt_tokens": "a number, {uniform: [a, b]}, {lognormal: {median, sigma, min, max}}, {quantiles: NAME}",
    "output_tokens": "the same for outputs",
    "spearman": "rank correlation of prompt and output lengths; default the quantile table's own",
}
_BOTH = {
    "arrivals": "trace, poisson, gamma, deterministic, bursts or closed-loop",
    "burstiness": "shape of the Gamma gaps (1 is Poisson, below 1 burstier)",
    "on_s": "bursts: seconds with arrivals",
    "off_s": "bursts: seconds without",
    "minute_profile": "bursts: a quantile table whose requests per minute to follow",
    "max_concurrency": "most requests in flight at a time",
    "on_overlength": "requests beyond the context limit: reject (default) or truncate",
    "max_new_tokens": "what clients ask for: actual, {factor: f} or a number",
    "slo_class": "a class for all requests, or shares as {chat: 0.7, batch: 0.3}",
}
# key -> what it means; the experiment schema and `simctl init` may show it
WORKLOAD_KEYS: dict[str, str] = {**_TRACE, **_GENERATED, **_BOTH}


def check_keys(spec: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and keys of a trace beside those of a generator."""
    for key in spec:
        if key not in WORKLOAD_KEYS:
            raise SimctlError(f"workload.{key}: unknown key.{nearest(str(key), WORKLOAD_KEYS)}")
    mine, other = (_TRACE, _GENERATED) if "trace" in spec else (_GENERATED, _TRACE)
    # "stretch" is the default, which a resolved experiment writes out for generated workloads too
    for key in spec:
        if key == "rescale" and spec[key] == "stretch":
            continue
        if key in other and mine is _TRACE:
            hint = "; max_requests limits a trace" if key == "num_prompts" else ""
            raise SimctlError(f"workload.{key}: has no effect on a trace, whose requests are its own{hint}")
        if key in other:
            raise SimctlError(f"workload.{key}: has no effect without workload.trace")


def number(
    spec: Mapping[str, Any],
    key: str,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    path: str = "workload",
) -> float:
    """The finite number under `key` within the bounds; SimctlError with the path otherwise."""
    value = spec[key]
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not above < value < below or value < at_least:
        bounds = [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"of at least {at_least:g}"] if at_least > -math.inf else []
        bounds += [f"below {below:g}"] if below < math.inf else []
        raise SimctlError(f"{path}.{key}: {value!r} is not a number {' and '.join(bounds)}".rstrip())
    return float(value)


def count(spec: Mapping[str, Any], key: str) -> int:
    """The whole number of at least 1 under `key`."""
    value = spec[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 1 or value != int(value):
        raise SimctlError(f"workload.{key}: {value!r} is not a whole number of at least 1")
    return int(value)


def pair(spec: Mapping[str, Any], key: str) -> tuple[float, float]:
    """[a, b] with 0 <= a < b under `key`."""
    value = spec[key]
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise SimctlError(f"workload.{key}: {value!r} is not [a, b]")
    ends = {"from": value[0], "to": value[1]}
    start = number(ends, "from", at_least=0, path=f"workload.{key}")
    return start, number(ends, "to", above=start, path=f"workload.{key}")


def choice(spec: Mapping[str, Any], key: str, valid: Sequence[str], default: str) -> str:
    """One of `valid` under `key`, or the default."""
    value = spec.get(key, default)
    if value not in valid:
        raise SimctlError(
            f"workload.{key}: {value!r} is not one of {', '.join(valid)}.{nearest(str(value), valid)}"
        )
    return str(value)

"""From the `workload:` block of an experiment to a Workload at one rate and seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.workload import transforms
from sim.workload.bundled import find_trace, list_bundled
from sim.workload.lengths import Quantiles, draw_lengths, parse_lengths
from sim.workload.process import Process, parse_process
from sim.workload.slo import assign_classes
from sim.workload.spec import WORKLOAD_KEYS, check_keys, choice, count, number, pair
from sim.workload.streams import stream
from sim.workload.trace import ON_ZERO, Trace, load_trace
from sim.workload.workload import Workload

__all__ = ["WORKLOAD_KEYS", "build_workload", "list_bundled"]


def build_workload(
    spec: Mapping[str, Any],
    *,
    seed: int,
    request_rate: float | None,
    context_limit: int | None,
    base_dirs: Sequence[Path],
    slo_classes: Mapping[str, Any] | None = None,
) -> Workload:
    """Build the workload that `spec`, a plain `workload:` block, describes.

    `request_rate` is in requests/s, or None for a trace at its own stamps or a closed loop. `context_limit`
    is the model's, in tokens (prompt + output), or None for no limit. Trace paths are relative to
    `base_dirs`, tried in turn. `slo_classes` maps class names to blocks that may hold a `priority`. The order
    of work is window, max_requests, subsample, shuffle, spread, context limit, arrivals: a rate is that of
    the requests simulated. Raises SimctlError with the key's path for anything that is wrong, missing or
    without effect.
    """
    spec = {key: value for key, value in spec.items() if value is not None}
    check_keys(spec)
    process = parse_process(spec)
    if request_rate is not None and not 0 < request_rate < math.inf:
        raise SimctlError(f"request rate {request_rate!r} is not a positive number of requests per second")
    trace = _cut(_read(spec, base_dirs), spec, seed) if "trace" in spec else _generate(spec, seed)
    rejected = 0
    if context_limit is not None:
        how = choice(spec, "on_overlength", transforms.ON_OVERLENGTH, "reject")
        trace, rejected = transforms.limit_length(trace, context_limit, how)
    trace = transforms.ask_for(trace, _wish(spec.get("max_new_tokens")), context_limit)
    trace = process.arrive(trace, request_rate, seed)
    return _workload(trace, spec, process, rejected, slo_classes, seed)


def _read(spec: Mapping[str, Any], base_dirs: Sequence[Path]) -> Trace:
    name, path = find_trace(str(spec["trace"]), base_dirs)
    rename = spec.get("columns", {})
    if not isinstance(rename, Mapping):
        raise SimctlError("workload.columns: give a block such as {prompt_tokens: NAME}")
    trace = load_trace(
        path,
        format=spec.get("format"),
        time_unit=spec.get("time_unit"),
        on_zero=choice(spec, "on_zero", ON_ZERO, "drop"),
        rename=tuple((str(ours), str(theirs)) for ours, theirs in rename.items()),
    )
    return replace(trace, name=name)


def _cut(trace: Trace, spec: Mapping[str, Any], seed: int) -> Trace:
    if "window_s" in spec:
        trace = transforms.window(trace, *pair(spec, "window_s"))
    if "max_requests" in spec:
        trace = transforms.first(trace, count(spec, "max_requests"))
    rng = stream(seed, "rows")
    if "subsample" in spec:
        trace = transforms.subsample(trace, number(spec, "subsample", above=0), rng)
    if spec.get("shuffle"):
        trace = transforms.shuffle(trace, rng)
    if "spread_s" in spec:
        trace = transforms.spread(trace, number(spec, "spread_s", above=0), stream(seed, "spread"))
    return trace


def _generate(spec: Mapping[str, Any], seed: int) -> Trace:
    for key in ("num_prompts", "prompt_tokens", "output_tokens"):
        if key not in spec:
            raise SimctlError(f"workload.{key} is missing: a workload without a trace needs {key}")
    prompt = parse_lengths(spec["prompt_tokens"], "prompt_tokens")
    output = parse_lengths(spec["output_tokens"], "output_tokens")
    notes = [f"generated {count(spec, 'num_prompts'):,} requests from seed {seed}"]
    spearman = 0.0
    if "spearman" in spec:
        spearman = number(spec, "spearman", above=-1.0, below=1.0)
    elif isinstance(prompt, Quantiles) and isinstance(output, Quantiles) and prompt.table == output.table:
        spearman = prompt.spearman or 0.0
    if spearman:
        notes.append(f"prompt and output lengths coupled, rank correlation {spearman:g}")
    rng = stream(seed, "prompts"), stream(seed, "outputs")
    prompts, outputs = draw_lengths(prompt, output, count(spec, "num_prompts"), rng, spearman)
    return Trace("generated", "generated", None, prompts, outputs, notes=tuple(notes))


def _wish(value: Any) -> int | float | None:
    """`max_new_tokens` of a block as None (actual), a factor (float) or a number of tokens (int)."""
    if value is None or value == "actual":
        return None
    if isinstance(value, Mapping) and list(value) == ["factor"]:
        return float(number(value, "factor", at_least=1, path="workload.max_new_tokens"))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise SimctlError(
        f"workload.max_new_tokens: {value!r} is none of actual, {{factor: 2}} (at least 1) or a number"
    )


def _workload(
    trace: Trace,
    spec: Mapping[str, Any],
    process: Process,
    rejected: int,
    slo_classes: Mapping[str, Any] | None,
    seed: int,
) -> Workload:
    assert trace.arrival_s is not None
    assert trace.max_new_tokens is not None
    classes, names, priority, notes = assign_classes(
        trace, spec.get("slo_class"), slo_classes, stream(seed, "classes")
    )
    workload = Workload(
        name=trace.name,
        arrival_s=np.array(trace.arrival_s, np.float64),
        prompt_tokens=trace.prompt_tokens.astype(np.int32),
        output_tokens=trace.output_tokens.astype(np.int32),
        max_new_tokens=trace.max_new_tokens.astype(np.int32),
        slo_class=classes,
        priority=priority,
        slo_classes=names,
        max_concurrency=process.max_concurrency,
        session_id=None if trace.session_id is None else np.array(trace.session_id, np.int64),
        prefix_hashes=trace.prefix_hashes,
        rejected_overlength=rejected,
        sha256=trace.sha256,
        notes=(*trace.notes, *notes),
    )
    return workload if trace.sha256 else replace(workload, sha256=_fingerprint(spec, workload))


def _fingerprint(spec: Mapping[str, Any], workload: Workload) -> str:
    """SHA-256 of a generator's parameters and of the columns they gave."""
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True, default=str).encode())
    columns: tuple[NDArray[Any], ...] = (workload.arrival_s, workload.prompt_tokens, workload.output_tokens)
    for column in columns:
        digest.update(column.tobytes())
    return digest.hexdigest()

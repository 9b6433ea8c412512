"""What every policy must hold: a law looks at its runs and yields (scenario, what happened) where it is broken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sim.engine import RunRecords
from sim.errors import SimctlError, StalledError
from sim.metrics.conservation import ConservationError, check_conservation
from sim.testing.scenarios import Scenario, fresh, scenarios, small_cost

SM_CLASSES = ("active", "tail", "host", "contention", "switch", "lent", "idle_lane")
SM_TOLERANCE = 1e-6


class Untried(Exception):
    """Why a law cannot be tried."""


class Trial:
    """Runs of one policy, each made once; a run that fails is a finding of the first law that needs it."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._runs: dict[str, RunRecords | Exception] = {}

    def fits(self, scenario: str) -> bool:
        """Policies with pools have replicas of their own."""
        return scenario != "replicas" or not getattr(fresh(self.policy), "pools", ())

    def names(self) -> list[str]:
        """Scenarios that the policy can run."""
        return [name for name in scenarios() if self.fits(name)]

    def run(self, scenario: str) -> RunRecords | Exception:
        """Records, or what stopped the run."""
        if scenario not in self._runs:
            self._runs[scenario] = self.also(scenarios()[scenario])
        return self._runs[scenario]

    def also(self, scenario: Scenario, **more: Any) -> RunRecords | Exception:
        """The same for a scenario that only one law looks at."""
        try:
            return scenario.run(self.policy, **more)
        except Exception as error:
            return error

    def done(self) -> Iterable[tuple[str, RunRecords]]:
        """All runs that came to their end."""
        for name in self.names():
            records = self.run(name)
            if isinstance(records, RunRecords):
                yield name, records


Broken = Iterable[tuple[str, str]]  # scenario, what happened


def _what(error: Exception) -> str:
    return str(error) if isinstance(error, SimctlError) else f"{type(error).__name__}: {error}"


def _carried_out(trial: Trial) -> Broken:
    for name in trial.names():
        error = trial.run(name)
        if isinstance(error, Exception) and not isinstance(error, StalledError):
            yield name, _what(error)


def _no_starvation(trial: Trial) -> Broken:
    for name in trial.names():
        error = trial.run(name)
        if isinstance(error, StalledError):
            yield name, str(error)
    for name, records in trial.done():
        left = records.requests[records.requests["status"] == "unfinished"]
        if name != "cut" and len(left):
            yield name, f"requests {left['request_id'].tolist()} are never finished"
    yield from _overtaken(trial)


def _overtaken(trial: Trial) -> Broken:
    """At half the rate at which it serves the rush, nobody waits as long as the whole rush takes."""
    rush = trial.run("rush")
    if not isinstance(rush, RunRecords):
        return
    n = len(rush.requests)
    load = scenarios()["rush"].workload
    times = np.linspace(0.0, 2 * rush.end_s, n)
    records = trial.also(replace(scenarios()["rush"], workload=replace(load, arrival_s=times)))
    if isinstance(records, Exception):
        yield "rush", f"at half the load, {_what(records)}"
        return
    waits = records.requests["first_scheduled_s"] - records.requests["arrival_s"]
    if waits.max() > rush.end_s:
        yield (
            "rush",
            f"at half the load request {waits.idxmax()} waits {waits.max():.3g} s for its first chunk",
        )


def _accounts(trial: Trial) -> Broken:
    for name, records in trial.done():
        try:
            check_conservation(records)
        except ConservationError as error:
            yield name, str(error)
        frame = records.requests
        rejected = frame["status"] == "rejected"
        if (frame.loc[rejected, "reason"] == "").any() or frame.loc[rejected, "generated_tokens"].any():
            yield name, "a rejected request has no reason, or tokens"
    edges = trial.run("edges")
    if isinstance(edges, RunRecords):
        too_long = edges.requests["request_id"] == len(edges.requests) - 1
        if (edges.requests.loc[too_long, "status"] != "rejected").any():
            yield "edges", "the request that is longer than the context is not rejected"


def _sm_sum(trial: Trial) -> Broken:
    sms = small_cost().gpu.sms
    for name, records in trial.done():
        held = sum(records.totals[f"sm_{kind}_s"] for kind in SM_CLASSES)
        whole = sms * records.totals["busy_s"]
        if abs(held - whole) > SM_TOLERANCE * max(whole, 1e-9):
            yield name, f"SM-seconds by class add up to {held:.9g}, those of the busy time to {whole:.9g}"
        if records.steps is not None and (records.steps["sms"] > sms).any():
            yield name, f"a launch holds more than the {sms} SMs"


def _deterministic(trial: Trial) -> Broken:
    for name in ("stream", "tight"):
        yield from _differs(trial, name, "run a second time", {})


def _bursts(trial: Trial) -> Broken:
    for name in ("calm", "stream", "tight", "closed"):
        yield from _differs(trial, name, "step by step instead of in bursts", {"bursts": False})


def _differs(trial: Trial, name: str, how: str, more: dict[str, Any]) -> Broken:
    first = trial.run(name)
    if isinstance(first, RunRecords):
        again = trial.also(scenarios()[name], **more)
        if isinstance(again, Exception):
            yield name, f"{how}, {_what(again)}"
        elif digest(again) != digest(first):
            yield name, f"{how}, it gives other results{_where(first, again)}"


def _where(a: RunRecords, b: RunRecords) -> str:
    x, y = (r.requests["finish_s"].to_numpy(np.float64) for r in (a, b))
    other = np.flatnonzero(~((x == y) | (np.isnan(x) & np.isnan(y))))
    return f": request {other[0]} finishes at {x[other[0]]} or {y[other[0]]} s" if len(other) else ""


def _jobs(trial: Trial) -> Broken:
    here = trial.run("stream")
    if not isinstance(here, RunRecords):
        return
    from joblib import Parallel, delayed

    try:
        elsewhere = Parallel(n_jobs=2)(delayed(_digest_elsewhere)(trial.policy, k) for k in range(2))
    except Exception as error:
        raise Untried(f"the policy cannot be sent to another process ({type(error).__name__})") from error
    if any(found != digest(here) for found in elsewhere):
        yield (
            "stream",
            "in another process it gives other results: it depends on the order of a set, or on state outside",
        )


def _digest_elsewhere(policy: Any, _number: int) -> str:
    return digest(scenarios()["stream"].run(policy))


def _blind(trial: Trial) -> Broken:
    """Longer outputs, of which nobody can know before one ends, change nothing until then."""
    scenario = scenarios()["rush"]
    load = scenario.workload
    asked = np.full(len(load), 200, np.int32)
    short = replace(load, output_tokens=(load.output_tokens + 20).astype(np.int32), max_new_tokens=asked)
    long = replace(short, output_tokens=(short.output_tokens + 1 + np.arange(len(load)) % 9).astype(np.int32))
    a, b = (trial.also(replace(scenario, workload=w), bursts=False) for w in (short, long))
    if isinstance(a, Exception) or isinstance(b, Exception):
        return  # other laws tell
    first = min(a.requests["finish_s"].min(), b.requests["finish_s"].min())
    seen = [
        "start_s",
        "end_s",
        "lane",
        "sms",
        "layers",
        "prefill_tokens",
        "chunks",
        "decode_batch",
        "context_sum",
    ]
    assert a.steps is not None
    assert b.steps is not None
    x, y = (steps.loc[steps["end_s"] < first, seen].reset_index(drop=True) for steps in (a.steps, b.steps))
    if not x.equals(y):
        yield (
            "rush",
            f"launches before {first:.4g} s, when the first request ends, depend on outputs still to come",
        )


LAWS: dict[str, tuple[str, Callable[[Trial], Broken]]] = {
    "plans": ("every plan can be carried out, and plan() raises nothing", _carried_out),
    "no starvation": ("every accepted request is finished, and waits within reason", _no_starvation),
    "conservation": ("requests, tokens, KV blocks and times add up, and rejections have a reason", _accounts),
    "sm sum": ("SM sets never exceed the GPU, and SM time adds up", _sm_sum),
    "determinism": ("the same run gives the same bytes", _deterministic),
    "bursts": ("bursts are an optimisation: they change no result", _bursts),
    "jobs": ("a run does not depend on the process that it runs in", _jobs),
    "hidden outputs": ("true output lengths stay unknown until they are reached", _blind),
}


def digest(records: RunRecords) -> str:
    """A hash of all columns and sums of a run but `decisions`, which counts how often the policy was asked."""
    made = hashlib.sha256()
    frames = [records.requests] if records.steps is None else [records.requests, records.steps]
    for frame in frames:
        for name in frame:
            column = frame[name].to_numpy()
            made.update(repr(column.tolist()).encode() if column.dtype == object else column.tobytes())
    for gaps in (records.itl_s, records.itl_count, records.itl_end_s):
        made.update(np.ascontiguousarray(gaps).tobytes())
    for totals in (records.totals, records.window_totals):
        made.update(repr(sorted((k, v) for k, v in totals.items() if k != "decisions")).encode())
    return made.hexdigest()

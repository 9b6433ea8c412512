"""Conformance of a scheduling policy: what every policy must hold, checked on yours by `check_policy`.

    from sim.testing import check_policy
    check_policy(MyPolicy())            # or "module:MyPolicy", or {"name": "sarathi", "token_budget": 256}

It raises `PolicyCheckError`, an AssertionError whose text names each law that is broken, on which load, and how; put
the call into a test of your own. A finding is run again by `scenarios()["rush"].run(policy)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sim.cost import load_cost
from sim.cost.prices import Prices
from sim.cost.profiled import ProfiledCost
from sim.engine import RunRecords, simulate
from sim.engine.deployment import Target
from sim.errors import SimctlError, StalledError
from sim.metrics.conservation import ConservationError, check_conservation
from sim.policies import make_policy
from sim.workload.workload import Workload, make_workload

__all__ = ["Finding", "PolicyCheckError", "Report", "Scenario", "check_policy", "scenarios"]

CONTEXT = 2048  # tokens that the model of the scenarios takes: price tables stay small
PLENTY = 65536  # tokens of a KV pool that never fills
LIMITS = Target(ttft_s=1.0, tpot_s=0.05, itl_s=0.2)
SM_CLASSES = ("active", "tail", "host", "contention", "switch", "lent", "idle_lane")
SM_TOLERANCE = 1e-6
SHOWN = 2  # findings of one law that a report spells out


@dataclass(frozen=True)
class Scenario:
    """A load and the settings that it runs with. `pool_tokens`: KV tokens of a replica; `about`: in words."""

    name: str
    about: str
    workload: Workload
    pool_tokens: int = PLENTY
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, policy: Any, **more: Any) -> RunRecords:
        """Simulate the load under a fresh copy of the policy (an entry, an object, a class)."""
        made = _fresh(policy)
        block = getattr(made, "block_size", None) or 16
        options = {
            "num_gpu_blocks": -(-self.pool_tokens // block),
            "targets": (LIMITS,) * len(self.workload.slo_classes),
            "estimator": "oracle",  # the quickest belief to make
            "jitter": False,
            "record_steps": True,
        }
        return simulate(self.workload, made, _cost(), **{**options, **self.options, **more})


@dataclass(frozen=True)
class Finding:
    """A law that a policy breaks: its name, the scenario's, and what happened."""

    law: str
    scenario: str
    what: str


@dataclass(frozen=True)
class Report:
    """The laws that a policy keeps, and its findings; `skipped`: laws that could not be tried, with the reason."""

    policy: str
    kept: tuple[str, ...]
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        tried = len(self.kept) + len({finding.law for finding in self.findings})
        lines = [f"policy '{self.policy}' keeps {len(self.kept)} of {tried} laws"]
        for law in dict.fromkeys(finding.law for finding in self.findings):
            mine = [finding for finding in self.findings if finding.law == law]
            lines.append(f"- {law}: {LAWS[law][0]}")
            for found in mine[:SHOWN]:
                about = scenarios()[found.scenario].about
                lines.append(f"    scenario '{found.scenario}' ({about}): {found.what}")
            if len(mine) > SHOWN:
                lines.append(f"    and in {', '.join(found.scenario for found in mine[SHOWN:])}")
            lines.append(f'    again: sim.testing.scenarios()["{mine[0].scenario}"].run(policy)')
        lines += [f"- {law}: not tried: {why}" for law, why in self.skipped.items()]
        return "\n".join(lines)


class PolicyCheckError(AssertionError):
    """A policy breaks a law; the text is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check_policy(policy: Any, *, laws: Iterable[str] | None = None, raises: bool = True) -> Report:
    """Run a policy through all scenarios and check the laws (or only those named) on what comes out.

    `policy`: an object with `plan(view)`, its class, or an entry as in an experiment file. It is copied for each run.
    Raises PolicyCheckError if a law is broken (with `raises`), SimctlError for an entry that does not exist.
    """
    label = str(getattr(_fresh(policy), "label", None) or type(_fresh(policy)).__name__)
    chosen = list(LAWS) if laws is None else list(laws)
    unknown = [law for law in chosen if law not in LAWS]
    if unknown:
        raise SimctlError(f"no law is called '{unknown[0]}'; there are {', '.join(LAWS)}")
    kept, findings, skipped = [], [], {}
    trial = _Trial(policy)
    for law in chosen:
        try:
            broken = [Finding(law, scenario, what) for scenario, what in LAWS[law][1](trial)]
        except _Untried as reason:
            skipped[law] = str(reason)
            continue
        findings += broken
        if not broken:
            kept.append(law)
    report = Report(label, tuple(kept), tuple(findings), skipped)
    if raises and findings:
        raise PolicyCheckError(report)
    return report


@lru_cache(maxsize=1)
def scenarios() -> dict[str, Scenario]:
    """The loads that policies are tried on, by name."""
    rng = np.random.default_rng(20)
    calm = _load(np.cumsum(rng.exponential(0.2, 20)), rng.integers(1, 900, 20), rng.integers(1, 40, 20))
    rush = _load(np.zeros(40), rng.integers(1, 900, 40), rng.integers(1, 60, 40))
    stream = _load(np.cumsum(rng.exponential(0.01, 60)), rng.integers(100, 1500, 60), rng.integers(1, 50, 60))
    tight = _load(np.cumsum(rng.exponential(0.01, 30)), rng.integers(50, 500, 30), rng.integers(50, 300, 30))
    edges = _load(
        np.array([0.0, 0.0, 0.0, 0.5, 0.5, 60.0, 60.0, 60.0]),
        np.array([1, 1, 400, 1, CONTEXT - 1, 1, 700, CONTEXT]),
        np.array([1, 30, 1, 1, 1, 2, 1, 1]),
    )
    lone = _load(np.zeros(1), np.ones(1), np.ones(1))
    classes = replace(
        stream,
        slo_class=(np.arange(60) % 2).astype(np.int16),
        slo_classes=("chat", "batch"),
        priority=(np.arange(60) % 2).astype(np.int16),
    )
    made = (
        Scenario("calm", "20 requests, one every 0.2 s", calm),
        Scenario("rush", "40 requests at once", rush),
        Scenario("stream", "60 requests, one every 10 ms", stream),
        Scenario("classes", "the stream in two SLO classes of different priority", classes),
        Scenario("tight", "30 requests whose KV does not fit at once", tight, pool_tokens=2400),
        Scenario("edges", "one-token prompts and outputs, equal stamps, a silence, one too long", edges),
        Scenario("lone", "a single request of one token in and one out", lone),
        Scenario("replicas", "the stream on two replicas", stream, options={"replicas": 2}),
        Scenario(
            "closed", "the rush by 6 clients, each waiting for its answer", replace(rush, max_concurrency=6)
        ),
        Scenario(
            "cut", "the stream, cut off after 0.3 s", stream, options={"horizon_s": 0.3, "warmup_s": 0.1}
        ),
    )
    return {scenario.name: scenario for scenario in made}


def _load(arrivals: Any, prompts: Any, outputs: Any) -> Workload:
    asked = np.asarray(outputs, np.int32)
    load = make_workload("check", np.asarray(arrivals, np.float64), np.asarray(prompts, np.int32), asked)
    # clients ask for more than they get: a policy that takes the one for the other goes wrong
    return replace(load, max_new_tokens=np.minimum(asked + 7, CONTEXT).astype(np.int32))


class _Remembering(ProfiledCost):
    """Makes each set of price tables once: nobody writes into them."""

    def compile(self, **settings: Any) -> Prices:
        """The tables of `ProfiledCost`."""
        return _tables(self.profile_hash, repr(sorted(settings.items())), _Unseen((self, settings)))


class _Unseen(tuple):  # type: ignore[type-arg]
    """Passes an argument by a cache's key."""

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True


@lru_cache(maxsize=32)
def _tables(profile: str, settings: str, given: _Unseen) -> Prices:
    cost, options = given
    return ProfiledCost.compile(cost, **options)


@lru_cache(maxsize=1)
def _cost() -> ProfiledCost:
    cost = load_cost("llama-3.1-8b", "h200-sxm", "spec")
    same = {f.name: getattr(cost, f.name) for f in fields(cost) if f.init}
    return _Remembering(**{**same, "model": replace(cost.model, max_context=CONTEXT)})


def _fresh(policy: Any) -> Any:
    if isinstance(policy, str | Mapping):
        return make_policy(policy)
    return policy() if isinstance(policy, type) else deepcopy(policy)


class _Untried(Exception):
    """Why a law cannot be tried."""


class _Trial:
    """Runs of one policy, each made once; a run that fails is a finding of the first law that needs it."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._runs: dict[str, RunRecords | Exception] = {}

    def fits(self, scenario: str) -> bool:
        """Policies with pools have replicas of their own."""
        return scenario != "replicas" or not getattr(_fresh(self.policy), "pools", ())

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


def _carried_out(trial: _Trial) -> Broken:
    for name in trial.names():
        error = trial.run(name)
        if isinstance(error, Exception) and not isinstance(error, StalledError):
            yield name, _what(error)


def _no_starvation(trial: _Trial) -> Broken:
    for name in trial.names():
        error = trial.run(name)
        if isinstance(error, StalledError):
            yield name, str(error)
    for name, records in trial.done():
        left = records.requests[records.requests["status"] == "unfinished"]
        if name != "cut" and len(left):
            yield name, f"requests {left['request_id'].tolist()} are never finished"
    yield from _overtaken(trial)


def _overtaken(trial: _Trial) -> Broken:
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


def _accounts(trial: _Trial) -> Broken:
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


def _sm_sum(trial: _Trial) -> Broken:
    sms = _cost().gpu.sms
    for name, records in trial.done():
        held = sum(records.totals[f"sm_{kind}_s"] for kind in SM_CLASSES)
        whole = sms * records.totals["busy_s"]
        if abs(held - whole) > SM_TOLERANCE * max(whole, 1e-9):
            yield name, f"SM-seconds by class add up to {held:.9g}, those of the busy time to {whole:.9g}"
        if records.steps is not None and (records.steps["sms"] > sms).any():
            yield name, f"a launch holds more than the {sms} SMs"


def _deterministic(trial: _Trial) -> Broken:
    for name in ("stream", "tight"):
        yield from _differs(trial, name, "run a second time", {})


def _bursts(trial: _Trial) -> Broken:
    for name in ("calm", "stream", "tight", "closed"):
        yield from _differs(trial, name, "step by step instead of in bursts", {"bursts": False})


def _differs(trial: _Trial, name: str, how: str, more: dict[str, Any]) -> Broken:
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


def _jobs(trial: _Trial) -> Broken:
    here = trial.run("stream")
    if not isinstance(here, RunRecords):
        return
    from joblib import Parallel, delayed

    try:
        elsewhere = Parallel(n_jobs=2)(delayed(_digest_elsewhere)(trial.policy, k) for k in range(2))
    except Exception as error:
        raise _Untried(f"the policy cannot be sent to another process ({type(error).__name__})") from error
    if any(found != digest(here) for found in elsewhere):
        yield (
            "stream",
            "in another process it gives other results: it depends on the order of a set, or on state outside",
        )


def _digest_elsewhere(policy: Any, _number: int) -> str:
    return digest(scenarios()["stream"].run(policy))


def _blind(trial: _Trial) -> Broken:
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


LAWS: dict[str, tuple[str, Callable[[_Trial], Broken]]] = {
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

"""The arrival process of a `workload:` block: which keys it takes, and stamps for a trace's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.workload import arrivals, transforms
from sim.workload.quantiles import quantile_table
from sim.workload.spec import choice, count, number
from sim.workload.streams import stream
from sim.workload.trace import Trace

KINDS = ("trace", "poisson", "gamma", "deterministic", "bursts", "closed-loop")
RESCALE = ("stretch", "redraw")


@dataclass(frozen=True)
class Process:
    """Arrival process; `rescale` only for kind "trace", `on_s`/`off_s` or `counts` only for "bursts"."""

    kind: str
    burstiness: float = 1.0
    on_s: float = 0.0
    off_s: float = 0.0
    profile: str = ""
    counts: tuple[int, ...] = ()
    rescale: str = "stretch"
    max_concurrency: int | None = None

    def arrive(self, trace: Trace, request_rate: float | None, seed: int) -> Trace:
        """Give the requests of `trace` their arrivals at a mean rate in requests/s (None: its own)."""
        if self.kind == "closed-loop":
            return self._closed(trace, request_rate)
        if self.kind == "trace" and self.rescale != "redraw":
            return self._own(trace, request_rate)
        if request_rate is None:
            request_rate = _own_rate(trace, self.kind, needed=self.rescale == "redraw")
        stamps, note = self._draw(len(trace), request_rate, stream(seed, "gaps"))
        return replace(trace, arrival_s=stamps, notes=(*trace.notes, note))

    def _closed(self, trace: Trace, request_rate: float | None) -> Trace:
        if request_rate is not None:
            raise SimctlError(
                f"a closed loop issues requests as others finish, so the request rate {request_rate:g} has "
                "no effect; leave it out, or use arrivals: poisson with max_concurrency"
            )
        note = f"closed loop of {self.max_concurrency} requests in flight"
        return replace(trace, arrival_s=np.zeros(len(trace)), notes=(*trace.notes, note))

    def _own(self, trace: Trace, request_rate: float | None) -> Trace:
        if trace.arrival_s is None:
            raise SimctlError(
                f"trace '{trace.name}' has lengths only and no arrivals to replay; say workload.arrivals "
                "(poisson, gamma, deterministic, bursts or closed-loop)"
            )
        if request_rate is not None:
            return transforms.stretch(trace, request_rate)
        return trace

    def _draw(self, n: int, rate: float, rng: np.random.Generator) -> tuple[NDArray[np.float64], str]:
        at = f"at {rate:.6g} requests/s"
        if self.kind == "deterministic":
            return arrivals.deterministic_arrivals(n, rate), f"arrivals deterministic {at}"
        shape = f", burstiness {self.burstiness:g}" if self.burstiness != 1 else ""
        if self.counts:
            stamps = arrivals.profile_arrivals(n, rate, self.burstiness, self.counts, rng)
            return stamps, f"arrivals follow the minutes of {self.profile} {at}{shape}"
        if self.kind == "bursts":
            stamps = arrivals.on_off_arrivals(n, rate, self.burstiness, self.on_s, self.off_s, rng)
            return (
                stamps,
                f"arrivals in bursts of {self.on_s:g} s every {self.on_s + self.off_s:g} s {at}{shape}",
            )
        stamps = arrivals.gamma_arrivals(n, rate, self.burstiness, rng)
        name = "Poisson" if self.burstiness == 1 else f"Gamma of burstiness {self.burstiness:g}"
        redrawn = "redrawn as " if self.kind == "trace" else ""
        return stamps, f"arrivals {redrawn}{name} {at}"


def parse_process(spec: Mapping[str, Any]) -> Process:
    """The arrival process of a checked block; SimctlError for keys that it does not use."""
    default = "trace" if "trace" in spec else "poisson"
    kind = choice(spec, "arrivals", KINDS, default)
    if kind == "trace" and "trace" not in spec:
        raise SimctlError("workload.arrivals: 'trace' replays a trace's own stamps; give workload.trace")
    rescale = choice(spec, "rescale", RESCALE, "stretch")
    process = Process(kind, rescale=rescale, burstiness=_burstiness(spec, kind, rescale))
    if "max_concurrency" in spec:
        process = replace(process, max_concurrency=count(spec, "max_concurrency"))
    elif kind == "closed-loop":
        raise SimctlError("workload.max_concurrency is missing: a closed loop needs it")
    return _bursts(spec, process)


def _burstiness(spec: Mapping[str, Any], kind: str, rescale: str) -> float:
    if "burstiness" not in spec:
        if kind == "gamma":
            raise SimctlError("workload.burstiness is missing: arrivals: gamma needs it (1 is Poisson)")
        return 1.0
    value = number(spec, "burstiness", above=0)
    drawn = kind in ("gamma", "bursts") or rescale == "redraw"
    if kind == "poisson" and value != 1:
        raise SimctlError(f"workload.burstiness: {value:g} is not Poisson (1); use arrivals: gamma")
    if kind != "poisson" and not drawn:
        raise SimctlError(f"workload.burstiness: has no effect on arrivals: {kind}")
    return value


def _bursts(spec: Mapping[str, Any], process: Process) -> Process:
    given = [key for key in ("on_s", "off_s", "minute_profile") if key in spec]
    if process.kind != "bursts":
        if given:
            raise SimctlError(
                f"workload.{given[0]}: has no effect on arrivals: {process.kind}; it shapes bursts"
            )
        return process
    if given == ["minute_profile"]:
        table = quantile_table(str(spec["minute_profile"]))
        if table.per_minute_counts is None:
            raise SimctlError(f"workload.minute_profile: table '{table.name}' has no requests per minute")
        return replace(process, profile=table.name, counts=table.per_minute_counts)
    if given == ["on_s", "off_s"]:
        return replace(process, on_s=number(spec, "on_s", above=0), off_s=number(spec, "off_s", at_least=0))
    raise SimctlError("workload.arrivals: bursts need either on_s and off_s, or minute_profile")


def _own_rate(trace: Trace, kind: str, *, needed: bool) -> float:
    """The trace's mean rate, for drawing new arrivals where no rate is given."""
    if needed:
        raise SimctlError("workload.rescale: has no effect without a request rate; give sweep.request_rate")
    if trace.arrival_s is None or len(trace) < 2 or trace.arrival_s[-1] == trace.arrival_s[0]:
        raise SimctlError(
            f"arrivals: {kind} needs a request rate, which '{trace.name}' does not have of its own; give "
            "sweep.request_rate or --request-rate"
        )
    return (len(trace) - 1) / float(trace.arrival_s[-1] - trace.arrival_s[0])

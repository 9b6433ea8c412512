"""What was run, in words: workload, SLO, and how much of the simulated time rests on measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sim.metrics.utilisation import by_kind
from sim.report.points import per_gpu, swept_rate
from sim.report.results import Results
from sim.report.words import limits_text, listed, number, plain

KINDS = ("measured", "fitted", "extrapolated")
ARRIVALS = {
    "poisson": "Poisson arrivals",
    "gamma": "gamma arrivals",
    "deterministic": "evenly spaced arrivals",
    "bursts": "arrivals in bursts",
    "closed-loop": "closed loop",
    "trace": "the trace's own arrivals",
}


def facts(results: Results) -> list[tuple[str, str]]:
    """Label and text of what was run, in reading order."""
    experiment, runs = results.experiment, results.runs
    rates = sorted({rate for run in runs if (rate := swept_rate(run)) is not None})
    seeds = sorted({int(run["seed"]) for run in runs if run.get("seed") is not None})
    found = [
        ("Model", _one(runs, "model", experiment)),
        ("GPU", f"{_gpu_counts(runs)} × {_one(runs, 'gpu', experiment)}"),
        ("Workload", workload_text(experiment.get("workload") or {})),
    ]
    if rates:
        found.append(
            (
                "Offered rates" if len(rates) > 1 else "Offered rate",
                f"{', '.join(plain(rate) for rate in rates)} req/s{' per GPU' if per_gpu(runs) else ''}",
            )
        )
        rescaled = rescale_text(experiment.get("workload") or {})
        found += [("Rescaled", rescaled)] if rescaled else []
    else:
        found.append(("Offered rate", own_rate_text(runs, experiment.get("workload") or {})))
    found.append(("SLO", slo_text(experiment.get("slo") or {})))
    if seeds:
        replicates = f" ({len(seeds)} replicates)" if len(seeds) > 1 else ""
        found.append(("Seed" if len(seeds) == 1 else "Seeds", ", ".join(map(str, seeds)) + replicates))
    return [(label, _unbroken(text)) for label, text in found]


def _gpu_counts(runs: Sequence[Mapping[str, Any]]) -> str:
    """1, or "1 or 2" where policies need different numbers of GPUs."""
    return " or ".join(str(n) for n in sorted({int(run.get("num_gpus") or 1) for run in runs}))


def own_rate_text(runs: Sequence[Mapping[str, Any]], workload: Mapping[str, Any]) -> str:
    """The rate of a workload that is not brought to one."""
    if workload.get("arrivals") == "closed-loop":
        return "set by the closed loop"
    known = [run["offered_request_rate"] for run in runs if run.get("offered_request_rate")]
    mean = f", {number(sum(known) / len(known))} req/s on average" if known else ""
    return f"the workload's own arrivals{mean}"


def _unbroken(text: str) -> str:
    """Keep a number and its unit on one line."""
    for unit in ("%", "ms", "req/s", "tokens", "requests"):
        text = re.sub(rf"(\d) {unit}", f"\\1\u00a0{unit}", text)
    return text


def _one(runs: Sequence[Mapping[str, Any]], key: str, experiment: Mapping[str, Any]) -> str:
    named = list(dict.fromkeys(str(run[key]) for run in runs if run.get(key)))
    return ", ".join(named) or str(experiment.get(key, "unknown"))


def workload_text(workload: Mapping[str, Any]) -> str:
    """One line on what arrives."""
    if workload.get("trace"):
        parts = [f"trace {workload['trace']}"]
        if workload.get("window_s"):
            start, end = workload["window_s"]
            parts.append(f"{plain(start)} to {plain(end)} s of it")
        if workload.get("max_requests"):
            parts.append(f"at most {workload['max_requests']:,} requests")
        if workload.get("subsample"):
            parts.append(f"subsampled by {plain(workload['subsample'])}")
    else:
        parts = []
        if workload.get("num_prompts"):
            parts.append(f"{workload['num_prompts']:,} generated requests")
        for key, what in (("prompt_tokens", "prompts"), ("output_tokens", "outputs")):
            if workload.get(key):
                parts.append(f"{what}: {lengths_text(workload[key])}")
    if workload.get("arrivals"):
        text = ARRIVALS.get(workload["arrivals"], str(workload["arrivals"]))
        if workload.get("burstiness"):
            text += f", burstiness {plain(workload['burstiness'])}"
        if workload.get("max_concurrency"):
            text += f" with {workload['max_concurrency']} in flight"
        parts.append(text)
    return "; ".join(parts) or "unknown"


def lengths_text(lengths: Any) -> str:
    """A length distribution in words."""
    if not isinstance(lengths, dict):
        return f"{lengths:,} tokens" if isinstance(lengths, int | float) else str(lengths)
    kind, knobs = next(iter(lengths.items()))
    if kind == "lognormal" and isinstance(knobs, dict):
        return f"lognormal, median {plain(knobs['median'])} tokens, sigma {plain(knobs['sigma'])}"
    if kind == "uniform":
        return f"uniform from {plain(knobs[0])} to {plain(knobs[1])} tokens"
    return f"{kind} of {knobs}"


def rescale_text(workload: Mapping[str, Any]) -> str:
    """How the trace's arrivals were brought to each offered rate; empty for generated arrivals."""
    if not workload.get("trace") or workload.get("arrivals") not in (None, "trace"):
        return ""
    if workload.get("rescale") == "redraw":
        return "redraw: arrivals drawn anew at each offered rate, lengths as in the trace"
    return "stretch: the trace's stamps times one factor per offered rate"


def slo_text(slo: Mapping[str, Any]) -> str:
    """The limits and the share of requests that must meet them, classes included."""
    main = limits_text(slo)
    parts = [main] if main else []
    for name, limits in (slo.get("classes") or {}).items():
        parts.append(f"{name}: {limits_text(limits) or 'no limit'}")
    if not parts:
        return "none given"
    return f"{'; '.join(parts)}, by {plain(100 * target_of(slo))} % of requests"


def target_of(slo: Mapping[str, Any]) -> float:
    """The share of requests that must meet the SLO."""
    return float(slo.get("attainment") or 0.99)


def provenance_kinds(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of simulated GPU time that is measured, fitted or extrapolated, averaged over the runs."""
    shares: dict[str, float] = {}
    known = [run["provenance"] for run in runs if run.get("provenance")]
    for labels in known:
        for kind, share in by_kind(labels).items():
            shares[kind] = shares.get(kind, 0.0) + share / len(known)
    return {
        kind: shares[kind] for kind in (*KINDS, *sorted(set(shares) - set(KINDS))) if shares.get(kind, 0) > 0
    }


def provenance_labels(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The same by full label, largest share first."""
    shares: dict[str, float] = {}
    known = [run["provenance"] for run in runs if run.get("provenance")]
    for labels in known:
        for label, share in labels.items():
            shares[label] = shares.get(label, 0.0) + share / len(known)
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def operator_labels(profile: Mapping[str, Any]) -> dict[str, str]:
    """Operator -> label of the curve behind it; empty if the folder does not say."""
    for key in ("provenance", "operators"):
        block = profile.get(key)
        if isinstance(block, dict):
            named = {k: v.get("label") if isinstance(v, dict) else v for k, v in block.items()}
            if named and all(isinstance(label, str) for label in named.values()):
                return {str(k): str(v) for k, v in named.items()}
    return {}


def measured_sentence(kinds: Mapping[str, float]) -> str:
    """The sentence that must not be overlooked: how much of the result is not measured."""
    weak = {k: v for k, v in kinds.items() if k != "measured" and v >= 0.0005}
    if not kinds:
        return "This folder does not say what the simulated times rest on."
    if not weak:
        return "All simulated GPU time rests on measured curves."
    if len(kinds) == 1:
        return f"All simulated GPU time is {next(iter(kinds))}, none of it measured."
    parts = [f"{100 * share:.3g} % is {kind}" for kind, share in weak.items()]
    return f"Of the simulated GPU time, {listed(parts)}, not measured."

"""The page's sections with figures: each adds its figures to a dict and returns its HTML, "" without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from sim.report.distributions import distribution
from sim.report.facts import target_of
from sim.report.panels import STATS, Figure, Metric, panel
from sim.report.points import Key, Point, rates_of
from sim.report.results import Results
from sim.report.words import LATENCIES, plain, rate_name


def latency(points: Sequence[Point], results: Results, figures: dict[str, Figure]) -> str:
    slo = results.experiment.get("slo") or {}
    metrics = [
        Metric(
            LATENCIES[name],
            f"{LATENCIES[name]}, ms (log)",
            {choice: f"{stat}_{name}_ms" for choice, stat in STATS.items()},
            log=True,
            limit=slo.get(f"{name}_ms"),
            limit_name=f"SLO {plain(slo[f'{name}_ms'])} ms" if slo.get(f"{name}_ms") else "",
        )
        for name in ("ttft", "tpot", "itl")
    ]
    sweep = len(rates_of(points)) > 1
    pick = _choices("pct", list(STATS), "p99", "Percentile") if sweep else ""
    hint = (
        "TTFT and TPOT: percentiles over requests. ITL: over all gaps between tokens, so it shows stalls that "
        "TPOT averages away."
    )
    if not sweep:
        hint += " Each line runs from p50 over p90 to p99, whose value stands beside it."
    if any(p.saturated for p in points):
        hint += " Hollow markers: saturated."
    heading = "Latency against offered rate" if sweep else "Latency by policy"
    return _section(heading, "latency", metrics, points, figures, pick, hint)


def attainment(points: Sequence[Point], results: Results, figures: dict[str, Figure]) -> str:
    target = target_of(results.experiment.get("slo") or {})
    metrics = [_share("Every limit", "slo_attainment", target)]
    for by, names in (("metric", LATENCIES), ("class", None)):
        key = f"slo_attainment_by_{by}"
        inner = list(dict.fromkeys(name for run in results.runs for name in run.get(key) or {}))
        if len(inner) > 1:
            metrics += [
                _share(names.get(name, name) if names else f"Class {name}", (key, name), target)
                for name in inner
            ]
    hint = "Shares are of all requests of the window, rejected and unfinished ones included."
    if len(rates_of(points)) > 1:
        hint += f" Dashed: the target, {plain(100 * target)}\u00a0%."
    return _section("SLO attainment", "attainment", metrics, points, figures, "", hint)


def _share(title: str, key: Key, target: float) -> Metric:
    return Metric(
        title,
        "requests that meet it, %",
        {"all": key},
        scale=100.0,
        share=True,
        limit=100 * target,
        limit_name=f"target {plain(100 * target)} %",
    )


def throughput(points: Sequence[Point], figures: dict[str, Figure]) -> str:
    sweep = len(rates_of(points)) > 1
    metrics = [
        Metric("Goodput", "good requests/s", {"all": "request_goodput"}, diagonal=sweep),
        Metric("Requests", "completed requests/s", {"all": "request_throughput"}, diagonal=sweep),
        Metric("Output tokens", "output tokens/s", {"all": "output_throughput"}),
    ]
    hint = "Good requests finished and met every limit."
    hint += " Dotted: as many as offered. Completions count while the run drains, too." if sweep else ""
    return _section("Throughput", "throughput", metrics, points, figures, "", hint)


def _section(
    heading: str,
    name: str,
    metrics: Sequence[Metric],
    points: Sequence[Point],
    figures: dict[str, Figure],
    pick: str,
    hint: str,
) -> str:
    known = {f"{name}-{k}": metric for k, metric in enumerate(metrics) if metric.known(points)}
    figures |= {key: panel(metric, points) for key, metric in known.items()}
    if not known:
        return ""
    cards = {key: metric.title for key, metric in known.items()}
    return _cards(heading, cards, pick, hint)


def _cards(heading: str, cards: Mapping[str, str], pick: str, hint: str) -> str:
    body = "".join(
        f'<figure><figcaption>{escape(title)}</figcaption><div class="plot" data-figure="{escape(key)}">'
        "</div></figure>"
        for key, title in cards.items()
    )
    return (
        f'<section><div class="head"><h2>{escape(heading)}</h2>{pick}</div><p class="hint">{escape(hint)}</p>'
        f'<div class="grid">{body}</div></section>'
    )


def _choices(key: str, options: Sequence[str], chosen: str, label: str) -> str:
    """A row of buttons for a few options, a menu for many."""
    if len(options) > 4:
        items = "".join(f"<option{' selected' if o == chosen else ''}>{escape(o)}</option>" for o in options)
        return f'<label class="pick">{label} <select data-key="{key}">{items}</select></label>'
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(o == chosen).lower()}" data-value="{escape(o)}">'
        f"{escape(o)}</button>"
        for o in options
    )
    return f'<div class="pick" role="group" aria-label="{label}" data-key="{key}">{buttons}</div>'


def distributions(points: Sequence[Point], results: Results, figures: dict[str, Figure]) -> str:
    if results.requests is None:
        return ""
    slo = results.experiment.get("slo") or {}
    cards = {}
    for metric in ("ttft", "tpot", "e2el"):
        figure = distribution(metric, results.runs, results.requests, slo.get(f"{metric}_ms"))
        if figure["data"]:
            figures[f"cdf-{metric}"] = figure
            cards[f"cdf-{metric}"] = LATENCIES[metric]
    if not cards:
        return ""
    rates = rates_of(points)
    names = [rate_name(rate) for rate in rates]
    pick = _choices("rate", names, names[(len(names) - 1) // 2], "Offered rate") if len(rates) > 1 else ""
    hint = (
        "Share of the window's accepted requests at most as slow. A curve that stops below 100 % had requests "
        "without a value when the run ended."
    )
    return _cards("Latency distributions", cards, pick, hint)

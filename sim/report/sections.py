"""The page's sections with figures: each adds its figures to a dict and returns its HTML, "" without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from sim.report.distributions import distribution
from sim.report.facts import target_of
from sim.report.panels import STATS, Figure, Metric, panel
from sim.report.points import Key, Point, per_gpu, rates_of
from sim.report.results import Results
from sim.report.sm_time import sm_time_bars
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
    # per GPU also where the rates are not, but the policies use different numbers of GPUs
    each = len({run.get("num_gpus") for p in points for run in p.runs}) > 1 or per_gpu(points[0].runs)
    key, unit = ("_per_gpu", " per GPU") if each else ("", "")
    metrics = [
        Metric("Goodput", f"good requests/s{unit}", {"all": f"request_goodput{key}"}, diagonal=sweep),
        Metric(
            "Requests", f"completed requests/s{unit}", {"all": f"request_throughput{key}"}, diagonal=sweep
        ),
        Metric("Output tokens", f"output tokens/s{unit}", {"all": f"output_throughput{key}"}),
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


def sm_time(points: Sequence[Point], figures: dict[str, Figure]) -> str:
    """Where the SM time went, one bar a policy, at the offered rate that the reader picks."""
    if not any(run.get("sm_time_pct") for p in points for run in p.runs):
        return ""
    figures["sm-time"] = sm_time_bars(points)
    pick = _rate_pick(points)
    hint = "All SMs of all GPUs over the measured window; the classes sum to 100\u00a0%."
    return _cards("Where the SM time went", {"sm-time": "SM time by class"}, pick, hint)


def _rate_pick(points: Sequence[Point]) -> str:
    names = [rate_name(rate) for rate in rates_of(points)]
    return _choices("rate", names, names[(len(names) - 1) // 2], "Offered rate") if len(names) > 1 else ""


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
    pick = _rate_pick(points)
    hint = (
        "Share of the window's accepted requests at most as slow. A curve that stops below 100 % had requests "
        "without a value when the run ended."
    )
    return _cards("Latency distributions", cards, pick, hint)

"""`report.html`: one page about a result folder that works offline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.errors import SimctlError
from sim.report.colours import DARK, POLICY, SYMBOLS
from sim.report.facts import (
    facts,
    measured_sentence,
    operator_labels,
    provenance_kinds,
    provenance_labels,
    target_of,
)
from sim.report.notes import notes_of
from sim.report.panels import Figure
from sim.report.points import Point, points_of, policies_of
from sim.report.results import Results, read_results
from sim.report.sections import attainment, distributions, latency, sm_time, throughput
from sim.report.tables import holding_table, run_table, verdict_table

SCRIPT = "plotly.min.js"
GLYPHS = dict(zip(SYMBOLS, "●■◆▲✚✖★▼⬢", strict=True))


def write_report(folder: Path, output: Path | None = None, shared_script: bool = False) -> Path:
    """Draw `folder`'s results into `output` (default: `report.html` in it) and return its path.

    With `shared_script` plotly's script is written once beside the page instead of into it, so that many
    reports in one place stay small. Raises SimctlError for a folder without usable results.
    """
    from plotly.offline import get_plotlyjs

    results = read_results(folder)
    path = output or folder / "report.html"
    if shared_script:
        script = f'<script src="{SCRIPT}"></script>'
    else:
        script = f"<script>{get_plotlyjs()}</script>"
    page = render(results, script)
    if shared_script:
        _write(path.parent / SCRIPT, get_plotlyjs())
    _write(path, page)
    return path


def _write(path: Path, text: str) -> None:
    """Write whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SimctlError(f"{path} cannot be written: {error.strerror or error}.") from error


def render(results: Results, script: str) -> str:
    """The page; the same results give the same bytes."""
    points = points_of(results.runs)
    figures: dict[str, Figure] = {}
    sections = [
        latency(points, results, figures),
        attainment(points, results, figures),
        throughput(points, figures),
        _verdicts(points),
        sm_time(points, figures),
        distributions(points, results, figures),
    ]
    asset = files("sim").joinpath("data/report")
    light, dark = POLICY, [DARK[ink] for ink in POLICY]
    tints = {"light": light, "dark": dark}
    inks = {
        mode: "".join(f"--p{k}:{ink};" for k, ink in enumerate(colours)) for mode, colours in tints.items()
    }
    style = asset.joinpath("page.css").read_text(encoding="utf-8")
    style = style.replace("/*light*/", inks["light"]).replace("/*dark*/", inks["dark"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(results.name)}: simulated serving</title><style>{style}</style></head><body>\n"
        f"{_header(results, points)}\n{_legend(points)}\n"
        + "\n".join(section for section in sections if section)
        + f"\n<section><h2>All runs</h2>{_table_hint(results)}{run_table(results.runs)}</section>\n{_notes(results)}\n"
        f'{script}\n<script type="application/json" id="figures">{_json(figures)}</script>\n'
        f'<script type="application/json" id="dark">{_json(DARK)}</script>\n'
        f"<script>{asset.joinpath('page.js').read_text(encoding='utf-8')}</script>\n</body></html>\n"
    )


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def _header(results: Results, points: Sequence[Point]) -> str:
    rows = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in facts(results)
    )
    held = holding_table(points, target_of(results.experiment.get("slo") or {}))
    return (
        f'<header><p class="kind">simctl report</p><h1>{escape(results.name)}</h1><dl>{rows}</dl></header>'
        f"{_profile(results)}" + (f"<section><h2>At a glance</h2>{held}</section>" if held else "")
    )


def _profile(results: Results) -> str:
    """The profile's provenance, where nobody can miss it."""
    kinds = provenance_kinds(results.runs)
    name = results.profile.get("name") or results.experiment.get("profile") or "unnamed"
    bar = "".join(
        f'<span class="{escape(kind)}" style="flex:{share:.4f}"></span>' for kind, share in kinds.items()
    )
    chips = "".join(
        f'<li><i class="{escape(kind)}"></i><b>{escape(kind)}</b> {100 * share:.3g} %</li>'
        for kind, share in kinds.items()
    )
    sources = "".join(
        f"<li>{escape(label)}: {100 * share:.3g} %</li>"
        for label, share in provenance_labels(results.runs).items()
    )
    operators = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(label)}</td></tr>'
        for name, label in operator_labels(results.profile).items()
    )
    more = f"<p>Share of simulated GPU time by source:</p><ul>{sources}</ul>" if sources else ""
    if operators:
        more += (
            '<div class="scroll"><table class="operators"><thead><tr><th>operator</th><th>its curve is</th></tr>'
            f"</thead><tbody>{operators}</tbody></table></div>"
        )
    weak = " weak" if any(kind != "measured" for kind in kinds) or not kinds else ""
    details = f"<details><summary>Sources, per operator</summary>{more}</details>" if more else ""
    return (
        f'<section class="profile{weak}"><h2>Profile {escape(str(name))}</h2>'
        f"<p>{escape(measured_sentence(kinds))}</p>"
        f'<div class="bar" aria-hidden="true">{bar}</div><ul class="chips">{chips}</ul>{details}</section>'
    )


def _verdicts(points: Sequence[Point]) -> str:
    table = verdict_table(points)
    hint = (
        "Ahead: more requests within the SLO, then more goodput per GPU, then shorter tails. The cause is read off "
        "the metric that falls furthest behind, the queue, the KV transfer and the SM time lost."
    )
    return (
        f'<section><h2>Which policy wins, and why</h2><p class="hint">{hint}</p>{table}</section>'
        if table
        else ""
    )


def _legend(points: Sequence[Point]) -> str:
    """One legend for all figures; each entry switches its policy on and off."""
    policies = policies_of([run for p in points for run in p.runs])
    entries = "".join(
        f'<button type="button" aria-pressed="true" data-policy="{escape(policy)}">'
        f'<i class="glyph p{k % len(POLICY)}">{GLYPHS[SYMBOLS[k % len(SYMBOLS)]]}</i>{escape(policy)}</button>'
        for k, policy in enumerate(policies)
    )
    return f'<nav class="legend" aria-label="Policies shown">{entries}</nav>'


def _table_hint(results: Results) -> str:
    mark = " ▲ marks saturated runs." if any(run.get("saturated") for run in results.runs) else ""
    return (
        '<p class="hint">Counts are of the whole run; rates and percentiles of the measured window.'
        f"{mark}</p>"
    )


def _notes(results: Results) -> str:
    groups = notes_of(results.runs)
    if results.missing:
        groups.append(("This page", [f"{results.missing}."]))
    body = "".join(
        f"<h3>{escape(heading)}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for heading, lines in groups
    )
    block = results.experiment.get("resolved") or {}
    versions = ", ".join(f"{name} {v}" for name, v in (block.get("versions") or {}).items())
    hashes = "; ".join(
        f"{what} sha256 {str(block[key])[:12]}…"
        for key, what in (("profile_sha256", "profile"), ("trace_sha256", "trace"))
        if block.get(key)
    )
    made = "; ".join(part for part in (versions, hashes) if part)
    foot = f"<footer><p>{escape(made)}</p></footer>" if made else ""
    return (f'<section class="notes"><h2>Notes</h2>{body}</section>' if body else "") + foot

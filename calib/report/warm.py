"""Passes with prompts and decode steps in turn: how long the top clock lasts, and what wins it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from calib.fit.warming import fit_warming, read_warm, warming_errors
from calib.report.data import Profile
from calib.report.svg import Axis, Level, Series, chart
from calib.report.text import Section, ms, number, percent, table, tokens

SHOWN_S = 0.25  # since the phase began


def warm(profile: Profile) -> Section | None:
    """Times of passes after decodes against their settled ones, and the terms of the engine's clock."""
    runs = read_warm(profile.folder) if profile.folder is not None else None
    if runs is None:
        return None
    found = fit_warming(runs, profile.folder)
    lead = (
        f"After decodes, passes with prompts run at the top clock for {1e3 * found.room_s:.0f} ms, up to "
        f"{percent(max(found.gain.values))} faster than they settle at under the power cap; decode steps behind "
        f"prompts take up to {percent(found.decode_loss)} more until the clock is up again."
    )
    rows = []
    for size, batch, decodes, cool, settled in zip(
        runs.tokens, runs.batch, runs.decodes, runs.cool_s, runs.settled_s, strict=True
    ):
        if decodes:
            back = f"wins back {number(float(found.rest.at((size,))), 2)}"
            rows.append((f"{size} decodes", ms(cool), "-", "-", back))
        else:
            gain = 1.0 - cool / settled
            draw = f"draws {number(float(found.draw.at((size,))), 2)}"
            among = f", {batch} of them decodes" if batch else ""
            rows.append((f"{tokens(size)} rows{among}", ms(cool), ms(settled), percent(gain), draw))
    light = [k for k in found.rest.axes[0].knots if k not in runs.tokens]
    rows += [
        (f"{k:.0f} decodes, by watts", "-", "-", "-", f"wins back {number(float(found.rest.at((k,))), 2)}")
        for k in light
    ]
    rows.append(("idle", "-", "-", "-", f"wins back {number(found.idle, 2)}"))
    errors = warming_errors(runs, found)["errors"]
    note = (
        "Room is in seconds of full passes, a second: a pass of the largest size draws 1, and idle time, whose watts "
        "are far below the cap, wins back more than decodes do. Idle time is from a layer with pauses of the host, "
        f"light decodes from their watts. Passes are off by {_error(errors['composed'])} by the engine's rule, and by "
        f"{_error(errors['at the settled clock'])} with one settled time each. "
        "The clock overshoots at times: single passes right behind the first 60 ms take up to a fifth more."
    )
    head = ("launch", "ms, top clock", "ms, settled", "faster", "room")
    body = ["![Passes after decodes](IMG/warm.svg)", table(head, rows), note]
    return Section("Passes after decodes: the clock", lead, body, {"warm": _picture(profile)})


def _error(of: Mapping[str, Any]) -> str:
    return f"{100 * of['median']:.1f} % (p95 {100 * of['p95']:.0f} %)"


def _picture(profile: Profile) -> str:
    """Each pass of the runs beside decodes, over the time since its phase began."""
    rows = profile.timed("warm")
    series = []
    passes = rows[(rows.kind == "prefill_step") & rows.q_tokens.notna()]
    beside = set(rows[rows.kind == "decode_step"].point)
    for size, of in passes[passes.point.isin(beside)].groupby("q_tokens", sort=True):
        last = of[of.elapsed_s > of.elapsed_s.max() / 2].time_s.median()
        series.append(Series(f"{float(size):.0f} tokens", _points(of, last), joined=False))
    axes = Axis("seconds since the decodes ended", low=0), Axis("time / settled time")
    return chart("Passes after decodes", *axes, series, [Level(1.0, "")])


def _points(of: pd.DataFrame, settled_s: float) -> list[tuple[float, float]]:
    early = of[of.elapsed_s <= SHOWN_S]
    return [(float(r.elapsed_s), float(r.time_s) / settled_s) for r in early.itertuples()]

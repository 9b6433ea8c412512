"""Long runs without a pause: how clock, power and time settle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from calib.report.data import Profile
from calib.report.scaling import described
from calib.report.svg import Axis, Series, chart
from calib.report.text import Section, ms, number, percent, table, tokens

EARLY_S, LATE_S = 1.0, 10.0  # first and last seconds of a run that are compared
TAUS_S = np.geomspace(0.05, 20.0, 200)
Points = list[tuple[float, float]]
EXPLAINED = 0.5  # share of the variance below which no time constant is stated


@dataclass(frozen=True)
class Settling:
    """value(t) = end − rise · exp(−t / tau); `explained`: share of the variance."""

    tau_s: float
    end: float
    rise: float
    explained: float


def settle(seconds: np.ndarray, values: np.ndarray) -> Settling | None:
    """Least-squares exponential approach, tau on a grid; None for fewer than five points or constant values."""
    if len(values) < 5 or np.ptp(values) == 0:
        return None
    best = None
    total = float(np.sum((values - values.mean()) ** 2))
    for tau in TAUS_S:
        basis = np.column_stack([np.ones_like(seconds), -np.exp(-seconds / tau)])
        found, *_ = np.linalg.lstsq(basis, values, rcond=None)
        left = float(np.sum((basis @ found - values) ** 2))
        if best is None or left < best[0]:
            best = (left, float(tau), found)
    assert best is not None
    left, tau, (end, rise) = best
    return Settling(tau, float(end), float(rise), 1.0 - left / total)


def hot(profile: Profile) -> Section | None:
    """Each long run: its first second against its last ten."""
    found = profile.timed("hot")
    if found.empty or "elapsed_s" not in found:
        return None
    runs = [
        (f"{str(kind).replace('_', ' ')} {described(rows)}", rows.sort_values("elapsed_s"))
        for (kind, _), rows in found.groupby(["kind", "point"], sort=True)
    ]
    rows, facts = [], []
    for name, of in runs:
        cells, fact = _row(name, of)
        rows.append(cells)
        facts.append(fact)
    lead = f"In runs of {found.elapsed_s.max():.0f} s without a pause {'; '.join(facts)}."
    head = ("run", "windows", "ms, first s", "ms, last 10 s", "change", "p5–p95 of last 10 s", "MHz, first s")
    head += ("MHz, last 10 s", "W, last 10 s", "time × clock, r", "time constant of time", "of power")
    note = (
        "A window is about a quarter of a second of replays; clock and power are one NVML reading each. Power "
        "readings lag and are averaged by the driver, so their time constant is an upper bound. *r* is of log "
        "time and log clock over the windows of a run: at −1 the clock explains each window, near 0 a single reading "
        "of it does not. A time constant is "
        f"given only where an exponential explains {percent(EXPLAINED)} of the variance."
    )
    pictures = {
        "hot-time": _picture(runs, "Long runs: step time over that of the first second", "share", _relative)
    }
    pictures["hot-clock"] = _picture(runs, "Long runs: SM clock", "MHz", _clock)
    body = [f"![{name}](IMG/{name}.svg)" for name in pictures]
    body += [table(head, rows), note]
    return Section("Clock and power in long hot runs", lead, body, pictures)


def _picture(
    runs: list[tuple[str, pd.DataFrame]], title: str, unit: str, of: Callable[[pd.DataFrame], Points]
) -> str:
    series = [Series(name, of(rows), joined=False) for name, rows in runs]
    return chart(title, Axis("seconds since the start", low=0), Axis(unit), series)


def _relative(of: pd.DataFrame) -> Points:
    first = float(of[of.elapsed_s < EARLY_S].time_s.median())
    return [(float(r.elapsed_s), float(r.time_s) / first) for r in of.itertuples()]


def _clock(of: pd.DataFrame) -> Points:
    return [(float(r.elapsed_s), float(r.sm_mhz)) for r in of[of.sm_mhz.notna()].itertuples()]


def _row(name: str, of: pd.DataFrame) -> tuple[tuple[str, ...], str]:
    last = float(of.elapsed_s.max())
    early, late = of[of.elapsed_s < EARLY_S], of[of.elapsed_s > last - LATE_S]
    change = float(late.time_s.median() / early.time_s.median() - 1)
    seconds = of.elapsed_s.to_numpy(float)
    time, power = settle(seconds, of.time_s.to_numpy(float)), None
    if of.power_w.notna().all():
        power = settle(seconds, of.power_w.to_numpy(float))
    low, high = late.time_s.quantile(0.05), late.time_s.quantile(0.95)
    cells = (
        name,
        str(len(of)),
        ms(early.time_s.median()),
        ms(late.time_s.median()),
        f"{change * 100:+.1f} %",
        f"{number(low * 1e3, 4)}–{number(high * 1e3, 4)}",
        tokens(early.sm_mhz.mean()),
        tokens(late.sm_mhz.mean()),
        tokens(late.power_w.mean()),
        _correlation(of),
        _constant(time),
        _constant(power),
    )
    fact = (
        f"the {name} holds {late.power_w.mean():.0f} W at {late.sm_mhz.mean():.0f} MHz and its time changes by "
        f"{change * 100:+.1f} % after the first second"
    )
    return cells, fact


def _correlation(of: pd.DataFrame) -> str:
    """Pearson's r of log time and log clock over the windows of a run."""
    known = of[of.sm_mhz.notna()]
    if len(known) < 5 or known.sm_mhz.nunique() < 2 or known.time_s.nunique() < 2:
        return "–"
    return f"{np.corrcoef(np.log(known.time_s), np.log(known.sm_mhz))[0, 1]:.2f}"


def _constant(found: Settling | None) -> str:
    if found is None or found.explained < EXPLAINED:
        return "none seen"
    return f"{number(found.tau_s, 2)} s"

"""What watts follow from and how well, what pauses of the host draw, and how fast the clock follows the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from calib.fit.points import gpu_of
from calib.fit.power import told_watts
from calib.report.data import Profile
from calib.report.text import Section, ms, number, percent, table, tokens
from sim.cost.energy import EnergyTerms
from sim.cost.gpu import load_gpu

ORDER = ("decode_step", "prefill_step", "mixed_step", "side by side", "fused_attention", "prefill_attention")
NAMES = {"prefill_attention": "prefill attention, FA2", "all": "all"}


def law(profile: Profile) -> Section | None:
    """The terms of energy, and their errors on what no fit has seen."""
    found: Mapping[str, Any] = (profile.about.get("errors") or {}).get("power") or {}
    terms = profile.energy
    if not found.get("held_out") or "active_w" not in terms:
        return None
    of_watts, of_clock = found["held_out"], found["clock"]
    lead = (
        f"Fitted to {found['fitted']['all']['points']} runs of single operators, watts of "
        f"{of_watts['all']['points']} runs of steps, fused attention and two sides at a time are predicted to "
        f"{percent(of_watts['all']['median'], 1)} (median; p95 {percent(of_watts['all']['p95'], 1)}) and the SM clock "
        f"to {percent(of_clock['all']['median'], 1)} of the top one."
    )
    rows = []
    for kind in (*ORDER, "all"):
        if kind in of_watts:
            watts, clock = of_watts[kind], of_clock[kind]
            cells = [percent(watts[key], 1) for key in ("median", "p95")]
            cells += [_signed(watts["bias"]), percent(clock["median"], 1), percent(clock["p95"], 1)]
            rows.append((NAMES.get(kind, kind.replace("_", " ")), watts["points"], *cells))
    head = ("never fitted", "runs", "watts, median", "p95", "bias", "clock, median", "p95")
    return Section("What watts follow from", lead, [_law(terms), table(head, rows), NOTE])


NOTE = (
    "Held for 1.0 s (1.6 s in the table above) and measured over its last 0.55 (0.9) s by NVML's energy counter, which "
    "moves every 0.1 s: about 3 % (1 %) of a reading is the counter's. Shapes, splits and variants were drawn at "
    "random, on another card than most of the single operators. Watts are told from work and measured time alone: what "
    "would be above the limit is the limit. FA2's warp-wide products take more than FA3's, which the terms are of."
)


def _law(terms: Mapping[str, Any]) -> str:
    def pico(name: str) -> str:
        return number(1e12 * float(terms[name]))

    power = f"{terms['clock_power']:.2f}"
    return (
        f"The board draws {terms['idle_w']:.0f} W while nothing is in flight (clocks up), {terms['active_w']:.0f} W "
        f"more while a kernel runs, {pico('j_per_flop')} pJ for a FLOP ({pico('more_per_prefill_flop')} more in "
        f"prefill attention, {pico('more_per_decode_flop')} more in decode attention, whose tiles are mostly padding), "
        f"{pico('j_per_byte')} pJ for a byte of HBM and {pico('more_per_element_byte')} more in element-wise kernels, "
        f"all at the top clock. At clock c, joules but DRAM's go with c^{power} (seen down to "
        f"{percent(float(terms['slowest_clock']))} of the top clock). At the limit, which holds the mean at "
        f"{terms['cap_w']:.0f} W, the clock falls until this fits: f(power) is c = ((limit - idle - DRAM) / "
        f"(rest of the draw at the top clock))^(1/{power}). Before it has fallen the board draws "
        f"{percent(float(terms.get('beyond', 1.0)))} of what work asks for beyond the limit: full grids of products "
        "slow themselves down within microseconds (the profiler counts 1.6 GHz where NVML shows 1.98)."
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def pauses(profile: Profile) -> Section | None:
    """Kernels that wait for the host before every launch."""
    found = profile.timed("power_duty")
    if found.empty or "gap_s" not in found or "active_w" not in profile.energy:
        return None
    terms, gpu = EnergyTerms(**profile.energy), load_gpu(gpu_of(profile.run["gpu"]["name"]))
    rows = [
        (
            _kind(one),
            ms(one["time_s"]),
            ms(one["gap_s"]),
            percent(one["time_s"] / (one["time_s"] + one["gap_s"])),
            tokens(one["power_w"]),
            tokens(told),
            tokens(one["sm_mhz"]),
        )
        for one, told in told_watts(found, terms, gpu)
    ]
    longest = found.gap_s.max()
    quiet = found[found.gap_s >= 0.99 * longest].power_w.mean()
    lead = (
        "While the host prepares a launch the board draws what it draws idle with its clocks up, "
        f"{number(float(quiet))} W at pauses of {ms(longest)} ms: a pause saves its share of the time."
    )
    head = ("what", "ms", "pause, ms", "busy", "W", "W by shares of time", "MHz")
    note = (
        "Graphs replayed one at a time, each waited for, with a pause of the host behind it. Watts by NVML's energy "
        "counter. By shares of time: while it runs what it draws without a pause, or where the limit holds that what "
        "its work asks for at the top clock, idle watts else. Pauses also cool the chip, whose leakage falls."
    )
    return Section("Pauses of the host", lead, [table(head, rows), note])


def reaction(profile: Profile) -> Section | None:
    """Two kinds of work in turn: what one leaves to the other."""
    found = profile.timed("clock_step")
    if found.empty or "phase" not in found:
        return None
    counts = found.groupby("point").phase.transform("size")
    turns, steps = found[counts <= 2], found[counts > 2]
    react = profile.energy.get("react_s")
    lead = "The clock follows the draw, not the kernel that runs"
    if react is not None:
        lead += f": it needs about {ms(float(react))} ms (area under the rest of a change)"
    body = []
    if not steps.empty:
        body.append(table(STEP_HEAD, _steps(steps)))
        body.append(
            "Long phases without a pause between them. A prefill layer keeps its top-clock time for 30 to 70 ms while "
            "the board draws more than its limit, then the clock falls in one or two steps; behind it decodes are slow "
            "for as long. Watts and clocks are NVML's, renewed every 0.1 s."
        )
    if not turns.empty:
        body.append(table(TURN_HEAD, _turns(turns)))
        body.append(
            "Alternating without a pause; means over the second half of the run. Phases much shorter than the reaction "
            "share one clock, that of their mean draw."
        )
    return Section("How fast the clock follows", f"{lead}.", body)


STEP_HEAD = (
    "phase",
    "first 20 ms",
    "40–60 ms",
    "80–120 ms",
    "0.2–0.4 s",
    "last 0.2 s",
    "W at most",
    "MHz at least",
)
TURN_HEAD = ("prefill / decode, ms", "layer, µs", "decode, µs", "W", "MHz")


def _steps(found: pd.DataFrame) -> list[tuple[str, ...]]:
    rows = []
    for _, part in found.groupby(["point", "phase"], sort=False):
        part = part.sort_values("elapsed_s")
        spans = ((0.0, 0.02), (0.04, 0.06), (0.08, 0.12), (0.2, 0.4), (part.elapsed_s.max() - 0.2, 1e9))
        times = [part[(part.elapsed_s >= low) & (part.elapsed_s < high)].time_s.mean() for low, high in spans]
        cells = [number(1e6 * value) for value in times]
        name = f"{_kind(part.iloc[0])}, µs"
        rows.append((name, *cells, tokens(part.power_w.max()), tokens(part.sm_mhz.min())))
    return rows


def _turns(found: pd.DataFrame) -> list[tuple[str, ...]]:
    rows = []
    for _, part in found.groupby("point", sort=False):
        work = {kind: one.iloc[0] for kind, one in part.groupby("kind")}
        if len(work) < 2:
            continue
        decode = work.pop("decode_step", None)
        other = next(iter(work.values()))
        if decode is None:
            continue
        spans = f"{1e3 * other.elapsed_s:.0f} / {1e3 * decode.elapsed_s:.0f}"
        times = (number(1e6 * other.time_s), number(1e6 * decode.time_s))
        rows.append(((other.elapsed_s, spans), *times, tokens(other.power_w), tokens(other.sm_mhz)))
    return [(first[1], *rest) for first, *rest in sorted(rows)]


def _kind(one: Any) -> str:
    batch = f" × {one.decode_batch:.0f}" if pd.notna(one.decode_batch) else ""
    layers = f", {one.layers:.0f} layers" if pd.notna(one.layers) and one.kind.endswith("step") else ""
    size = f" of {one.m:.0f}" if not batch and pd.notna(one.m) else ""
    return f"{str(one.kind).replace('_', ' ')}{batch}{size}{layers}"

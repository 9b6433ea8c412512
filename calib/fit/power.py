"""What the GPU draws (`sim.cost.energy.EnergyTerms`), fitted to single operators held for a second or two.

Whole steps, fused attention and two sides at a time are never fitted: their watts and clocks are predicted and
compared. Times are the measured ones in the fit and in the comparison, so that errors are those of watts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from calib.fit.points import Floats, read_rows
from sim.cost import load_cost
from sim.cost.energy import DRAM_J_PER_BYTE, EnergyTerms
from sim.cost.gpu import GpuSpec
from sim.cost.shapes import Launch

SWEEPS = ("power", "power_mix")
SINGLE = (
    "gemm",
    "lm_head",
    "prefill_attention",
    "decode_attention",
    "norm",
    "rope",
    "activation",
    "kv_write",
)
LEAST = 12
FELL = 0.985  # a clock below this share of the top one has been held down
LONG_GAP_S = 0.1
# the extra of prefill attention is of the back end that steps use; other back ends are compared, not fitted
BACKEND = "fa3"
SEARCHED_S = (0.12, 0.2)  # of a phase: where the clock has settled for now; until when it is looked at
STEP_SEEN = 0.02
# runs with pauses: least share of the time busy; mean watts, of the limit, that it leaves alone
BUSY, BELOW = 0.2, 0.95


@dataclass(frozen=True)
class Held:
    """Something held for seconds: its `kind`, measured watts and clock (share of the top one), and the work a second.

    `work`: FLOPs, FLOPs of prefill and of decode attention, HBM bytes and bytes of element-wise kernels, each a second.
    """

    kind: str
    single: bool
    watts: float
    clock: float
    work: Floats


def fit_power(run: Path, gpu: GpuSpec, max_mhz: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Terms for `profile.yaml` with a label, and errors on what was not fitted; two empty ones without measurements."""
    held = read_held(run, gpu, max_mhz)
    single = [one for one in held if one.single]
    if len(single) < LEAST:
        return {}, {}
    idle_w = idle_watts(run)
    found = _fitted(single)
    capped = [one.watts for one in single if one.clock < FELL]
    floor_w = found.pop("floor_w")
    terms = {
        "idle_w": round(min(idle_w or gpu.idle_w, floor_w), 1),
        "active_w": round(max(0.0, floor_w - (idle_w or gpu.idle_w)), 1),
        **{name: float(f"{value:.4g}") for name, value in found.items()},
        "cap_w": round(float(np.mean(capped)), 1) if capped else gpu.tdp_w,
        "slowest_clock": round(min(one.clock for one in single), 3),
    }
    if (react := reaction_s(run)) is not None:
        terms["react_s"] = react
    terms |= beyond_share(_duty(run), EnergyTerms(**terms, label=""), gpu)
    errors = held_out_errors(EnergyTerms(**terms, label=""), held)
    middle, count = errors["held_out"]["all"]["median"], errors["held_out"]["all"]["points"]
    terms["label"] = (
        f"fitted from {len(single)} runs of single operators; {count} steps, fused and side-by-side runs that "
        f"were not fitted are {100 * middle:.1f} % off at the median"
    )
    return terms, {**errors, **_pauses(run, EnergyTerms(**terms), gpu)}


def read_held(run: Path, gpu: GpuSpec, max_mhz: float) -> list[Held]:
    """Everything that was held for a second or two, two sides at a time as one."""
    made = []
    for sweep in SWEEPS:
        rows = read_rows(run, sweep)
        if not len(rows) or "elapsed_s" not in rows.columns:
            continue
        rows = rows[(rows["elapsed_s"] > 0) & rows["power_w"].notna() & rows["sm_mhz"].notna()]
        for _, part in rows.groupby("point", sort=False):
            parts = [_work(row, gpu) for row in part.to_dict("records")]
            first = part.iloc[0]
            kind = "side by side" if len(part) > 1 else str(first["kind"])
            backend = first.get("attention")
            usual = kind != "prefill_attention" or backend == BACKEND
            single = kind in (*SINGLE, "stream_read") and usual
            clock = min(1.0, float(first["sm_mhz"]) / max_mhz)
            made.append(Held(kind, single, float(first["power_w"]), clock, np.sum(parts, axis=0)))
    return made


def _work(row: Mapping[str, Any], gpu: GpuSpec) -> Floats:
    """Work a second of one side at its measured time, see `Held`."""
    kind, total = str(row["kind"]), np.zeros(5)
    if kind in SINGLE:
        total += _of(kind, row["flops"], row["bytes"])
    elif kind == "stream_read":
        total[3] = row["bytes"]
    else:
        parts = load_cost(str(row["model"]), gpu.name, "spec").solo(_launch(row)).by_operator
        for part in parts:
            if kind != "fused_attention" or part.name.endswith("_attention"):
                total += _of(part.name, part.flops, part.hbm_bytes)
    return np.asarray(total / float(row["time_s"]))


def _of(name: str, flops: float, moved: float) -> Floats:
    family = name.split("/")[0]
    element = family not in ("gemm", "lm_head", "moe", "prefill_attention", "decode_attention")
    prefill, decode = family == "prefill_attention", family == "decode_attention"
    return np.array([flops, flops * prefill, flops * decode, moved, moved * element])


def _launch(row: Mapping[str, Any]) -> Launch:
    """The launch that a row of a layer, a step or mixed attention is about."""

    def numbers(name: str) -> list[int]:
        cell = row.get(name)
        return [] if cell is None or pd.isna(cell) else [int(float(part)) for part in str(cell).split(";")]

    batch, context = row.get("decode_batch"), row.get("context_sum")
    known = batch is not None and not pd.isna(batch)
    whole = str(row["kind"]).endswith("_step")
    return Launch(
        tuple(zip(numbers("q_tokens"), numbers("history_tokens"), strict=True)),
        int(batch) if known else 0,
        int(context) if known else 0,
        layers=None if whole else (1, 2),
        graph=not numbers("q_tokens"),
    )


def _watts(terms: Mapping[str, float], held: list[Held]) -> Floats:
    """Watts of each at its measured clock."""
    work = np.array([one.work for one in held])
    clock = np.array([one.clock for one in held])
    dram = min(DRAM_J_PER_BYTE, terms["j_per_byte"])
    each = np.array(
        [
            terms["j_per_flop"],
            terms["more_per_prefill_flop"],
            terms["more_per_decode_flop"],
            terms["j_per_byte"] - dram,
            terms["more_per_element_byte"],
        ]
    )
    return np.asarray(terms["floor_w"] + dram * work[:, 3] + (work @ each) * clock ** terms["clock_power"])


START = {
    "floor_w": 150.0,
    "j_per_flop": 1.1e-12,
    "more_per_prefill_flop": 2e-13,
    "more_per_decode_flop": 5e-12,
    "j_per_byte": 9e-11,
    "more_per_element_byte": 2e-11,
    "clock_power": 1.5,
}


def _fitted(single: list[Held]) -> dict[str, float]:
    """Terms by least squares on relative errors, outliers counting less; none below zero."""
    names, start = list(START), np.array(list(START.values()))
    watts = np.array([one.watts for one in single])

    def off(scaled: Floats) -> Floats:
        return 100.0 * (_watts(dict(zip(names, scaled * start, strict=True)), single) / watts - 1.0)

    solved = least_squares(off, np.ones(len(names)), bounds=(0.0, 10.0), loss="soft_l1", f_scale=2.0)
    return dict(zip(names, (float(v) for v in solved.x * start), strict=True))


def held_out_errors(terms: EnergyTerms, held: list[Held]) -> dict[str, Any]:
    """Errors of watts (relative) and of the clock (share of the top one) by kind, and of the single operators' fit."""
    groups: dict[str, list[Held]] = {"all": [one for one in held if not one.single]}
    for one in groups["all"]:
        groups.setdefault(one.kind, []).append(one)
    return {
        "held_out": {name: _summary(terms, part, _relative) for name, part in groups.items()},
        "clock": {name: _summary(terms, part, _apart) for name, part in groups.items()},
        "fitted": {"all": _summary(terms, [one for one in held if one.single], _relative)},
    }


def predicted_watts(terms: EnergyTerms, one: Held) -> float:
    """Watts by work and time alone: the limit holds what would be more."""
    return terms.board_w(1.0, 1.0, _asked(terms, one))


def predicted_clock(terms: EnergyTerms, one: Held) -> float:
    """Clock by work and time alone, as a share of the top one."""
    return float(terms.clock(_asked(terms, one), one.work[3], 1.0))


def _asked(terms: EnergyTerms, one: Held) -> float:
    more = (terms.j_per_flop, terms.more_per_prefill_flop, terms.more_per_decode_flop)
    return float(one.work @ np.array([*more, terms.j_per_byte, terms.more_per_element_byte]))


def _relative(terms: EnergyTerms, one: Held) -> float:
    return predicted_watts(terms, one) / one.watts - 1.0


def _apart(terms: EnergyTerms, one: Held) -> float:
    return predicted_clock(terms, one) - one.clock


def _summary(
    terms: EnergyTerms, held: list[Held], off: Callable[[EnergyTerms, Held], float]
) -> dict[str, float]:
    errors = np.array([off(terms, one) for one in held])
    if not len(errors):
        return {"points": 0}
    size = np.abs(errors)
    return {
        "points": len(errors),
        "median": round(float(np.median(size)), 4),
        "p90": round(float(np.percentile(size, 90)), 4),
        "p95": round(float(np.percentile(size, 95)), 4),
        "max": round(float(size.max()), 4),
        "bias": round(float(errors.mean()), 4),
    }


def _duty(run: Path) -> pd.DataFrame:
    rows = read_rows(run, "power_duty")
    if not len(rows) or "gap_s" not in rows.columns:
        return rows.iloc[:0]
    shape = rows["kind"] + rows["decode_batch"].fillna(0).astype(int).astype(str)
    return rows.assign(shape=shape)[rows["power_w"].notna() & rows["gap_s"].notna()]


def idle_watts(run: Path) -> float | None:
    """Watts between launches: what runs with long pauses draw less what they draw while a kernel runs."""
    found = []
    for _, part in _duty(run).groupby("shape") if len(_duty(run)) else ():
        busy = part.loc[part["gap_s"].idxmin()]
        for one in part[part["gap_s"] >= LONG_GAP_S].itertuples():
            whole = one.time_s + one.gap_s
            found.append((one.power_w * whole - busy["power_w"] * one.time_s) / one.gap_s)
    return float(np.median(found)) if found else None


def told_watts(duty: pd.DataFrame, terms: EnergyTerms, gpu: GpuSpec) -> list[tuple[Any, float]]:
    """(row, watts) of runs with pauses: what a kernel draws while it runs, idle watts for the rest of the time.

    While it runs it draws what it drew without a pause, or if that was held by the limit what its work asks for at the
    top clock: the limit holds the mean of both.
    """
    found: list[tuple[Any, float]] = []
    if not len(duty):
        return found
    shape = duty["kind"] + duty["decode_batch"].fillna(0).astype(int).astype(str)
    for _, part in duty.groupby(shape):
        busy = part.loc[part["gap_s"].idxmin()]
        for _, one in part[part["gap_s"] > busy["gap_s"]].sort_values("gap_s").iterrows():
            running = float(busy["power_w"])
            if busy["sm_mhz"] < FELL * gpu.boost_mhz:
                running = float(terms.running_w(_asked_by(terms, one, gpu)))
            whole = one["time_s"] + one["gap_s"]
            told = (running * one["time_s"] + terms.idle_w * one["gap_s"]) / whole
            found.append((one, min(told, terms.cap_w)))
    return found


def _asked_by(terms: EnergyTerms, one: pd.Series, gpu: GpuSpec) -> float:
    return _asked(terms, Held("", True, 0.0, 1.0, _work(one.to_dict(), gpu)))


def beyond_share(duty: pd.DataFrame, terms: EnergyTerms, gpu: GpuSpec) -> dict[str, float]:
    """`beyond` of runs whose pauses keep the mean below the limit while their kernels ask for more."""
    found = []
    layers = duty[duty["kind"].str.endswith("_layer")] if len(duty) else duty  # steps may be of fewer layers
    for one in layers.to_dict("records"):
        share = one["time_s"] / (one["time_s"] + one["gap_s"])
        asked = terms.idle_w + terms.active_w + _asked_by(terms, pd.Series(one), gpu)
        if share >= BUSY and asked > terms.cap_w and one["power_w"] < BELOW * terms.cap_w:
            running = (one["power_w"] - (1.0 - share) * terms.idle_w) / share
            found.append((running - terms.cap_w) / (asked - terms.cap_w))
    return {"beyond": round(float(np.clip(np.median(found), 0.0, 1.0)), 3)} if found else {}


def _pauses(run: Path, terms: EnergyTerms, gpu: GpuSpec) -> dict[str, Any]:
    """Errors of `told_watts`."""
    errors = [told / one["power_w"] - 1.0 for one, told in told_watts(_duty(run), terms, gpu)]
    if not errors:
        return {}
    size = np.abs(errors)
    summary = {"points": len(errors), "median": float(np.median(size)), "p95": float(np.percentile(size, 95))}
    return {"pauses": {"all": {name: round(value, 4) for name, value in summary.items()}}}


def reaction_s(run: Path) -> float | None:
    """Seconds in which the clock follows a change of work: the area under the rest of the change of a kernel's time."""
    rows = read_rows(run, "clock_step")
    if not len(rows) or "phase" not in rows.columns:
        return None
    found = []
    for _, point in rows.groupby("point", sort=False):
        for phase, part in point.groupby("phase", sort=False):
            part = part.sort_values("elapsed_s")
            early = part[part["elapsed_s"] < SEARCHED_S[1]]
            settled = early[early["elapsed_s"] >= SEARCHED_S[0]]["time_s"]
            if phase == 0 or len(early) < 10 or not len(settled):
                continue
            left = early["time_s"].to_numpy(float) / float(settled.mean()) - 1.0
            if abs(left[0]) >= STEP_SEEN:
                found.append(float(np.trapezoid(left / left[0], early["elapsed_s"].to_numpy(float))) + 0.005)
    return round(float(np.median(found)), 3) if found else None

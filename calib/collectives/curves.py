"""From measured rows of several GPUs to the profile's `collectives.json` (`sim.cost.collectives_file` reads it).

A curve is the table of medians at the doublings and half-doublings of message sizes, read linearly between; its errors
are those on token counts drawn at random, which are in no table. Factors of what runs side by side are time over time
alone on the same SMs, as measured in one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.collectives.sizes import COLLECTIVES, grid_sizes
from calib.collectives.sweeps import TOKEN_BYTES
from calib.collectives.transfers import PUSH_CTAS
from calib.fit.folds import errors
from calib.rows import read_table
from sim.cost.collectives import Knots

LARGE_BYTES = 64 << 10  # above it the rate counts more than the latency
COMPUTE = {
    "gemm": "gemm",
    "prefill_attention": "prefill_attention",
    "decode_attention": "decode_attention",
    "stream_read": "elementwise",
}
SIDES = {"prefill_layer": "prefill", "decode_layer": "decode"}
ABOVE, DEVICE_BOUND = "random sizes above 64 KiB", "random sizes that wait for the GPUs"
HOST_BOUND = 1.15  # an eager call this much longer than a captured one waits for the host
# CTAs of our kernel; NCCL's point-to-point kernel holds as many as it has channels to a peer
HELD = {"copy": 0, "kernel": PUSH_CTAS}
GIVEN_BYTES = 2 << 20  # messages from this size on say what a stream with few SMs costs
TYPICAL_TOKENS = 2048  # of the message by which the default way of moving KV is picked
LAYERED = 32


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Timed rows (and rows of kernels) of the sweeps of several GPUs in `folder/measurements`, by sweep."""
    found = {}
    for name in (*COLLECTIVES, "kv_transfer", "collective_limits", "collective_corun", "kv_corun"):
        table = _table(folder, name)
        if "time_s" in table:
            found[name] = table[table.time_s.notna()].reset_index(drop=True)
    kernels = _table(folder, "collective_kernels")
    if "grid" in kernels:
        found["collective_kernels"] = kernels[kernels.grid.notna()].reset_index(drop=True)
    return found


def _table(folder: Path, name: str) -> pd.DataFrame:
    path = folder / "measurements" / f"{name}.csv.gz"
    if not path.is_file():
        return pd.DataFrame()
    table = read_table(path)
    for column in ("max_ctas", "sms", "piece_bytes", "host_s", "layers", "gpus"):
        if column not in table:
            table[column] = np.nan
    return table


def fit_collectives(folder: Path, run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(content of `collectives.json`, errors by curve) of a calibration's folder; None where no collective was
    measured. `run`: its `run.yaml`."""
    held = tables(folder)
    whole = int(run["gpu"]["sms"])
    made = [one for name in COLLECTIVES if name in held for one in _curves(name, held, whole)]
    if not made:
        return None
    moved, of_moved = transfers(held)
    data = {
        "curves": [curve for curve, _ in made],
        "beside": beside(held),
        "transfers": moved,
        "about": dict(run.get("group") or {}),
    }
    return data, {**{_name(curve): found for curve, found in made}, **of_moved}


def _name(curve: Mapping[str, Any]) -> str:
    return f"{curve['collective']}/{curve['launch']}-{curve['gpus']}"


def on_grid(sizes: pd.Series, grid: set[int]) -> pd.Series:
    """Which sizes the tables hold."""
    return sizes.astype("int64").isin(grid)


def _curves(
    name: str, held: Mapping[str, pd.DataFrame], whole: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(curve, its errors) of a collective, one a number of GPUs and launch."""
    grid, made = {size for size, _ in grid_sizes()}, []
    for (gpus, launch), rows in held[name].groupby(["gpus", "launch"]):
        inside = on_grid(rows.message_bytes, grid)
        knots = rows[inside].groupby("message_bytes").time_s.median()
        if launch == "eager":
            captured = held[name][(held[name].launch == "graph") & (held[name].gpus == gpus)]
            knots = host_bound(knots, captured.groupby("message_bytes").time_s.median())
        if len(knots) < 2:
            continue
        curve = {
            "collective": name,
            "gpus": int(gpus),
            "launch": str(launch),
            **_fitted(knots, rows[~inside], captured=launch == "graph"),
        }
        found = curve.pop("errors")
        if launch == "eager" and rows.host_s.notna().any():
            curve["host_s"] = float(f"{rows.host_s.median():.4g}")
        curve |= _held_sms(name, held)
        if name == "allreduce":
            given = sms_given(held, knots, int(gpus), whole)
            if given:
                curve["sms_given"] = given
        made.append((curve, found))
    return made


def host_bound(eager: pd.Series, graph: pd.Series) -> pd.Series:
    """Eager seconds as the longer of one cost a call on the host and what a graph takes: where the host is what is
    waited for, its scatter says nothing about the size."""
    both = graph.reindex(eager.index).fillna(0.0)
    waits = eager > HOST_BOUND * both
    floor = float(eager[waits].median()) if waits.any() else 0.0
    return np.maximum(both.where(both > 0, eager), floor)


def _fitted(knots: pd.Series, others: pd.DataFrame, captured: bool = True) -> dict[str, Any]:
    """Knots, standard error and held-out errors; `errors` also of large messages only, and of eager calls (not
    `captured`) that wait for the GPUs rather than for the host."""
    curve = Knots(tuple(map(float, knots.index)), tuple(map(float, knots)))
    record: dict[str, Any] = {}
    if len(others):
        predicted = curve.at(others.message_bytes.to_numpy())
        record["random sizes"] = errors(predicted, others.time_s.to_numpy())
        large = others.message_bytes.to_numpy() > LARGE_BYTES
        waits = predicted > 1.01 * knots.min()
        for name, mask in (
            (ABOVE, large),
            (DEVICE_BOUND, waits if not captured else np.zeros(0, dtype=bool)),
        ):
            if mask.any():
                record[name] = errors(predicted[mask], others.time_s.to_numpy()[mask])
    skipped = _every_other(knots) if captured else {}
    if skipped:
        record["every other size"] = skipped
    main = record.get("random sizes") or record.get("every other size") or {}
    return {
        "points": [[int(size), float(f"{seconds:.5g}")] for size, seconds in knots.items()],
        "sd": round(max(0.005, 1.4826 * float(main.get("median", 0.0))), 4),
        "measured_points": int(len(knots) + len(others)),
        "held_out": {
            "points": int(main.get("points", 0)),
            **{key: main[key] for key in ("median", "p95", "bias") if key in main},
        },
        "errors": record,
    }


def _every_other(knots: pd.Series) -> dict[str, Any]:
    """Errors at every second size, read from the others."""
    kept, left = knots.iloc[::2], knots.iloc[1::2]
    left = left[left.index <= kept.index.max()]
    if len(kept) < 2 or left.empty:
        return {}
    curve = Knots(tuple(map(float, kept.index)), tuple(map(float, kept)))
    return errors(curve.at(left.index.to_numpy(float)), left.to_numpy())


def ctas(grid: str) -> int:
    """CTAs of a grid written as 24x1x1."""
    return int(np.prod([int(part) for part in str(grid).split("x") if part]))


def _held_sms(name: str, held: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """SMs that NCCL's kernel holds: its CTAs, one an SM, by message size."""
    if "collective_kernels" not in held:
        return {}
    rows = held["collective_kernels"]
    rows = rows[(rows.kind == name) & rows.max_ctas.isna() & rows.kernel.str.contains("nccl", case=False)]
    if rows.empty:
        return {}
    found = rows.assign(ctas=rows.grid.map(ctas)).groupby("message_bytes").ctas.max()
    steps = [[int(size), int(count)] for size, count in found.items()]
    return {
        "sms": int(np.median(found)),
        "sms_by_bytes": [s for i, s in enumerate(steps) if not i or s[1] != steps[i - 1][1]],
    }


def sms_given(held: Mapping[str, pd.DataFrame], knots: pd.Series, gpus: int, whole: int) -> list[list[float]]:
    """(SMs that the stream owns, factor on the seconds), the whole GPU last."""
    if "collective_limits" not in held:
        return []
    rows = held["collective_limits"]
    rows = rows[rows.sms.notna() & (rows.gpus == gpus) & (rows.message_bytes >= GIVEN_BYTES)]
    unlimited = knots.reindex(rows.message_bytes).to_numpy()
    rows = rows.assign(factor=rows.time_s.to_numpy() / unlimited)
    rows = rows[np.isfinite(rows.factor)]
    if rows.empty:
        return []
    factors = rows.groupby("sms").factor.median()
    return [[int(sms), round(float(factor), 4)] for sms, factor in factors.items()] + [[whole, 1.0]]


def beside(held: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Factors of a collective and of single operators beside each other."""
    if "collective_corun" not in held:
        return []
    rows = held["collective_corun"]
    few = set(rows.point[rows.max_ctas.notna()])
    rows = rows[~rows.point.isin(few)]
    rows = rows.assign(factor=rows.time_s / rows.alone_s)
    mine = rows[rows.kind.isin(COMPUTE)]
    made = []
    keys = ["kind", "gpus", "neighbour_kind", "neighbour_message_bytes", "sms", "neighbour_mode"]
    for (kind, gpus, other, size, sms, mode), part in mine.groupby(keys):
        theirs = rows[
            (rows.kind == other)
            & (rows.neighbour_kind == kind)
            & (rows.message_bytes == size)
            & (rows.neighbour_sms == sms)
            & (rows.neighbour_mode == mode)
        ]
        if theirs.empty:
            continue
        factors = [max(1.0, float(one.factor.median())) for one in (theirs, part)]
        made.append(
            {
                "collective": other,
                "gpus": int(gpus),
                "bytes": int(size),
                "compute": COMPUTE[kind],
                "overlap": "shared" if mode == "streams" else "disjoint",
                "compute_sms": int(sms),
                "collective_factor": round(factors[0], 4),
                "compute_factor": round(factors[1], 4),
                "points": len(part),
                "spread": round(float(((part.p75_s - part.p25_s) / part.time_s).median()), 4),
            }
        )
    return made


def transfers(held: Mapping[str, pd.DataFrame]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(ways of moving KV, their errors): curves of one message, factors beside compute and layer after layer."""
    if "kv_transfer" not in held:
        return [], {}
    rows = held["kv_transfer"]
    rows = rows.assign(piece_bytes=rows.piece_bytes.fillna(0).astype(int))
    made, record = [], {}
    for (label, piece), part in rows[rows.layers == 1].groupby(["label", "piece_bytes"]):
        # captured where that was possible: a graph leaves out what the host takes to enqueue pieces
        launch = "graph" if (part.launch == "graph").any() else "eager"
        part = part[part.launch == launch]
        tokens = part.message_bytes // TOKEN_BYTES
        regular = (tokens.isin([2**i for i in range(4, 15)])) | (part.message_bytes >= 256 << 20)
        knots = part[regular].groupby("message_bytes").time_s.median()
        if len(knots) < 2:
            continue
        method, layout = str(label).split("/")
        way: dict[str, Any] = {"method": method, "layout": layout, "piece_bytes": int(piece), "gpus": 2}
        way |= _fitted(knots, part[~regular])
        name = f"kv_transfer/{method}-{layout}" + (f"-{piece // 1024}k" if piece else "")
        record[name] = way.pop("errors")
        way |= {"sms": HELD.get(method, _held_sms("sendrecv", held).get("sms", 0)), "default": False}
        sides = _sides(held, str(label), int(piece))
        if sides:
            way["beside"] = sides
        layered = _layered(rows, str(label), int(piece), launch, knots)
        if layered:
            way["layered"] = layered
        made.append(way)
    if made:
        default_of(made)["default"] = True
    return made, record


def default_of(ways: list[dict[str, Any]]) -> dict[str, Any]:
    """What moves scattered pages of full size soonest: engines hold their caches in pages."""
    paged = [way for way in ways if way["layout"] == "blocks"]
    largest = max((way["piece_bytes"] for way in paged), default=0)
    paged = [way for way in paged if way["piece_bytes"] == largest] or ways

    def seconds(way: Mapping[str, Any]) -> float:
        sizes, times = zip(*way["points"], strict=True)
        return float(Knots(tuple(sizes), tuple(times)).at(TYPICAL_TOKENS * TOKEN_BYTES))

    return min(paged, key=seconds)


def _sides(held: Mapping[str, pd.DataFrame], label: str, piece: int) -> dict[str, Any]:
    if "kv_corun" not in held:
        return {}
    rows = held["kv_corun"]
    rows = rows.assign(factor=rows.time_s / rows.alone_s, piece_bytes=rows.piece_bytes.fillna(0))
    found = {}
    for kind, side in SIDES.items():
        moved = rows[(rows.label == label) & (rows.piece_bytes == piece) & (rows.neighbour_kind == kind)]
        computed = rows[(rows.kind == kind) & (rows.neighbour_label == label)]
        if "point" in rows:
            computed = computed[computed.point.isin(moved.point)]
        if len(moved) and len(computed):
            found[side] = {
                "transfer_factor": round(max(1.0, float(moved.factor.median())), 4),
                "compute_factor": round(max(1.0, float(computed.factor.median())), 4),
                "points": len(moved),
            }
    return found


def _layered(rows: pd.DataFrame, label: str, piece: int, launch: str, knots: pd.Series) -> dict[str, Any]:
    found = rows[
        (rows.label == label)
        & (rows.piece_bytes == piece)
        & (rows.layers == LAYERED)
        & (rows.launch == launch)
    ]
    if found.empty:
        return {}
    curve = Knots(tuple(map(float, knots.index)), tuple(map(float, knots)))
    factor = found.time_s.to_numpy() / (LAYERED * curve.at(found.message_bytes.to_numpy()))
    return {"layers": LAYERED, "factor": round(float(np.median(factor)), 4), "points": len(found)}


def coverage(data: Mapping[str, Any]) -> str:
    """What was measured, as a sentence."""
    curves = data["curves"]
    names = ", ".join(dict.fromkeys(curve["collective"] for curve in curves))
    gpus = ", ".join(sorted({str(curve["gpus"]) for curve in curves}))
    low = min(curve["points"][0][0] for curve in curves)
    high = max(curve["points"][-1][0] for curve in curves)
    moved = ", ".join(dict.fromkeys(f"{way['method']} {way['layout']}" for way in data["transfers"]))
    text = f"{names} of {gpus} GPUs, {low / 1024:g} KiB to {high / 2**20:g} MiB, graph and eager"
    return f"{text}; KV transfers: {moved}" if moved else text

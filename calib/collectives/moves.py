"""Ways of moving KV from one GPU to the next: their curves, and what they and compute do to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from calib.collectives.factors import held_sms, slowed
from calib.collectives.knots import curve_of, elsewhere, fitted
from calib.collectives.sweeps import TOKEN_BYTES
from calib.collectives.transfers import PUSH_CTAS
from sim.cost.collectives import Knots

SIDES = {"prefill_layer": "prefill", "decode_layer": "decode"}
# CTAs of our kernel; NCCL's point-to-point kernel holds as many as it has channels to a peer
HELD = {"copy": 0, "kernel": PUSH_CTAS}
TYPICAL_TOKENS = 2048  # of the message by which the default way of moving KV is picked
LAYERED = 32


def transfers(
    held: Mapping[str, pd.DataFrame], others: Mapping[str, Mapping[str, pd.DataFrame]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(ways of moving KV, their errors): curves of one message, factors beside compute and layer after layer.

    `others`: tables of runs of their own, by name, which only the errors see."""
    if "kv_transfer" not in held:
        return [], {}
    rows = _single(held["kv_transfer"])
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
        way |= fitted(knots, part[~regular])
        name = f"kv_transfer/{method}-{layout}" + (f"-{piece // 1024}k" if piece else "")
        record[name] = way.pop("errors")
        for run, found in others.items():
            same = _single(found.get("kv_transfer", rows.iloc[:0]))
            same = same[(same.label == label) & (same.piece_bytes == piece) & (same.launch == launch)]
            record[name] |= elsewhere(knots, same[same.layers == 1], run)
        way |= {"sms": HELD.get(method, held_sms("sendrecv", held).get("sms", 0)), "default": False}
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


def _single(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with 0 for the pieces of a cache in one piece."""
    return rows.assign(piece_bytes=rows.piece_bytes.fillna(0).astype(int))


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
    rows = slowed(_single(held["kv_corun"]))
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
    factor = found.time_s.to_numpy() / (LAYERED * curve_of(knots).at(found.message_bytes.to_numpy()))
    return {"layers": LAYERED, "factor": round(float(np.median(factor)), 4), "points": len(found)}

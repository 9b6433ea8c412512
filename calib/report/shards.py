"""A 70B on two GPUs: layers and steps as measured, as the simulator predicts them, and as their parts add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calib.report.data import Profile
from calib.report.text import Section, ms, percent, ratio, table, us
from sim.cost.gpu import load_gpu
from sim.cost.measured_predict import Predictor
from sim.cost.profile import load_folder
from sim.errors import SimctlError

MODEL = "llama-3.1-70b"
FEW = 128  # rows of a decode batch


def tensor_parallel(profile: Profile) -> Section | None:
    """Measured against predicted, with and without what joins the shards."""
    found = profile.timed("tp_steps")
    if found.empty or "allreduces" not in found:
        return None
    whole = found[found.kind.isin(("prefill_step", "decode_step"))]
    rows = [_row(profile, of, whole) for _, of in whole[whole.allreduces == 1].iterrows()]
    rows = [row for row in rows if row]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["step"], row["launch"]))
    gpus = int(whole.gpus.max())
    lead = f"Steps of {MODEL} on {gpus} GPUs, measured whole with random weights, against the simulator"
    lead += "".join(_scored(launch, _known(rows, launch)) for launch in ("graph", "eager")) + "."
    head = (
        "step",
        "launch",
        "measured ms",
        "predicted ms",
        "error",
        "without joins ms",
        "joins, share",
        "MHz",
    )
    cells = [
        (
            row["step"],
            row["launch"],
            ms(row["seconds"]),
            ms(row["predicted"]),
            percent(row["error"], 1),
            ms(row["apart"]),
            percent(row["share"]),
            f"{row['mhz']:.0f}" if np.isfinite(row["mhz"]) else "–",
        )
        for row in rows
    ]
    body = [table(head, cells, 2), _layers(profile, found), _operators(profile)]
    body.append(
        "Each GPU held half of every layer (32 query and 4 KV heads, half the MLP's columns, half the vocabulary); "
        "all-reduces behind the attention and the MLP of each layer and behind the embedding, logits gathered before "
        "sampling, by NCCL. Without joins: the same kernels with no GPU waiting for the other. A step's time is the "
        "slower rank's, from a common barrier on; predictions are the shipped profile's for tp 2. One layer's result "
        "was compared with float32."
    )
    return Section("A 70B model on two GPUs", lead, [b for b in body if b])


def _scored(launch: str, known: pd.Series) -> str:
    """A clause of errors."""
    if known.empty:
        return ""
    size = known.abs()
    return (
        f"; {launch}: median error {percent(size.median(), 1)} (largest {percent(size.max(), 1)}, bias "
        f"{percent(known.mean(), 1)}, n = {len(known)})"
    )


def _known(rows: list[dict[str, Any]], launch: str) -> pd.Series:
    """Errors of the steps that were predicted."""
    return pd.Series(
        [row["error"] for row in rows if row["launch"] == launch and np.isfinite(row["error"])], dtype=float
    )


def _predictor(profile: Profile) -> Predictor | None:
    held = profile.__dict__.get("_predictor")
    if held is None and profile.folder is not None and (profile.folder / "profile.yaml").exists():
        try:
            gpu = load_gpu(_gpu_of(profile.folder))
            held = Predictor(load_folder(profile.folder, gpu), MODEL)
        except SimctlError:
            return None
        profile.__dict__["_predictor"] = held
    return held


def _gpu_of(folder: Path) -> str:
    from sim.cost.profile_schema import read_yaml

    return str(read_yaml(folder)["gpu"])


def shape_of(row: pd.Series) -> dict[str, str]:
    """The columns of a prediction's row."""
    asked = {"kind": "step", "model": MODEL, "launch": str(row.launch), "tp": str(int(row.gpus))}
    if str(row.kind).startswith("prefill"):
        asked |= {"prefill_tokens": str(row.q_tokens), "history_tokens": str(row.history_tokens)}
    else:
        asked["decode_contexts"] = ";".join([str(int(row.context_max))] * int(row.decode_batch))
    return asked


def _row(profile: Profile, of: pd.Series, whole: pd.DataFrame) -> dict[str, Any]:
    predictor = _predictor(profile)
    seconds, predicted = float(of.time_s), float("nan")
    if predictor is not None:
        answer = predictor.answer(shape_of(of), "tp_steps")
        predicted = float(answer.step_s or np.nan)
    same = whole[(whole.allreduces == 0) & (whole.launch == of.launch) & (whole.kind == of.kind)]
    for name in ("q_tokens", "history_tokens", "decode_batch", "context_max"):
        if of[name] == of[name]:
            same = same[same[name] == of[name]]
    apart = float(same.time_s.median()) if len(same) else float("nan")
    return {
        "step": _named(of),
        "launch": str(of.launch),
        "seconds": seconds,
        "predicted": predicted,
        "error": predicted / seconds - 1.0,
        "apart": apart,
        "share": 1.0 - apart / seconds,
        "mhz": float(of.sm_mhz) if of.sm_mhz == of.sm_mhz else float("nan"),
    }


def _named(of: pd.Series) -> str:
    if str(of.kind).startswith("prefill"):
        history = int(float(of.history_tokens))
        return f"prefill {int(float(of.q_tokens)):5d}" + (f" on {history}" if history else "")
    return f"decode {int(of.decode_batch):3d} × {int(of.context_max)}"


def _layers(profile: Profile, found: pd.DataFrame) -> str:
    """Layers with and without all-reduces; what two all-reduces of that size cost on their own."""
    layers = found[found.kind.isin(("prefill_layer", "decode_layer")) & (found.launch == "graph")]
    alone = profile.timed("allreduce")
    if layers.empty or alone.empty:
        return ""
    curve = alone[alone.launch == "graph"].groupby("message_bytes").time_s.median()
    rows = []
    for _, of in layers[layers.allreduces == 1].iterrows():
        other = layers[(layers.allreduces == 0) & (layers.kind == of.kind) & (layers.m == of.m)]
        for name in ("history_tokens", "context_max"):
            if of[name] == of[name]:
                other = other[other[name] == of[name]]
        if other.empty:
            continue
        apart, joined = float(other.time_s.median()), float(of.time_s)
        reduce_s = float(np.interp(float(of.m) * 8192 * 2, curve.index.to_numpy(float), curve.to_numpy()))
        cells = (ms(joined), ms(apart), ms(joined - apart), ms(2 * reduce_s))
        rows.append((_named(of), *cells, ratio((joined - apart) / (2 * reduce_s))))
    if not rows:
        return ""
    head = ("layer", "with ms", "without ms", "difference ms", "two all-reduces alone ms", "ratio")
    return "One layer in a CUDA graph:\n\n" + table(head, sorted(rows)) + _in_steps(profile, found)


def _in_steps(profile: Profile, found: pd.DataFrame) -> str:
    """What the curve of all-reduces says of passes."""
    predictor, gpus = _predictor(profile), int(found.gpus.max())
    source = None if predictor is None else predictor.profile.collectives
    if source is None:
        return ""
    graph, eager = (source.find("allreduce", gpus, launch) for launch in ("graph", "eager"))
    told = []
    if graph is not None and graph.in_step_s:
        told.append(
            f"Within a captured decode step an all-reduce costs {us(graph.in_step_s)} µs more than in a row of "
            "all-reduces (the GPUs wait for each other, and unlike kernels follow each other; fitted to these steps)"
        )
    if eager is not None and eager.host_s:
        told.append(f"an eager one costs the host {us(eager.host_s)} µs")
    return "\n\n" + "; ".join(told) + "." if told else ""


def _operators(profile: Profile) -> str:
    """The shard's operators alone against the curves: where an error of a step comes from."""
    found, predictor = profile.timed("tp_operators"), _predictor(profile)
    if found.empty or predictor is None:
        return ""
    found["error"] = [_error(predictor, of) for _, of in found.iterrows()]
    found = found[found.error.notna()]
    rows = []
    for kind, of in found.groupby("kind"):
        for label, part in of.groupby("label") if kind == "gemm" else [("", of)]:
            small, large = part[part.m <= FEW], part[part.m > FEW]
            cells = [
                percent(value, 1)
                for some in (small, large)
                for value in ((some.error.abs().median(), some.error.mean()) if len(some) else (np.nan,) * 2)
            ]
            rows.append((f"{str(kind).replace('_', ' ')} {label}".strip(), len(part), *cells))
    head = ("operator", "n", f"median, to {FEW} rows", "bias", f"median, above {FEW} rows", "bias")
    return "Operators of the shard measured alone, the shipped curves against them:\n\n" + table(head, rows)


def _error(predictor: Predictor, of: pd.Series) -> float:
    """Predicted over measured, less one; NaN for what `predict` has no kind for."""
    asked = {"kind": str(of.kind), "model": MODEL, "tp": str(int(of.gpus))}
    if of.kind in ("gemm", "lm_head"):
        asked |= {"kind": "gemm", **{name: str(int(of[name])) for name in ("m", "n", "k")}}
    elif of.kind == "prefill_attention":
        asked |= {"prefill_tokens": str(of.q_tokens), "history_tokens": str(of.history_tokens)}
    elif of.kind == "decode_attention":
        asked["decode_contexts"] = ";".join([str(int(of.context_max))] * int(of.decode_batch))
    else:
        return float("nan")
    answer = predictor.answer(asked, "tp_operators")
    return float("nan") if answer.gpu_s is None else answer.gpu_s / float(of.time_s) - 1.0

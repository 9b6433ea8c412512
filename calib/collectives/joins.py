"""What an all-reduce costs inside a whole step beyond its curve: the GPUs wait for each other, and kernels change.

Steps of a shard were timed with and without what joins the shards; the difference, less the gathering of logits,
divided by the all-reduces of a step, is a call inside a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from calib.collectives.knots import curve_of
from calib.fit.folds import errors
from calib.models import model_shape

SHAPE = ["kind", "gpus", "model", "m", "decode_batch", "context_max", "layers"]
DTYPE_BYTES = 2
IN_STEPS = "calls inside steps, other batches"


def calls_in_steps(steps: pd.DataFrame, launch: str, gpus: int) -> pd.DataFrame:
    """Decode steps of a group: `call_s` seconds (of the host where eager, in `host_call_s`) of one all-reduce of
    `message_bytes`, gathering included as one more call of `calls`."""
    steps = steps.reindex(columns=[*dict.fromkeys([*SHAPE, "launch", "allreduces", "time_s", "host_s"])])
    found = steps[(steps.launch == launch) & (steps.gpus == gpus) & (steps.kind == "decode_step")]
    times = ["time_s", "host_s"]
    joined = found[found.allreduces == 1].groupby(SHAPE)[times].median()
    apart = found[found.allreduces == 0].groupby(SHAPE)[times].median()
    both = joined.join(apart.add_suffix("_apart"), how="inner").reset_index()
    hidden = both.model.map(lambda name: model_shape(name).hidden) if len(both) else both.m
    vocab = both.model.map(lambda name: model_shape(name).vocab) if len(both) else both.m
    reduces = 2 * both.layers + 1
    return both.assign(
        calls=reduces,
        message_bytes=both.m * hidden * DTYPE_BYTES,
        logits_bytes=both.m * vocab * gpus * DTYPE_BYTES,
        difference_s=both.time_s - both.time_s_apart,
        host_call_s=(both.host_s - both.host_s_apart) / (reduces + 1),
    )


def in_step(held: Mapping[str, pd.DataFrame], knots: pd.Series, gpus: int) -> tuple[float, dict[str, Any]]:
    """(seconds that a captured all-reduce costs inside a step on top of its curve, errors of the cost of a call with
    the term of the other batches); zero without measured steps."""
    gathers = held.get("allgather", pd.DataFrame())
    if "tp_steps" not in held or gathers.empty:
        return 0.0, {}
    steps = calls_in_steps(held["tp_steps"], "graph", gpus)
    if len(steps) < 2:
        return 0.0, {}
    gather = curve_of(gathers[gathers.launch == "graph"].groupby("message_bytes").time_s.median())
    call = (steps.difference_s - gather.at(steps.logits_bytes.to_numpy(float))) / steps.calls
    alone = pd.Series(curve_of(knots).at(steps.message_bytes.to_numpy(float)), index=steps.index)
    extra = call - alone
    others = [max(0.0, float(extra[steps.decode_batch != batch].median())) for batch in steps.decode_batch]
    predicted = alone.to_numpy() + np.array(others)
    return max(0.0, float(extra.median())), {IN_STEPS: errors(predicted, call.to_numpy())}


def host_in_step(held: Mapping[str, pd.DataFrame], gpus: int) -> float | None:
    """Host seconds that an eager call costs inside a step, where that was measured."""
    if "tp_steps" not in held:
        return None
    steps = calls_in_steps(held["tp_steps"], "eager", gpus)
    found = float(steps.host_call_s.median()) if len(steps) else float("nan")
    return found if np.isfinite(found) and found > 0 else None

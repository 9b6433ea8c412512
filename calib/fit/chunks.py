"""Several prefill chunks in one launch: what each chunk after the first costs less than a launch of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from calib.fit.folds import errors
from calib.fit.methods import FittedCurve
from calib.fit.points import Floats, Points, column, numbers
from sim.cost.gpu import GpuSpec
from sim.cost.measured import Key
from sim.cost.shapes import PrefillAttention


def chunked_rows(rows: pd.DataFrame, backend: str) -> list[tuple[list[int], list[int], int, float]]:
    """(new tokens, histories, SMs, seconds) of the launches of several chunks of one back end."""
    if not len(rows):
        return []
    mine = rows[(rows["kind"] == "prefill_attention") & (rows["attention"] == backend)].reset_index(drop=True)
    found = []
    for q, h, sms, seconds in zip(
        mine["q_tokens"], mine["history_tokens"], column(mine, "sms"), column(mine, "time_s"), strict=True
    ):
        if len(numbers(q)) > 1:
            found.append((numbers(q), numbers(h), int(sms), float(seconds)))
    return found


def fit_shared(
    launches: list[tuple[list[int], list[int], int, float]], fitted: FittedCurve, points: Points, gpu: GpuSpec
) -> tuple[FittedCurve, dict[str, dict[str, Any]]]:
    """The curve with its `shared_s`, and the errors on the launches: chunks added up less `shared_s`, and by work.

    By work: the longest chunk, or the SM-seconds of all over the SMs, whichever is more.
    """
    key: Key = points.keys[0]
    alone, works, counts, measured = [], [], [], []
    for q, h, sms, seconds in launches:
        shape = PrefillAttention(np.array(q), np.array(h), key[0], key[1], key[2], key[3], None)
        timing = fitted.curve.timing(shape, sms)
        fixed = min(fitted.curve.form.fixed_s(shape), float(timing.seconds.min()))
        work = np.minimum(timing.sm_s / sms, timing.seconds - fixed)
        alone.append(float(timing.seconds.sum()))
        works.append(fixed + max(float(timing.seconds.max()) - fixed, float(work.sum())))
        counts.append(len(q))
        measured.append(seconds)
    total, extra = np.array(alone), np.array(counts) - 1.0
    truth: Floats = np.array(measured)
    # no chunk may come out free: the shared part is at most the shortest call
    most = float(points.seconds.min())
    tried = np.linspace(0.0, most, 41)
    losses = [float(np.mean(np.abs(np.log((total - extra * one) / truth)))) for one in tried]
    shared = float(tried[int(np.argmin(losses))])
    table = {
        "added up": errors(total - extra * shared, truth),
        "by work": errors(np.array(works), truth),
    }
    return FittedCurve(replace(fitted.curve, shared_s=shared), fitted.form), table

"""Runs of two-lane policies that predict: one load, its numbers in the words that knobs use, and the laws of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from knob_frame import Moves
from stub_cost import real_cost
from workloads import workload

from sim.engine import RunRecords, simulate
from sim.metrics.conservation import check_conservation
from sim.policies import make_policy
from sim.workload.workload import Workload


def busy_load(n: int = 160, rate: float = 25.0, seed: int = 3) -> Workload:
    """Requests of a chat with some long prompts, faster than a GPU of the data sheet serves them."""
    rng = np.random.default_rng(seed)
    return workload(
        np.cumsum(rng.exponential(1 / rate, n)).tolist(),
        np.minimum(6000, rng.lognormal(7.2, 0.8, n)).astype(int).clip(50).tolist(),
        rng.integers(10, 250, n).tolist(),
    )


def lane(records: RunRecords, number: int) -> pd.DataFrame:
    """Steps of one lane in order."""
    assert records.steps is not None
    return records.steps[records.steps["lane"] == number].reset_index(drop=True)


def metrics(records: RunRecords) -> dict[str, float]:
    """What happened; times in seconds."""
    frame = records.requests
    prefill, decode = lane(records, 0), lane(records, 1)
    ttft = frame["first_token_s"] - frame["arrival_s"]
    several = frame["output_tokens"] > 1
    tpot = (frame["finish_s"] - frame["first_token_s"])[several] / (frame["output_tokens"][several] - 1)
    beside = decode[decode["sms"] < decode["sms"].max()] if len(decode) else decode
    long = frame["prompt_tokens"] >= frame["prompt_tokens"].quantile(0.75)
    return {
        "mean_ttft": float(ttft.mean()),
        "long_ttft": float(ttft[long].mean()),
        "worst_ttft": float(ttft.max()),
        "mean_tpot": float(tpot.mean()),
        "max_itl": float(frame["max_itl_s"].max()),
        "served": float((frame["status"] == "finished").sum()),
        "preemptions": float(frame["preemptions"].sum()),
        "largest_batch": float(decode["decode_batch"].max()),
        "largest_prefill": float(prefill["prefill_tokens"].max()),
        "tokens_of_several": float(prefill.loc[prefill["chunks"] > 1, "prefill_tokens"].max()),
        "most_layers": float(prefill["layers"].max()),
        "prefill_sms": float(np.average(prefill["sms"], weights=prefill["end_s"] - prefill["start_s"])),
        "decode_sms": float(np.average(decode["sms"], weights=decode["end_s"] - decode["start_s"])),
        "decode_sms_beside": float(beside["sms"].mean()) if len(beside) else 0.0,
        "decode_sizes": float(decode["sms"].nunique()),
        "last_prefill_sms": float(prefill["sms"].iloc[-1]),
        "changes": float((decode["sms"].diff().fillna(0) != 0).sum()),
        "first_change_s": float(decode.loc[decode["sms"] != decode["sms"].iloc[0], "start_s"].min()),
        "split_passes": float((prefill["reason"] == 1).sum()),
        "mixed_passes": float(((prefill["chunks"] > 0) & (prefill["decode_batch"] > 0)).sum()),
        "kv_tokens_held": records.totals["kv_block_s"] * records.block_size / records.end_s,
    }


@lru_cache(maxsize=64)
def _outcome(entry: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> dict[str, float]:
    settings = {"jitter": False, "record_steps": True, "estimator": "oracle", **dict(options)}
    load = settings.pop("load", None) or busy_load()
    return metrics(simulate(load, make_policy(dict(entry)), real_cost(), **settings))


def check_move(row: Moves, **options: Any) -> None:
    """Run with and without the change that the row names; `options` of the run."""
    entry = {"name": row.policy, **row.given}
    changed = {**entry, row.knob: row.value}
    before, after = (_outcome(tuple(one.items()), tuple(options.items())) for one in (entry, changed))
    change = after[row.metric] - before[row.metric]
    assert change * row.direction > 0, f"{row}: {row.metric} goes from {before[row.metric]} by {change}"


def check_laws(records: RunRecords) -> None:
    """Everybody is served, nothing is lost, and a lane runs one thing at a time."""
    check_conservation(records)
    assert (records.requests["status"] == "finished").all()
    steps, frame = records.steps, records.requests
    assert steps is not None
    for _, mine in steps.groupby(["replica", "lane"]):
        assert (mine["start_s"].to_numpy()[1:] >= mine["end_s"].to_numpy()[:-1]).all()
    if frame["preemptions"].sum() == 0:
        # a member that is done may stay in a chain of steps
        assert steps["decode_batch"].sum() >= (frame["output_tokens"] - 1).sum()
        layers = real_cost().model.layers
        whole = (steps["prefill_tokens"] * steps["layers"]).sum() / layers
        assert whole == frame["prompt_tokens"].sum()

"""Laws that every finished run obeys; a breach is a fault of the simulator, never of the user's input."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sim.engine.records import STATUS_NAMES, RunRecords

RELATIVE = 1e-6


class ConservationError(RuntimeError):
    """The records of a run contradict each other."""


def queueing_integrals(records: RunRecords) -> dict[str, tuple[float, float]]:
    """Little's law as pairs (integral over time, sum over requests), which must agree; request-seconds.

    "system": the time integrals of the waiting and running counts, and of those between two replicas, against the sum
    of the times spent in the system. "waiting": the integral of the queue's length against the sum of waits, given
    only for a run without preemption or change of replica, after which a request waits again. Requests still inside
    at the end count up to the end.
    """
    requests = records.requests
    inside = (requests["status"] != "rejected") & (requests["replica"] >= 0)
    arrival = requests.loc[inside, "arrival_s"].to_numpy(np.float64)
    leaves = requests.loc[inside, "finish_s"].fillna(records.end_s).to_numpy(np.float64)
    started = requests.loc[inside, "first_scheduled_s"].fillna(records.end_s).to_numpy(np.float64)
    totals = records.totals
    present = totals["waiting_s"] + totals["running_s"] + totals.get("handover_s", 0.0)
    pairs = {"system": (present, float(np.sum(leaves - arrival)))}
    if requests["preemptions"].sum() == 0 and not records.pools:
        pairs["waiting"] = (totals["waiting_s"], float(np.sum(started - arrival)))
    return pairs


def check_conservation(records: RunRecords) -> None:
    """Raise ConservationError unless requests, tokens, times and queue integrals add up."""
    requests = records.requests
    status = requests["status"].to_numpy()
    if not np.isin(status, STATUS_NAMES).all():
        raise ConservationError("a request ended in no known state")
    finished = status == "finished"
    if (requests["generated_tokens"] != requests["output_tokens"]).to_numpy()[finished].any():
        raise ConservationError("a finished request has not produced exactly its output tokens")
    if (requests["finish_s"].isna().to_numpy() == finished).any():
        raise ConservationError("finish times and states disagree")
    _check_order(records)
    tokens = int(requests["generated_tokens"].sum())
    logged = int(requests["first_token_s"].notna().sum() + records.itl_count.sum())
    if tokens != logged:
        raise ConservationError(f"requests hold {tokens} tokens, but {logged} were logged")
    for law, (integral, total) in queueing_integrals(records).items():
        if abs(integral - total) > RELATIVE * max(abs(total), records.end_s, 1.0):
            raise ConservationError(f"Little's law ({law}): integral {integral}, sum over requests {total}")


def _check_order(records: RunRecords) -> None:
    stamps = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
    for before, after in pairwise(stamps):
        gap = records.requests[after].to_numpy(np.float64) - records.requests[before].to_numpy(np.float64)
        if np.any(gap < 0):
            raise ConservationError(f"{after} before {before}")
    latest = records.requests["finish_s"].max()
    if latest > records.end_s:
        raise ConservationError(f"a request finished at {latest} s, after the end at {records.end_s} s")

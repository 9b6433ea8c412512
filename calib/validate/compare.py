"""Real against simulated: every step in replay, the distributions in open mode, and the order of the policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calib.validate.files import finished, read_case
from calib.validate.hosts import with_hosts
from calib.validate.replay import DECODE_PRIORITY, Replay, shapes_of
from sim.config.schema import Experiment
from sim.cost.profiled import ProfiledCost
from sim.engine import simulate
from sim.engine.deployment import Deployment
from sim.metrics import Slo, summarise
from sim.policies import make_policy
from sim.study.plan import target_of
from sim.workload.workload import Workload

# metric -> key of a run's summary and its factor to the metric's unit
METRICS: dict[str, tuple[str, float]] = {
    "ttft_p50_s": ("median_ttft_ms", 1e-3),
    "ttft_p90_s": ("p90_ttft_ms", 1e-3),
    "tpot_p50_s": ("median_tpot_ms", 1e-3),
    "tpot_p90_s": ("p90_tpot_ms", 1e-3),
    "itl_p99_s": ("p99_itl_ms", 1e-3),
    "e2el_p50_s": ("median_e2el_ms", 1e-3),
    "e2el_p90_s": ("p90_e2el_ms", 1e-3),
    "request_throughput": ("request_throughput", 1.0),
    "output_throughput": ("output_throughput", 1.0),
    "energy_j": ("energy_j", 1.0),
}


@dataclass(frozen=True)
class Group:
    """The repeats of one policy at one load: names of the cases, facts, and what both sides say. `gpu_*`: the GPU's
    seconds of each launch by themselves; `cards`: how many GPUs the repeats ran on; `study`: whose cases they are;
    `rate`: requests offered a second, by which `load` is a share of what the policy was predicted to do."""

    policy: str
    load: float
    mode: str
    names: tuple[str, ...]
    real: tuple[dict[str, Any], ...]
    simulated: dict[str, Any]
    real_requests: pd.DataFrame
    simulated_requests: pd.DataFrame
    step_real_s: NDArray[np.float64]
    step_simulated_s: NDArray[np.float64]
    steps: pd.DataFrame
    gpu_real_s: NDArray[np.float64]
    gpu_simulated_s: NDArray[np.float64]
    cards: int = 1
    study: str = ""
    rate: float = 0.0


def groups_of(e: Experiment, folder: Path, cost: ProfiledCost, study: str = "") -> list[Group]:
    """Replay and simulate what was measured."""
    cases: dict[tuple[str, float, str], list[str]] = {}
    for name in finished(folder):
        facts, _, _ = read_case(folder, name)
        if facts["mode"] in ("open", "load_step"):
            cases.setdefault((facts["policy"], facts["load"], facts["mode"]), []).append(name)
    return [_group(e, folder, cost, key, names, study) for key, names in cases.items()]


def _group(
    e: Experiment,
    folder: Path,
    cost: ProfiledCost,
    key: tuple[str, float, str],
    names: list[str],
    study: str,
) -> Group:
    read = [read_case(folder, name) for name in names]
    facts, _, requests = read[0]
    policy = make_policy(facts["entry"])
    cost = with_hosts(cost, folder, policy.lanes)
    logs, predicted, on_gpu = [], [], []
    for _, steps, _ in read:
        shapes = shapes_of(steps)
        logs.append(steps)
        whole, gpu = Replay(cost, shapes, policy.attention(deployment_of(cost, facts))).seconds(shapes)
        predicted.append(whole)
        on_gpu.append(gpu)
    all_steps = pd.concat(logs, ignore_index=True)
    summary, ours = simulated(e, facts, requests, cost)
    return Group(
        *key,
        tuple(names),
        tuple({**f["summary"], "energy_j": f["energy_j"]} for f, _, _ in read),
        summary,
        requests,
        ours,
        (all_steps["end_s"] - all_steps["start_s"]).to_numpy(np.float64),
        np.concatenate(predicted),
        all_steps,
        *_on_gpu(all_steps, np.concatenate(on_gpu)),
        len({f["gpu"].get("uuid", "") for f, _, _ in read}),
        study,
        float(facts["request_rate"]),
    )


def _on_gpu(steps: pd.DataFrame, predicted: NDArray[np.float64]) -> tuple[Any, Any]:
    """Measured and predicted GPU seconds; nothing of a dry run."""
    if "gpu_s" not in steps.columns:
        return np.zeros(0), np.zeros(0)
    return steps["gpu_s"].to_numpy(np.float64), predicted


def deployment_of(cost: ProfiledCost, facts: Mapping[str, Any]) -> Deployment:
    """What the executor offered the policy, as far as its kind of attention may depend on it."""
    blocks, gpu = int(facts["num_gpu_blocks"]), cost.gpu
    return Deployment(blocks, 16, cost.model.max_context, gpu.name, gpu.sms, cost.model.layers)


def workload_from(requests: pd.DataFrame) -> Workload:
    """The requests of a measured case: what they asked for, when they came."""
    zero = np.zeros(len(requests), np.int16)
    output = requests["output_tokens"].to_numpy(np.int32)
    return Workload(
        name="measured case",
        arrival_s=requests["arrival_s"].to_numpy(np.float64),
        prompt_tokens=requests["prompt_tokens"].to_numpy(np.int32),
        output_tokens=output,
        max_new_tokens=output,
        slo_class=zero,
        priority=zero,
    )


def as_run(entry: Any) -> Any:
    """A policy's entry with the stream that the executor gave its decodes."""
    if "decode_stream" not in make_policy(entry).knobs:
        return entry
    given = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    return {**given, "decode_stream": DECODE_PRIORITY}


def simulated(
    e: Experiment, facts: Mapping[str, Any], requests: pd.DataFrame, cost: ProfiledCost
) -> tuple[dict[str, Any], pd.DataFrame]:
    """The simulator's own run of the case, by its own clock."""
    slo = Slo(**e.slo.model_dump(exclude={"classes"}))
    records = simulate(
        workload_from(requests),
        make_policy(as_run(facts["entry"])),
        cost,
        num_gpu_blocks=int(facts["num_gpu_blocks"]),
        block_size=16,
        seed=int(facts["seed"]),
        jitter=e.jitter,
        estimator=e.belief(),
        mechanism=e.mechanism,
        targets=(target_of(e.slo),),
    )
    summary = summarise(
        records,
        slo=slo,
        cost=cost,
        policy_label=facts["policy"],
        request_rate=facts["request_rate"],
        seed=int(facts["seed"]),
    )
    return summary, records.requests


def rows_of(groups: list[Group]) -> list[dict[str, Any]]:
    """The rows of `fidelity.json`: per policy and load, replay errors and one row a metric of open mode."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        where = {"study": group.study, "policy": group.policy, "load": group.load}
        rows += [{**where, "mode": "replay", **row} for row in _replay_rows(group)]
        for metric, (key, scale) in METRICS.items():
            real = [run[key] for run in group.real if run.get(key) is not None]
            ours = group.simulated.get(key)
            if not real or ours is None:
                continue
            mean = float(np.mean(real))
            rows.append(
                {
                    **where,
                    "mode": group.mode,
                    "metric": metric,
                    "real": _short(mean * scale),
                    "simulated": _short(ours * scale),
                    "error": _short(ours / mean - 1.0, 4),
                    "real_spread": _short((max(real) - min(real)) / mean, 4) if len(real) > 1 else None,
                }
            )
    return rows


def _replay_rows(group: Group) -> list[dict[str, Any]]:
    rows = []
    for metric, ours, real in (
        ("step_s", group.step_simulated_s, group.step_real_s),
        ("gpu_s", group.gpu_simulated_s, group.gpu_real_s),
    ):
        if not len(real):
            continue
        off = np.abs(ours / real - 1.0)
        base = {
            "real": _short(float(np.median(real))),
            "simulated": _short(float(np.median(ours))),
            "steps": len(off),
            "of": group.mode,
            "real_spread": None,
        }
        rows.append({"metric": metric, **base, "error": _short(float(np.median(off)), 4)})
        rows.append({"metric": f"{metric}_p95", **base, "error": _short(float(np.percentile(off, 95)), 4)})
    return rows


def _short(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def ranking(groups: list[Group]) -> list[dict[str, Any]]:
    """Per load and metric: the policies from best to worst, real and simulated."""
    found = []
    for mode, load in dict.fromkeys((group.mode, group.load) for group in groups):
        here = [g for g in groups if (g.mode, g.load) == (mode, load)]
        for metric in ("ttft_p50_s", "tpot_p50_s", "itl_p99_s", "e2el_p50_s"):
            key, _ = METRICS[metric]
            real = sorted(here, key=lambda g, k=key: float(np.mean([run[k] for run in g.real])))
            ours = sorted(here, key=lambda g, k=key: float(g.simulated[k]))
            found.append(
                {
                    "mode": mode,
                    "load": load,
                    "metric": metric,
                    "real": [g.policy for g in real],
                    "simulated": [g.policy for g in ours],
                }
            )
    return found

"""Splitwise (arXiv:2311.18677): sizes of its pools, and the times behind its simulator.

Llama-2-70B on machines of eight GPUs. Pools are those of a cluster of 40 DGX-H100: the best split is the one that bears
the highest rate within the paper's limits at the 90th percentile (table VI), slowdowns against an idle DGX-A100.
Machines take the times of its simulator: medians of splitwise-sim:data/perf_model.csv, straight lines between them. The
same points are held against data-sheet prices, which know nothing of that engine.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from sim.cost.pod_checks import Check
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Launch
from sim.engine import simulate
from sim.engine.pools import Pool
from sim.policies import make_policy
from sim.study.papers.published_times import Points, published_cost
from sim.study.papers.serving import A100, capacity, data_sheet, load

MACHINES = 40
H100 = "h100-sxm"
SPLITS = (25, 28, 31, 34, 37)  # prompt machines
REQUESTS = 1200
CONTEXT = 8192
KINDS = {"code": ("azure-code-2023", 35), "conversation": ("azure-conv-2023", 25)}
# slowdowns at the 90th percentile, table VI: TTFT, TBT, end to end
LIMITS = (3.0, 1.5, 1.5)
# milliseconds by tokens of the prompt, and of a decode step by its batch at prompts of 512
PROMPT_MS = {
    A100: {512: 94.3, 1024: 154.5, 2048: 274.0, 4096: 661.0, 8192: 1550.0},
    H100: {512: 53.4, 1024: 77.9, 2048: 137.0, 4096: 390.0, 8192: 845.0},
}
TOKEN_MS = {A100: {1: 44.9, 8: 46.5, 32: 53.0, 64: 71.6}, H100: {1: 29.8, 8: 32.5, 32: 38.6, 64: 50.2}}


def machine(gpu: str) -> ProfiledCost:
    """Eight GPUs with the model."""
    return data_sheet("llama-2-70b", gpu, 8, CONTEXT)


def points(gpu: str) -> Points:
    """What such a machine takes in the paper's simulator."""
    return Points.of(PROMPT_MS[gpu], TOKEN_MS[gpu])


@lru_cache(maxsize=256)
def bears(kind: str, prompt_machines: int, rate: float) -> bool:
    """Does the cluster keep all three limits at a rate?"""
    cost, name = published_cost(machine(H100), points(H100)), KINDS[kind][0]
    workload = load(
        {"prompt_tokens": {"quantiles": name}, "output_tokens": {"quantiles": name}}, REQUESTS, rate, CONTEXT
    )
    pools = [Pool("prefill", prompt_machines, cost), Pool("decode", MACHINES - prompt_machines, cost)]
    frame = simulate(workload, make_policy("splitwise"), cost, pools=pools).requests
    idle = points(A100)
    ttft = (frame["first_token_s"] - frame["arrival_s"]).to_numpy()
    whole = (frame["finish_s"] - frame["arrival_s"]).to_numpy()
    later = frame["output_tokens"].to_numpy() - 1
    alone = 1e-3 * idle.prompt_ms(frame["prompt_tokens"].to_numpy(np.float64))
    step_s = 1e-3 * float(idle.token_ms(np.ones(1))[0])
    slower = [ttft / alone, ((whole - ttft) / later)[later > 0] / step_s, whole / (alone + later * step_s)]
    return all(float(np.percentile(one, 90)) <= limit for one, limit in zip(slower, LIMITS, strict=True))


def pool_checks() -> list[Check]:
    """W3: prompt machines of the best split."""
    found = []
    for kind, (_, published) in KINDS.items():
        rates = {p: capacity(partial(bears, kind, p), 100.0, 400.0, steps=6) for p in SPLITS}
        best = max(SPLITS, key=lambda p: rates[p])
        words = f"{kind}: {published} prompt machines of {MACHINES}"
        found.append(Check(f"W3-{kind}", "Splitwise 6.3", words, published - 3, published + 3, best))
    return found


def time_checks() -> list[Check]:
    """W4: mean relative error of prompt and decode times."""
    found = []
    for gpu, name in ((A100, "a100"), (H100, "h100")):
        cost = machine(gpu)
        prompt = [cost.solo(Launch(((n, 0),))).step_s / (1e-3 * ms) - 1 for n, ms in PROMPT_MS[gpu].items()]
        token = [
            cost.solo(Launch((), n, 513 * n)).step_s / (1e-3 * ms) - 1 for n, ms in TOKEN_MS[gpu].items()
        ]
        for what, errors in (("prompt", prompt), ("token", token)):
            ours = float(np.mean(np.abs(errors)))
            found.append(
                Check(f"W4-{what}-{name}", "splitwise-sim perf_model.csv", "mean error", 0, 0.05, ours)
            )
    return found

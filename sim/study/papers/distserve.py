"""DistServe (arXiv:2401.09670): its simulator's table of SLO attainment, and the example of its introduction.

Step times are the coefficients of its artefact (`published_times`). Table 2 names no model and no lengths: OPT-66B on
four A100s and ShareGPT as around it, here log-normal with means of 755 and 200 tokens. Only its vLLM column is run, as
the placement behind the other is not stated. The limits of the example (0.4 s and 40 ms for nine of ten requests) and
its lengths (512 and 64 tokens) are those of the paper's Figure 1.
"""

from __future__ import annotations

from functools import partial

from sim.cost.pod_checks import Check
from sim.study.papers.bullet import CHAT
from sim.study.papers.published_times import OPT_13B, OPT_13B_VLLM, OPT_66B, Coefficients, published_cost
from sim.study.papers.serving import A100, capacity, data_sheet, load, serve

BLOCK = 16
KV_TOKENS = {"opt-13b": 66_144, "opt-66b": 78_496}  # simdistserve, max_num_tokens.csv
VLLM = {"name": "vllm-v0", "max_num_batched_tokens": 16384, "max_num_seqs": 1024}
TABLE_2 = {1.0: 97.0, 1.5: 65.5, 2.0: 52.8, 2.5: 44.9, 3.0: 36.7, 3.5: 27.8, 4.0: 23.6}  # of the real vLLM
CONTEXT = 2048


def table_checks() -> list[Check]:
    """D1: attainment of 2.5 s and 0.15 s at seven rates."""
    cost = published_cost(data_sheet("opt-66b", A100, 4), OPT_66B)
    apart = 0.0
    for rate, published in TABLE_2.items():
        run = serve(
            VLLM,
            cost,
            load(CHAT, 500, rate, CONTEXT),
            {"ttft_ms": 2500.0, "tpot_ms": 150.0},
            num_gpu_blocks=KV_TOKENS["opt-66b"] // BLOCK,
        )
        apart = max(apart, abs(100 * run["slo_attainment"] - published))
    return [
        Check(
            "D1-vllm", "DistServe table 2", "97.0 to 23.6 % at 1 to 4 requests/s: points apart", 0, 3, apart
        )
    ]


def _bears(coefficients: Coefficients, output: int, limits: dict[str, float], rate: float) -> bool:
    cost = published_cost(data_sheet("opt-13b"), coefficients)
    workload = load({"prompt_tokens": 512, "output_tokens": output}, 400, rate, CONTEXT)
    run = serve(VLLM, cost, workload, num_gpu_blocks=KV_TOKENS["opt-13b"] // BLOCK)
    return all(run[f"p90_{key}"] <= limit for key, limit in limits.items())


def example_checks() -> list[Check]:
    """D4: OPT-13B on one GPU with both phases, with one of them, and two prefill GPUs beside one for decode."""
    ttft, tpot = {"ttft_ms": 400.0}, {"tpot_ms": 40.0}
    decodes = Coefficients((1e-3, 0.0, 0.0), OPT_13B.decode, OPT_13B.large)
    both = capacity(partial(_bears, OPT_13B_VLLM, 64, {**ttft, **tpot}), 0.2, 25.6, steps=8)
    prefill = capacity(partial(_bears, OPT_13B_VLLM, 1, ttft), 0.2, 25.6, steps=8)
    decode = capacity(partial(_bears, decodes, 64, tpot), 0.2, 51.2, steps=8)
    source, apart = "DistServe 1, figure 1", min(2 * prefill, decode) / 3
    return [
        Check("D4-both", source, "one GPU for both: 1.6 requests/s", 1.36, 1.84, both),
        Check("D4-prefill", source, "prefill alone: 5.6 requests/s", 4.76, 6.44, prefill),
        Check("D4-decode", source, "decode alone: 10 requests/s", 8.5, 11.5, decode),
        Check("D4-ratio", source, "two and one: 2.1 times a GPU", 1.785, 2.415, apart / both),
    ]


def checks() -> list[Check]:
    """All of them."""
    return [*table_checks(), *example_checks()]

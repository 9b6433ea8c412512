"""What can never be served is refused at once, with the arithmetic; what only just fits is served."""

from __future__ import annotations

from typing import Any

import pytest
from stub_cost import TICK, rough_tables, stub_cost
from workloads import workload

from sim.engine import Decode, Mixed, Plan, RunRecords, View, simulate
from sim.policies import make_policy

COST = stub_cost(rough_tables(TICK), max_context=100)


class Greedy:
    """First come, first served, one whole prompt at a time."""

    max_num_seqs = 4
    max_num_batched_tokens = 100

    def plan(self, view: View) -> Plan:
        if len(view.running) == 0 and len(view.waiting):
            return Plan([Mixed([(view.waiting.id[0], int(view.waiting.target_tokens[0]))])])
        return Plan([Decode()])


def policy(name: str, **knobs: Any) -> Any:
    return Greedy() if name == "object" else make_policy({"name": name, **knobs})


KNOBS: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "sarathi": {"token_budget": 8, "max_num_seqs": 4},
    "sglang": {"chunked_prefill_size": 8, "max_running_requests": 4},
    "vllm-v0": {"max_num_seqs": 4},
    "static-batch": {"max_batch_size": 4},
    "object": {},
}
every_policy = pytest.mark.parametrize("name", list(KNOBS))


def run(
    name: str, prompts: list[int], outputs: list[int], blocks: int, size: int, **knobs: Any
) -> RunRecords:
    load = workload([0.0] * len(prompts), prompts, outputs)
    chosen = policy(name, **{**KNOBS[name], **knobs})
    return simulate(load, chosen, COST, num_gpu_blocks=blocks, block_size=size, jitter=False)


@every_policy
def test_longer_than_the_context(name: str) -> None:
    frame = run(name, [90, 90, 101], [10, 11, 1], blocks=1000, size=1).requests
    assert frame["status"].tolist() == ["finished", "rejected", "rejected"]
    assert frame["reason"].tolist() == [
        "",
        "90 + 11 tokens exceed the context limit of 100",
        "101 + 1 tokens exceed the context limit of 100",
    ]
    assert frame["replica"].tolist() == [0, -1, -1]
    assert frame.loc[1:, ["first_scheduled_s", "first_token_s", "finish_s"]].isna().all(axis=None)


# blocks of 4 that a prompt of 21 and an output of 20 need: 40 tokens are written, the last one never is
NEEDS = [
    ("vllm", {}, 10),
    ("object", {}, 10),
    # a decode wants a free block at its turn, needed or not
    ("sarathi", {}, 11),
    # 40 % of 16 blocks, rounded down, kept free at admission
    ("sarathi", {"watermark": 0.4}, 16),
    ("vllm-v0", {}, 11),
    ("vllm-v0", {"watermark": 0.4}, 16),
    ("static-batch", {}, 10),
    # admission of a request retracted before its last token: 40 + 20 asked, and something left over
    ("sglang", {}, 16),
    ("sglang", {"clip_max_new_tokens": 4}, 12),
]


@pytest.mark.parametrize(("name", "knobs", "blocks"), NEEDS)
def test_more_than_the_pool_holds(name: str, knobs: dict[str, Any], blocks: int) -> None:
    if name == "sglang":
        knobs = {**knobs, "page_size": 4, "chunked_prefill_size": 8}
    enough = run(name, [21], [20], blocks=blocks, size=4, **knobs).requests
    assert enough["status"].tolist() == ["finished"]
    less = run(name, [21], [20], blocks=blocks - 1, size=4, **knobs).requests
    assert less["status"].tolist() == ["rejected"]
    assert less["reason"][0].startswith("21 + 20 tokens need ")
    assert less["reason"][0].endswith(f" KV blocks of 4; the pool has {blocks - 1}")


@every_policy
def test_the_others_go_on(name: str) -> None:
    records = run(name, [5, 80, 5, 80, 5], [3, 15, 3, 15, 3], blocks=14, size=4)
    assert records.requests["status"].tolist() == ["finished", "rejected", "finished", "rejected", "finished"]
    assert records.requests["generated_tokens"].tolist() == [3, 0, 3, 0, 3]


@every_policy
def test_nothing_but_rejections(name: str) -> None:
    records = run(name, [101, 101], [1, 1], blocks=100, size=4)
    assert (records.requests["status"] == "rejected").all()
    assert records.end_s == 0.0
    assert records.totals["iterations"] == 0


@every_policy
def test_full_pools_never_stall(name: str) -> None:
    """Everything that was let in is served, however often it's evicted."""
    knobs = {"clip_max_new_tokens": 4} if name == "sglang" else {}
    records = run(name, [20, 1, 30, 7, 20, 3], [20, 60, 10, 50, 1, 40], blocks=18, size=4, **knobs)
    assert (records.requests["status"] == "finished").all()
    assert (records.requests["preemptions"].sum() > 0) == (name not in ("object", "static-batch"))


def test_a_prompt_beyond_the_budget_of_vllm_v0() -> None:
    knobs = {"max_num_batched_tokens": 20}
    frame = run("vllm-v0", [20, 21], [5, 5], blocks=100, size=4, **knobs).requests
    assert frame["status"].tolist() == ["finished", "rejected"]
    assert frame["reason"][1] == "a prompt of 21 tokens exceeds max_num_batched_tokens = 20"

"""Splitwise: placement over three pools, iterations of mixed machines, ageing, transfers, and its paper's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stub_cost import StubCost, plain_tables, stub_cost
from workloads import workload

from sim.cost import load_cost
from sim.engine import RunRecords, simulate
from sim.engine.link import Link
from sim.engine.pools import Pool
from sim.policies import make_policy
from sim.workload.build import build_workload
from sim.workload.workload import Workload

INSTANT = Link(float("inf"), 0.0)
PROMPT_S, TOKEN_S = 1e-3, 10e-3  # per prompt token; per decode in a step
COST = stub_cost(plain_tables(0.0, PROMPT_S, TOKEN_S), max_context=8192)


def run(
    work: Workload,
    *,
    cost: StubCost = COST,
    link: Link = INSTANT,
    blocks: int = 10_000,
    pools: dict[str, int] | None = None,
    **knobs: Any,
) -> RunRecords:
    return simulate(
        work,
        make_policy({"name": "splitwise", "handover_ms": 0.0, **knobs}),
        cost,
        pools=[Pool(name, count, cost) for name, count in (pools or {"prefill": 1, "decode": 1}).items()],
        link=link,
        num_gpu_blocks=blocks,
        jitter=False,
        record_steps=True,
    )


def places(records: RunRecords) -> list[tuple[int, int]]:
    frame = records.requests
    return list(zip(frame["replica"].tolist(), frame["decode_replica"].tolist(), strict=True))


def test_prompts_go_where_the_fewest_tokens_are_pending_and_tokens_where_the_least_memory_is_promised() -> (
    None
):
    work = workload([0.0, 0.0, 0.0, 0.0], [100, 30, 30, 30], [10, 300, 10, 10])
    # pending 100 against 30, 60, 90; promised 7 blocks against 21, then 10 and 13
    assert places(run(work, pools={"prefill": 2, "decode": 2})) == [(0, 2), (1, 3), (1, 2), (1, 2)]


def test_a_long_queue_sends_prompts_to_a_token_machine_which_goes_home_afterwards() -> None:
    # the first starts at once; with it running and the second waiting, 300 tokens are pending
    work = workload([0.0, 0.01, 0.02, 0.03, 2.0], [100, 200, 200, 10, 10], [2, 2, 2, 2, 2])
    found = places(run(work, prompt_queue_tokens=250, pools={"prefill": 1, "decode": 2}))
    assert found[:2] == [(0, 1), (0, 2)]
    # the third's prompt goes to a token machine, the fourth's to it as well, since it is mixed now
    assert found[2][0] in (1, 2)
    assert found[3][0] == found[2][0]
    assert found[4] == (0, 1)  # all at home again


def test_a_token_machine_without_memory_sends_tokens_to_a_prompt_machine_or_leaves_them_where_they_are() -> (
    None
):
    # 20 blocks; each request is promised 8
    work = workload([0.0] * 4, [64] * 4, [64] * 4)
    found = places(run(work, blocks=20, pools={"prefill": 1, "decode": 1}))
    assert found[:2] == [(0, 1), (0, 1)]
    assert found[2] == (0, 0)  # the prompt machine takes it into the mixed pool
    assert found[3][0] == found[3][1]


def test_a_mixed_pool_takes_what_the_others_do_not() -> None:
    work = workload([0.0] * 3, [64] * 3, [64] * 3)
    found = places(run(work, blocks=10, pools={"prefill": 1, "decode": 1, "mixed": 1}))
    assert found[:2] == [(0, 1), (0, 2)]


def mixed_machine(**knobs: Any) -> RunRecords:
    """One long answer on the token machine, then prompts that take whole iterations there."""
    work = workload([0.0, *[0.3] * 21], [10, *[100] * 21], [60, *[1] * 21])
    return run(work, max_batch_tokens=100, prompt_queue_tokens=0, **knobs)


def test_prompts_go_first_until_a_token_task_has_sat_out_too_often() -> None:
    steps = mixed_machine().steps
    assert steps is not None
    mine = steps[(steps["replica"] == 1) & (steps["start_s"] > 0.29)]
    kinds = "".join("D" if tokens == 0 else "P" for tokens in mine["prefill_tokens"])
    first = kinds.index("P")
    # four iterations sat out, then first at every second one: what it has sat out is never forgotten
    assert kinds[first:].startswith("PPPPDPDPDP")
    assert ((mine["prefill_tokens"] == 0) | (mine["decode_batch"] == 0)).all()


def test_a_mixed_iteration_holds_prompts_and_tokens_within_its_limits() -> None:
    work = workload([0.0, 0.0, *[0.1] * 6], [10, 10, *[40] * 6], [90, 90, *[1] * 6])
    steps = run(work, max_batch_tokens=90, prompt_queue_tokens=0, max_batch_size=3).steps
    assert steps is not None
    both = steps[(steps["prefill_tokens"] > 0) & (steps["decode_batch"] > 0)]
    assert len(both) > 0
    assert (both["prefill_tokens"] + both["decode_batch"] <= 90).all()
    assert (steps["chunks"] + steps["decode_batch"] <= 3).all()


def test_a_prompt_longer_than_an_iteration_runs_alone() -> None:
    steps = run(workload([0.0] * 3, [40, 300, 40], [1, 1, 1]), max_batch_tokens=100).steps
    assert steps is not None
    assert steps["prefill_tokens"].tolist() == [40, 300, 40]


def test_short_prompts_are_sent_after_and_long_ones_beside_their_computation() -> None:
    size, layers = COST.kv_bytes_per_token, COST.model.layers
    work = workload([0.0, 10.0], [100, 600], [2, 2])
    link = Link(600 * size / 0.3, 0.0)
    short, long = run(work, link=link).requests["transfer_s"]
    assert short == pytest.approx(0.05, rel=1e-9)
    assert long == pytest.approx(0.3 / layers, rel=1e-9)
    # beside it, all of the constant cost shows; `overlap: none` sends everything afterwards
    _, later = run(work, link=link, handover_ms=7.0).requests["transfer_s"]
    assert later == pytest.approx(0.3 / layers + 7e-3, rel=1e-9)
    _, serial = run(work, link=replace(link, overlap="none")).requests["transfer_s"]
    assert serial == pytest.approx(0.3, rel=1e-9)


def test_memory_is_promised_for_all_that_the_client_may_ask() -> None:
    work = workload([0.0] * 6, [16] * 6, [17] * 6)
    much = replace(work, max_new_tokens=np.full(6, 16 * 9, np.int32))
    steps = run(much, blocks=20, pools={"prefill": 1, "decode": 1}).steps
    assert steps is not None
    # 10 blocks each: two at once on a machine of 20
    assert steps["decode_batch"].max() == 2


class Crossing:
    """A dispatcher that lets two machines decode each other's prompts, whatever room there is."""

    def __init__(self, machines: Any, q: Any) -> None:
        self._machines, self._q = machines, q

    def place(self, i: int) -> tuple[int, int | None]:
        return i % 2, 1 - i % 2

    def decode_on(self, i: int) -> int:
        raise AssertionError

    def may_pull(self, i: int, machine: Any) -> bool:
        return bool(machine.reserved_blocks + self.reserve(i) <= machine.num_blocks)

    def sends_early(self, i: int) -> bool:
        return False

    def handover_s(self, i: int, early: bool) -> float:
        return 0.0

    def reserve(self, i: int) -> int:
        return int(self._machines[0].blocks_for(int(self._q.prompt[i] + self._q.max_new[i])))

    def prompt_done(self, i: int) -> None:
        pass

    moved = finished = prompt_done


def test_machines_that_hold_each_others_room_start_one_request_over() -> None:
    policy = make_policy("splitwise")
    policy.dispatcher = lambda machines, q, link: Crossing(machines, q)
    work = workload([0.0] * 8, [64] * 8, [30] * 8)
    records = simulate(
        work,
        policy,
        COST,
        pools=[Pool("prefill", 1, COST), Pool("decode", 1, COST)],
        link=INSTANT,
        num_gpu_blocks=12,
        jitter=False,
    )
    assert (records.requests["status"] == "finished").all()
    assert records.requests["preemptions"].sum() > 0


# --- every knob moves what it is said to move ---


def crowd() -> Workload:
    rng = np.random.default_rng(1)
    n = 60
    return workload(
        np.cumsum(rng.exponential(0.02, n)).tolist(),
        rng.integers(50, 700, n).tolist(),
        rng.integers(2, 60, n).tolist(),
    )


SLOW = Link(400 * COST.kv_bytes_per_token / 0.2, 0.0)


@pytest.mark.parametrize(
    ("knob", "low", "high", "metric"),
    [
        ("max_batch_tokens", 256, 2048, lambda r: -r.totals["launches_eager"]),
        ("max_batch_size", 2, 512, lambda r: -r.totals["iterations"]),
        ("max_prompt_tokens", 500, 16384, lambda r: (r.requests["status"] == "finished").sum()),
        ("prompt_queue_tokens", 0, 100_000, lambda r: -(r.requests["replica"] == 1).sum()),
        ("overlap_min_tokens", 10_000, 0, lambda r: -r.requests["transfer_s"].mean()),
        ("handover_ms", 0.0, 50.0, lambda r: r.requests["transfer_s"].mean()),
    ],
)
def test_every_knob_moves_its_metric(knob: str, low: Any, high: Any, metric: Any) -> None:
    batching = stub_cost(plain_tables(5e-3, PROMPT_S, 1e-3), max_context=8192)
    few, many = (metric(run(crowd(), cost=batching, link=SLOW, **{knob: value})) for value in (low, high))
    assert many > few


def test_the_longer_token_tasks_may_sit_out_the_longer_their_gaps() -> None:
    short, long = (mixed_machine(max_preemptions=limit).requests["max_itl_s"].iloc[0] for limit in (1, 8))
    assert long > 2 * short


# --- its paper's numbers ---


@pytest.mark.parametrize(
    ("gpu", "gb_s", "published_ms"), [("h100-sxm", 50.0, 5.0), ("a100-80gb-sxm", 25.0, 8.0)]
)
@pytest.mark.parametrize("prompt", [600, 1500, 4000])
def test_visible_transfer(gpu: str, gb_s: float, published_ms: float, prompt: int) -> None:
    """Section 6.2, Llama2-70B: about 5 ms over 400 Gbit/s on H100 and 8 ms over 200 Gbit/s on A100."""
    cost = load_cost("llama-2-70b", gpu, "spec", {"tp": 8})
    work = workload([0.0], [prompt], [3])
    records = simulate(work, make_policy("splitwise"), cost, link=Link(gb_s * 1e9), jitter=False)
    assert 1e3 * records.requests["transfer_s"][0] == pytest.approx(published_ms, abs=2.0)


def paper_steps(max_tokens: int, max_seqs: int, replica: int) -> dict[str, Any]:
    """Splitwise's own step times, Llama2-70B on eight H100s (perf_model.csv medians; Table IV's token time)."""
    made = plain_tables()(max_tokens, max_seqs, replica)
    sizes, ms = [0, 512, 1024, 2048, 4096, 8192], [30, 53.4, 77.9, 137, 390, 845]
    m = np.arange(max_tokens + 1)
    return {**made, "dense_graph_s": np.full(len(m), 31e-3), "dense_eager_s": np.interp(m, sizes, ms) / 1e3}


def test_second_token_of_the_coding_trace() -> None:
    """Section 6.2, two machines: the second token comes 16.5 % later than the next ones do, 64 % if sent serially.

    The link's useful rate follows from the paper's threshold: 512 tokens take the 5 ms that overlapping shows.
    """
    real = load_cost("llama-2-70b", "h100-sxm", "spec", {"tp": 8})
    model = replace(real.model, max_context=16384)
    cost = StubCost(model, real.profile, real.launching, real.scale, real.tp, real.whole_kv_bytes)
    object.__setattr__(cost, "tables", paper_steps)
    rate = 512 * cost.kv_bytes_per_token / 5e-3
    lengths = {
        "prompt_tokens": {"quantiles": "azure-code-2023"},
        "output_tokens": {"quantiles": "azure-code-2023"},
    }
    work = build_workload(
        {"num_prompts": 400, "arrivals": "poisson", **lengths},
        seed=0,
        request_rate=0.2,
        context_limit=model.max_context,
        base_dirs=(),
    )
    late = {}
    for overlap in ("layer", "none"):
        policy = make_policy({"name": "splitwise", "handover_ms": 5.0})
        records = simulate(work, policy, cost, link=Link(rate, 0.0, "fair", overlap), jitter=False)
        moved = records.requests["transfer_s"].dropna()
        late[overlap] = 100 * moved.mean() / 31e-3
    assert late["layer"] == pytest.approx(16.5, abs=8)
    assert late["none"] == pytest.approx(64, abs=8)

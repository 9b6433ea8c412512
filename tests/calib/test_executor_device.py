"""The GPU's device without the GPU: PyTorch's kernels on the CPU, graphs that call again, events that are over."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calib.executor.work import Work
from calib.models import ModelShape

torch = pytest.importorskip("torch", reason="the executor's kernels need torch")
torch.set_num_threads(1)  # the matrices are tiny

TINY = ModelShape("tiny", 3, 128, 4, 2, 32, 256, 500)
SMS = 132


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Torch:
    """PyTorch without a GPU."""

    cuda = SimpleNamespace(
        Event=Event,
        stream=lambda stream: nullcontext(),
        synchronize=lambda: None,
        graph_pool_handle=lambda: None,
        mem_get_info=lambda: (1 << 40, 1 << 40),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        return torch.zeros(*size, **options)


@pytest.fixture(scope="module")
def lab() -> Any:
    from calib.arena import Arena

    arena = Arena(TINY, 1, device="cpu", kv_bytes=8 << 20)
    arena.fill()
    stream = SimpleNamespace(synchronize=lambda: None)
    part = SimpleNamespace(stream=lambda priority: stream)
    return SimpleNamespace(
        arena=arena, torch=Torch(), model=TINY, partition=lambda sms, remainder=False: part
    )


def device(lab: Any, lanes: int = 1) -> Any:
    from calib.executor.attention import GatheredAttention
    from calib.executor.gpu import GpuDevice

    class Made(GpuDevice):
        def _place(self, slot: int) -> Any:
            new = slot not in self._places
            place = super()._place(slot)
            if new:
                place.attention = GatheredAttention(place.forward)
                place.capture = lambda launch: SimpleNamespace(replay=launch)
            return place

    made = Made(lab, lanes, 300, 128, 16)
    made.start()
    return made


def work(chunks: Any = (), decodes: Any = (), lane: int = 0, **more: Any) -> Work:
    return Work(lane, SMS, (0, TINY.layers), tuple(chunks), tuple(decodes), 0.0, 0.0, True, **more)


def run(made: Any, job: Work, released: tuple[int, ...] = ()) -> dict[int, int]:
    """Launch, wait, and return the tokens sampled."""
    made.launch(job, list(released))
    while job.lane not in [lane for lane, _ in made.wait(1e9)]:
        pass
    return {i: made._last_token[i] for i, *_ in (*job.chunks, *job.decodes) if i in made._last_token}


def pass_by_pass(made: Any, steps: int) -> list[dict[int, int]]:
    """A prompt each of two requests, then decode steps one after the other."""
    run(made, work([(1, 30, 0), (2, 17, 0)]))
    return [run(made, work(decodes=[(1, 31 + n), (2, 18 + n)])) for n in range(steps)]


def test_graphs_give_the_tokens_of_eager_launches(lab: Any) -> None:
    jobs = [work([(1, 30, 0), (2, 17, 0)]), *(work(decodes=[(1, 31 + n), (2, 18 + n)]) for n in range(5))]
    eager, graphs = device(lab), device(lab)
    facts = graphs.prepare(jobs)
    assert facts["graphs_captured"] > 0
    assert graphs.prepare(jobs)["graphs_captured"] == 0
    assert pass_by_pass(eager, 5) == pass_by_pass(graphs, 5)
    assert graphs.measured(0)["launch"] == "graph"
    assert graphs.measured(0)["rows"] == 2


def test_steps_launched_ahead_make_the_tokens_of_steps_one_by_one(lab: Any) -> None:
    for prepared in (False, True):
        made = device(lab, 2)
        first = work(decodes=[(1, 31), (2, 18)], lane=1, steps=5)
        if prepared:
            made.prepare([work([(1, 47, 0)]), first])
        expected = pass_by_pass(device(lab), 5)
        run(made, work([(1, 30, 0), (2, 17, 0)]))
        found = [run(made, first)]
        for n in range(1, 5):
            found.append(run(made, replace(first.later(n), steps=1)))
            assert made.measured(1)["launch"] == "ahead"
        assert found == expected
        assert not made.lanes[1].flights
        # the lane is free for another chain
        assert run(made, work(decodes=[(1, 36), (2, 23)], lane=1, steps=2))


def test_a_parked_pass_keeps_its_half_way_state(lab: Any) -> None:
    def group(job: Work, first: int, last: int) -> Work:
        return replace(job, layers=(first, last), whole=last == TINY.layers)

    alone, both = device(lab, 2), device(lab, 2)
    long, short = work([(4, 50, 0)]), work([(5, 20, 0)], aside=True)
    expected = {**run(alone, long), **run(alone, replace(short, aside=False))}
    run(both, group(long, 0, 2))
    for first in range(TINY.layers):
        run(both, group(short, first, first + 1))
    run(both, group(long, 2, 3))
    assert {i: both._last_token[i] for i in (4, 5)} == expected


def test_one_device_serves_policies_one_after_the_other(lab: Any) -> None:
    made = device(lab, 1)
    before = pass_by_pass(made, 3)
    made.forget()
    made.use(2, "batch_pod")
    run(made, work([(9, 40, 0)]))
    run(made, work(decodes=[(9, 41)], lane=1))
    made.forget()
    made.use(1, "")
    assert made.pool.free == 300
    assert pass_by_pass(made, 3) == before


def test_a_row_count_without_graphs_is_run_once_beforehand(lab: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("calib.executor.buckets.MOST_ROWS", 32)
    made = device(lab)
    touched: list[int] = []
    place = made._place(0)
    place.touch = lambda stream, sms, rows, real=place.touch: (touched.append(rows), real(stream, sms, rows))
    made.prepare([work([(1, 100, 0)]), work([(2, 20, 0)], [(1, 101)])])
    assert touched == [100]
    assert made.pool.free == 300


def test_pages_come_back_when_they_are_released(lab: Any) -> None:
    made = device(lab)
    pass_by_pass(made, 2)
    held = 300 - made.pool.free
    run(made, work([(3, 5, 0)]), released=(1,))
    assert 300 - made.pool.free == held - 2 + 1


SERVED: list[dict[str, Any]] = [
    {"name": "sarathi", "token_budget": 64, "max_num_seqs": 8},
    {"name": "pod", "token_budget": 64, "max_num_seqs": 8},
    {"name": "duetserve", "token_budget": 128, "max_num_seqs": 8, "tbt_ms": 1, "max_lookahead": 4},
    {"name": "muxwise", "max_prefill_tokens": 100, "max_num_seqs": 8, "tbt_slo_ms": 1, "preempt": True},
    {"name": "bullet", "max_num_seqs": 8, "max_prefill_tokens": 64},
]


@pytest.mark.parametrize("entry", SERVED, ids=lambda entry: str(entry["name"]))
def test_policies_are_served_to_the_last_token(lab: Any, entry: dict[str, Any]) -> None:
    """By the clock on the wall, with graphs: every request ends, and every launch has run."""
    from lane_cost import lane_cost, lane_tables
    from stub_cost import TICK
    from workloads import workload

    from calib.executor.dry import DryDevice
    from calib.executor.serve import serve
    from sim.engine.cluster import open_cluster
    from sim.policies import make_policy

    rng = np.random.default_rng(1)
    load = workload(
        np.linspace(0, 0.1, 12).tolist(), rng.integers(1, 90, 12).tolist(), rng.integers(1, 9, 12).tolist()
    )
    policy = make_policy(entry)
    cost: Any = lane_cost(lane_tables(40 * TICK, 64 * TICK), max_context=512)
    object.__setattr__(cost, "model", replace(cost.model, layers=TINY.layers))

    def opened() -> Any:
        made = make_policy(entry)
        return open_cluster(
            load, made, cost, num_gpu_blocks=300, jitter=False, bursts=False, estimator="oracle"
        )

    made = device(lab, policy.lanes)
    made.prepare(serve(opened().replicas[0], DryDevice(), policy.lanes, load.arrival_s).works)
    cluster = opened()
    trail = serve(cluster.replicas[0], made, policy.lanes, load.arrival_s)
    records = cluster.close(max(row["end_s"] for row in trail.rows))
    assert (records.requests["status"] == "finished").all()
    assert not made._flying
    assert not any(lane.flights for lane in made.lanes)
    assert {row["launch"] for row in trail.rows} <= {"graph", "piecewise", "eager", "ahead"}
    assert any(work.ahead for work in trail.works) == (entry["name"] == "duetserve")

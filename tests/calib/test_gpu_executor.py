"""On a real GPU: the executor's graphs give what eager launches give, and a short run ends with every page back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lab() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from calib.arena import Arena
    from calib.models import ModelShape
    from calib.partition import whole_gpu

    arena = Arena(ModelShape("short", 3, 4096, 32, 8, 128, 14336, 32000), 0, kv_bytes=1 << 30)
    arena.fill()
    if arena.flashinfer is None:
        pytest.skip("FlashInfer is not installed")
    total = torch.cuda.get_device_properties(0).multi_processor_count
    whole = (whole_gpu(total), whole_gpu(total, "all-b"))
    return SimpleNamespace(
        arena=arena,
        torch=torch,
        model=arena.model,
        sms=total,
        partition=lambda sms, remainder=False: whole[remainder],
    )


def device(lab: Any, lanes: int = 1) -> Any:
    from calib.executor.gpu import GpuDevice

    return GpuDevice(lab, lanes, 1500, 2048, 64)


def work(lab: Any, chunks: Any = (), decodes: Any = (), lane: int = 0) -> Any:
    from calib.executor.work import Work

    return Work(lane, lab.sms, (0, 3), tuple(chunks), tuple(decodes), 0.0, 0.0, True)


def logits(made: Any, job: Any) -> Any:
    made.launch(job, [])
    made.wait(1e9)
    lane = made.lanes[job.lane]
    return lane.forward.logits[: len(lane.batch.yields)].float().clone()


def similar(torch: Any, a: Any, b: Any) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).min())


def test_graphs_give_what_eager_launches_give(lab: Any) -> None:
    jobs = [
        work(lab, [(1, 300, 0), (2, 150, 0)]),
        work(lab, [(3, 200, 0)], [(1, 301), (2, 151)]),
        work(lab, [], [(1, 302), (2, 152), (3, 201)]),
    ]
    eager, graphs = device(lab), device(lab)
    graphs.prepare(jobs)
    kinds = []
    for made in (eager, graphs):
        made.start()
    for job in jobs:
        plain, fast = logits(eager, job), logits(graphs, job)
        kinds.append((eager.measured(0)["launch"], graphs.measured(0)["launch"]))
        assert similar(lab.torch, plain, fast) > 0.999
    assert kinds == [("eager", "piecewise"), ("eager", "piecewise"), ("eager", "graph")]


def test_a_prompt_in_layer_groups_beside_decodes_is_the_same_prompt(lab: Any) -> None:
    from calib.executor.work import Work

    alone, shared = device(lab, 2), device(lab, 2)
    for made in (alone, shared):
        made.start()
        logits(made, work(lab, [(9, 120, 0)]))
    expected = logits(alone, work(lab, [(4, 500, 0)]))
    for first in range(3):
        part = Work(0, lab.sms, (first, first + 1), ((4, 500, 0),), (), 0.0, 0.0, first == 2)
        shared.launch(part, [])
        shared.launch(work(lab, [], [(9, 121 + first)], lane=1), [])
        while shared._flying:
            shared.wait(1e9)
    lane = shared.lanes[0]
    assert similar(lab.torch, expected, lane.forward.logits[:1].float()) > 0.999


def test_serving_ends_with_every_page_back(lab: Any) -> None:
    from lane_cost import lane_cost
    from stub_cost import TICK, rough_tables
    from workloads import workload

    from calib.executor.serve import serve
    from sim.engine.cluster import open_cluster
    from sim.policies import make_policy

    rng = np.random.default_rng(1)
    load = workload(
        np.linspace(0, 0.5, 40).tolist(), rng.integers(1, 900, 40).tolist(), rng.integers(1, 30, 40).tolist()
    )
    for name in ("sarathi-512", "fixed-50-50"):
        policy = make_policy(name)
        cost = lane_cost(rough_tables(TICK), max_context=4096)
        object.__setattr__(cost, "model", replace(cost.model, layers=lab.model.layers))
        cluster = open_cluster(load, policy, cost, num_gpu_blocks=1500, jitter=False, bursts=False)
        made = device(lab, policy.lanes)
        trail = serve(cluster.replicas[0], made, policy.lanes, load.arrival_s)
        records = cluster.close(max(row["end_s"] for row in trail.rows))
        assert (records.requests["status"] == "finished").all(), name
        assert all(row["gpu_s"] > 0 for row in trail.rows)

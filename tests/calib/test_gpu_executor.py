"""On a real GPU: the executor's graphs give what eager launches give, and a short run ends with every page back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def made_lab(*shape: Any) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from calib.arena import Arena
    from calib.models import ModelShape
    from calib.partition import whole_gpu

    arena = Arena(ModelShape(*shape), 0, kv_bytes=1 << 30)
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


@pytest.fixture(scope="module")
def lab() -> Any:
    return made_lab("short", 3, 4096, 32, 8, 128, 14336, 32000)


@pytest.fixture(scope="module")
def ungrouped() -> Any:
    """Llama 2's heads: as many for keys and values as for queries."""
    return made_lab("short-2", 3, 4096, 32, 32, 128, 11008, 32000)


def device(lab: Any, lanes: int = 1, fused: str = "", blocks: int = 1500) -> Any:
    from calib.executor.gpu import GpuDevice

    return GpuDevice(lab, lanes, blocks, 2048, 64, fused=fused)


def work(lab: Any, chunks: Any = (), decodes: Any = (), lane: int = 0, **more: Any) -> Any:
    from calib.executor.work import Work

    return Work(lane, lab.sms, (0, 3), tuple(chunks), tuple(decodes), 0.0, 0.0, True, **more)


def run(made: Any, job: Any) -> None:
    made.launch(job, [])
    while job.lane not in [lane for lane, _ in made.wait(1e9)]:
        pass


def logits(made: Any, job: Any) -> Any:
    # a token sampled otherwise by rounding would make another sequence
    made._last_token.update({i: 100 + i for i, _ in job.decodes})
    run(made, job)
    outputs = len(job.chunks) + len(job.decodes)
    return made.lanes[job.lane].place.forward.logits[:outputs].float().clone()


def attention_error(made: Any, job: Any) -> float:
    """Of the last layer's attention against float32 on the same queries, keys and values, right after the pass."""
    from calib.executor.batch import lay_out
    from calib.kernels.attention import reference
    from calib.kernels.base import relative_error

    place, torch = made.lanes[job.lane].place, made.torch
    batch = lay_out(job, made.pool, {}, 32000)
    forward, start, parts = place.forward, 0, []
    rows = sum(batch.q_lens)
    q = forward.q(rows)
    for n, (count, context) in enumerate(zip(batch.q_lens, batch.contexts, strict=True)):
        pages = torch.from_numpy(batch.indices[batch.indptr[n] : batch.indptr[n + 1]]).long().cuda()
        held = forward.caches[-1][pages]
        k, v = (held[:, side].reshape(-1, *held.shape[3:])[:context] for side in (0, 1))
        parts.append(reference(torch, q[start : start + count], k, v, causal=True))
        start += count
    torch.cuda.synchronize()
    return float(relative_error(forward.attention[:rows], torch.cat(parts)))


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
    assert similar(lab.torch, expected, shared.lanes[0].place.forward.logits[:1].float()) > 0.999


def test_a_pass_in_one_kernel_is_right(lab: Any) -> None:
    """BatchPOD and one FA2 call for all rows, eagerly and between piecewise graphs."""
    first = work(lab, [(1, 700, 0), (2, 1300, 0)])
    jobs = [
        work(lab, [(3, 500, 0)], [(1, 701), (2, 1301)], fused=True),
        work(lab, [(3, 100, 500), (4, 17, 0)], [(1, 702), (2, 1302)], fused=True),
    ]
    apart = device(lab)
    apart.start()
    plain = [logits(apart, replace(job, fused=False)) for job in (first, *jobs)]
    for fused in ("batch_pod", "batched"):
        for prepared in (False, True):
            made = device(lab, fused=fused)
            if prepared:
                made.prepare([first, *jobs])
            made.start()
            run(made, first)
            for job, expected in zip(jobs, plain[1:], strict=True):
                found = logits(made, job)
                assert made.measured(0)["launch"] == ("piecewise" if prepared else "eager")
                assert attention_error(made, job) < 2e-2, (fused, prepared)
                assert similar(lab.torch, expected, found) > 0.999


def test_steps_launched_ahead_are_the_steps_one_by_one(lab: Any) -> None:
    prompts = work(lab, [(1, 700, 0), (2, 1007, 0)])
    one, ahead = device(lab), device(lab, 2)
    steps = [work(lab, [], [(1, 701 + n), (2, 1008 + n)]) for n in range(20)]
    chain = replace(steps[0], lane=1, steps=20)
    one.prepare([prompts, *steps])
    ahead.prepare([prompts, chain])
    for made in (one, ahead):
        made.start()
        run(made, prompts)
    expected = []
    for step in steps:
        run(one, step)
        expected.append(dict(one._last_token))
    found = []
    for n in range(20):
        run(ahead, chain if n == 0 else replace(chain.later(n), steps=1))
        found.append(dict(ahead._last_token))
    assert found == expected


def test_heads_without_groups_are_right(ungrouped: Any) -> None:
    made = device(ungrouped, blocks=1000)
    jobs = [
        work(ungrouped, [(1, 700, 0), (2, 300, 0)]),
        work(ungrouped, [(3, 500, 0)], [(1, 701), (2, 301)]),
        work(ungrouped, [], [(1, 702), (2, 302), (3, 501)]),
    ]
    made.prepare(jobs)
    made.start()
    found = []
    for job in jobs:
        found.append(logits(made, job))
        if job.chunks:
            assert attention_error(made, job) < 2e-2
    eager = device(ungrouped, blocks=1000)
    eager.start()
    for job, graphs in zip(jobs, found, strict=True):
        assert similar(ungrouped.torch, logits(eager, job), graphs) > 0.999
        assert attention_error(eager, job) < 2e-2


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
    duetserve = {"name": "duetserve", "token_budget": 2048, "tbt_ms": 5}
    for entry in ("sarathi-512", "fixed-50-50", "pod", duetserve):
        policy = make_policy(entry)
        name = policy.label
        cost = lane_cost(rough_tables(TICK), max_context=4096)
        object.__setattr__(cost, "model", replace(cost.model, layers=lab.model.layers))
        cluster = open_cluster(load, policy, cost, num_gpu_blocks=1500, jitter=False, bursts=False)
        made = device(lab, policy.lanes, "batch_pod" if name == "pod" else "")
        trail = serve(cluster.replicas[0], made, policy.lanes, load.arrival_s)
        records = cluster.close(max(row["end_s"] for row in trail.rows))
        assert (records.requests["status"] == "finished").all(), name
        assert all(row["gpu_s"] > 0 for row in trail.rows)
        assert name != "pod" or any(row["fused"] for row in trail.rows)

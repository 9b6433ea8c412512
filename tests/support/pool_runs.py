"""Random runs with pools: tight memories, slow links, unlike sides, every knob."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from stub_cost import StubCost
from workloads import workload, workloads

from sim.cost.collectives import Knots, SideFactors, Transfer
from sim.engine import RunRecords, simulate
from sim.engine.link import Link
from sim.engine.pools import Pool
from sim.policies import make_policy
from sim.workload.workload import Workload


@dataclass(frozen=True)
class PoolCase:
    """One run with pools."""

    workload: Workload
    entry: dict[str, Any]
    counts: dict[str, int]
    blocks: int
    block_size: int
    link: Link

    def run(self, cost: StubCost, **options: Any) -> RunRecords:
        """Simulate it; all replicas have prices of `cost`."""
        return simulate(
            self.workload,
            make_policy(self.entry),
            cost,
            pools=[Pool(name, count, cost) for name, count in self.counts.items()],
            link=self.link,
            num_gpu_blocks=self.blocks,
            block_size=self.block_size,
            record_steps=True,
            **options,
        )


@st.composite
def distserve_entries(draw: st.DrawFn) -> dict[str, Any]:
    """DistServe with every knob set."""
    return {
        "name": "distserve",
        "max_prefill_tokens": draw(st.sampled_from([8, 32, 256])),
        "max_prefill_seqs": draw(st.integers(1, 8)),
        "max_decode_seqs": draw(st.integers(1, 8)),
        "max_prompt_tokens": draw(st.sampled_from([60, 16384])),
        "waiting_block_threshold": draw(st.sampled_from([0.01, 0.05, 0.5, 1.0])),
        "pressure": draw(st.sampled_from(["swap", "recompute"])),
        # 2 MiB a block of 16 tokens
        "swap_space_gib": draw(st.sampled_from([0.0, 0.01, 16.0])),
        "swap_gb_s": draw(st.sampled_from([None, 1.0])),
    }


@st.composite
def splitwise_entries(draw: st.DrawFn) -> dict[str, Any]:
    """Splitwise with every knob set."""
    return {
        "name": "splitwise",
        "max_batch_tokens": draw(st.sampled_from([4, 32, 256])),
        "max_batch_size": draw(st.integers(1, 8)),
        "max_preemptions": draw(st.integers(1, 4)),
        "max_prompt_tokens": draw(st.sampled_from([60, 16384])),
        "prompt_queue_tokens": draw(st.sampled_from([0, 50, 8192])),
        "overlap_min_tokens": draw(st.sampled_from([0, 10, 512])),
        "handover_ms": draw(st.sampled_from([None, 0.0, 0.3])),
    }


ENTRIES = {"distserve": distserve_entries(), "splitwise": splitwise_entries()}


@st.composite
def links(draw: st.DrawFn) -> Link:
    """From a link that is always busy to one that takes no time, and measured ones that slow down what is beside."""
    sharing = draw(st.sampled_from(["fair", "fifo"]))
    overlap = draw(st.sampled_from(["layer", "none", None]))
    rate, latency_s = draw(st.sampled_from([1e8, 1e9, 1e11])), draw(st.sampled_from([1e-5, 1e-3]))
    if draw(st.booleans()):
        knots = Knots((1024.0, 2.0**30), (latency_s, latency_s + 2.0**30 / rate))
        side = st.sampled_from([None, SideFactors(1.0, 1.0), SideFactors(1.2, 1.1), SideFactors(1.0, 3.0)])
        sides = {"prefill": draw(side), "decode": draw(side)}
        curve = Transfer("copy", "contiguous", 0, 2, knots, layered=1.1, **sides)
        return Link(rate, latency_s, sharing, overlap, curve=curve)
    return Link(
        draw(st.sampled_from([rate, float("inf")])), draw(st.sampled_from([0.0, latency_s])), sharing, overlap
    )


@st.composite
def crowds(draw: st.DrawFn, policies: tuple[str, ...] = tuple(ENTRIES)) -> PoolCase:
    """Many requests at nearly one time in pools that hold one to two of the largest: eviction after eviction."""
    entry = draw(st.one_of([ENTRIES[name] for name in policies]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(5, 25))
    span = draw(st.sampled_from([1, 2000, 20_000]))
    load = workload(
        np.sort(rng.integers(0, span, n) * 1e-6).tolist(),
        rng.integers(1, 60, n).tolist(),
        rng.integers(1, 60, n).tolist(),
    )
    size = draw(st.sampled_from([1, 2, 4]))
    largest = -(-int(np.max(load.prompt_tokens + load.output_tokens)) // size)
    blocks = int(largest * draw(st.sampled_from([1.0, 1.1, 1.3, 2.0]))) + draw(st.integers(0, 2))
    counts = {"prefill": draw(st.integers(1, 2)), "decode": draw(st.integers(1, 2))}
    return PoolCase(load, entry, counts, blocks, size, draw(links()))


@st.composite
def pool_cases(draw: st.DrawFn, policies: tuple[str, ...] = tuple(ENTRIES), most: int = 14) -> PoolCase:
    """A run whose pools hold anything from one request to plenty."""
    entry = draw(st.one_of([ENTRIES[name] for name in policies]))
    load = draw(workloads(most=most))
    if draw(st.booleans()):
        load = replace(load, max_concurrency=draw(st.integers(1, 6)))
    size = draw(st.sampled_from([1, 2, 16]))
    largest = int(np.max(load.prompt_tokens.astype(int) + load.max_new_tokens + load.output_tokens))
    enough = -(-largest // size)
    blocks = draw(st.one_of(st.integers(max(1, enough // 2), 2 * enough + 2), st.just(20 * enough)))
    counts = {"prefill": draw(st.integers(1, 3)), "decode": draw(st.integers(1, 3))}
    if entry["name"] == "splitwise" and draw(st.booleans()):
        counts["mixed"] = 1
    return PoolCase(load, entry, counts, blocks, size, draw(links()))

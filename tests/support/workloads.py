"""Random workloads and settings for property tests, small enough to step by hand and mean enough to break things."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from stub_cost import TICK

from sim.workload.workload import Workload, make_workload


@dataclass(frozen=True)
class Case:
    """One run: workload, policy entry, pool."""

    workload: Workload
    entry: dict[str, Any]
    blocks: int
    block_size: int


def workload(
    arrivals: list[float], prompts: list[int], outputs: list[int], *, max_concurrency: int | None = None
) -> Workload:
    """A workload from plain lists."""
    return make_workload(
        "test",
        np.array(arrivals, np.float64),
        np.array(prompts, np.int32),
        np.array(outputs, np.int32),
        max_concurrency=max_concurrency,
    )


# in ticks: with rough tables a small step takes about 300
GAPS = st.one_of(st.just(0), st.integers(1, 40), st.integers(100, 2000), st.sampled_from([5000, 100_000]))


@st.composite
def workloads(draw: st.DrawFn, most: int = 14, unit: float = TICK) -> Workload:
    """Bursts, equal stamps, long silences; outputs of one; prompts of many chunks; clients that ask for more; ranks."""
    n = draw(st.integers(1, most))
    gaps = draw(st.lists(GAPS, min_size=n, max_size=n))
    prompts = draw(st.lists(st.one_of(st.integers(1, 12), st.integers(13, 90)), min_size=n, max_size=n))
    outputs = draw(
        st.lists(st.one_of(st.just(1), st.integers(2, 9), st.integers(10, 60)), min_size=n, max_size=n)
    )
    made = workload((np.cumsum(gaps) * unit).tolist(), prompts, outputs)
    ranks = st.lists(st.integers(-1, 2), min_size=n, max_size=n)
    priority = draw(ranks) if draw(st.booleans()) else [0] * n
    made = replace(made, priority=np.array(priority, np.int16))
    extra = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)) if draw(st.booleans()) else [0] * n
    return replace(made, max_new_tokens=(made.output_tokens + np.array(extra)).astype(np.int32))


@st.composite
def vllm_entries(draw: st.DrawFn) -> dict[str, Any]:
    """vLLM with every knob set."""
    return {
        "name": "vllm",
        "max_num_batched_tokens": draw(st.one_of(st.integers(1, 12), st.sampled_from([32, 256]))),
        "max_num_seqs": draw(st.integers(1, 8)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5, 16])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3])),
        "whole_prompt_gate": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
    }


@st.composite
def vllm_v0_entries(draw: st.DrawFn) -> dict[str, Any]:
    """vLLM v0 with every knob set."""
    return {
        "name": "vllm-v0",
        "max_num_batched_tokens": draw(st.sampled_from([16, 48, 128, 1024])),
        "max_num_seqs": draw(st.integers(1, 8)),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.01, 0.1, 0.3])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "swap_space_gib": draw(st.sampled_from([0.0, 0.005, 0.02, 4.0])),
        "swap_gb_s": 2**17 * 2**20 * 1e-9,  # a tick a token: sums stay exact
    }


@st.composite
def static_batch_entries(draw: st.DrawFn) -> dict[str, Any]:
    """Static batches with every knob set."""
    return {
        "name": "static-batch",
        "max_batch_size": draw(st.integers(1, 8)),
        "max_prefill_tokens": draw(st.sampled_from([1, 48, 128, 1024])),
        "continuous": draw(st.booleans()),
    }


@st.composite
def sarathi_entries(draw: st.DrawFn) -> dict[str, Any]:
    """Sarathi with every knob set."""
    return {
        "name": "sarathi",
        "token_budget": draw(st.one_of(st.integers(1, 12), st.sampled_from([32, 256]))),
        "max_num_seqs": draw(st.integers(1, 8)),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.01, 0.1, 0.3])),
        "one_prefill": draw(st.booleans()),
    }


@st.composite
def sglang_entries(draw: st.DrawFn) -> dict[str, Any]:
    """SGLang with every knob set; ratios in binary fractions, so that sums of reserves are exact."""
    page = draw(st.sampled_from([1, 1, 1, 4]))
    return {
        "name": "sglang",
        "chunked_prefill_size": draw(st.one_of(st.integers(2, 12), st.sampled_from([32, 256]))) * page,
        "max_prefill_tokens": draw(st.sampled_from([16, 64, 16384])),
        "mixed_chunk": draw(st.booleans()),
        "max_running_requests": draw(st.integers(1, 8)),
        "schedule_conservativeness": draw(st.sampled_from([1.0, 0.5, 2.0])),
        "init_new_token_ratio": draw(st.sampled_from([0.75, 0.5, 0.125])),
        "min_new_token_ratio_factor": draw(st.sampled_from([0.25, 0.125])),
        "new_token_ratio_decay_steps": draw(st.sampled_from([1, 8, 512])),
        "retract_decode_steps": draw(st.sampled_from([1, 4, 20])),
        "clip_max_new_tokens": draw(st.sampled_from([4, 4096])),
        "page_size": page,
    }


ENTRIES = {
    "vllm": vllm_entries(),
    "sarathi": sarathi_entries(),
    "sglang": sglang_entries(),
    "vllm-v0": vllm_v0_entries(),
    "static-batch": static_batch_entries(),
}


@st.composite
def cases(draw: st.DrawFn, policies: tuple[str, ...] = tuple(ENTRIES), most: int = 14) -> Case:
    """A run whose pool is anything from one request's worth to plenty."""
    entry = draw(st.one_of([ENTRIES[name] for name in policies]))
    load = draw(workloads(most=most))
    size = entry.get("page_size") or draw(st.sampled_from([1, 2, 16]))
    largest = int(np.max(load.prompt_tokens.astype(int) + load.max_new_tokens + load.output_tokens))
    enough = -(-largest // size)
    blocks = draw(st.one_of(st.integers(max(1, enough // 2), 2 * enough + 2), st.just(20 * enough)))
    return Case(load, entry, blocks, size)

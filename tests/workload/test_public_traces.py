"""The readers against whole public traces and their published figures, where the files are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.workload.build import build_workload
from sim.workload.quantiles import quantile_table
from sim.workload.stats import describe
from sim.workload.trace import Trace, load_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="public traces are not in ../shared/traces")


def load(name: str) -> Trace:
    return load_trace(TRACES / name)


# file, requests, mean rate, CV of gaps, dispersion of whole minutes, Spearman, share over 4096
ARRIVALS = [
    ("AzureLLMInferenceTrace_conv.csv", 19_366, 5.530136, 1.09417, 16.128259, 0.072751, 0.0832),
    ("AzureLLMInferenceTrace_code.csv", 8_819, 2.566395, 13.151291, 163.964688, -0.021462, 0.1425),
    ("mooncake_conversation_trace.jsonl.gz", 12_031, 3.401188, 3.033737, 2.894972, 0.071692, 0.6781),
    ("mooncake_synthetic_trace.jsonl.gz", 3_993, 3.905971, 1.011311, 1.191627, -0.516634, 0.6026),
]


@pytest.mark.parametrize("row", ARRIVALS, ids=lambda row: row[0])
def test_arrival_and_length_statistics(row):
    name, requests, rate, gap_cv, dispersion, rho, over = row
    facts = describe(load(name))
    assert facts["requests"] == requests
    assert facts["arrivals"]["request_rate"] == pytest.approx(rate, rel=1e-6)
    assert facts["arrivals"]["gap_cv"] == pytest.approx(gap_cv, rel=1e-6)
    assert facts["arrivals"]["dispersion_60s"] == pytest.approx(dispersion, rel=1e-6)
    assert facts["spearman"] == pytest.approx(rho, abs=1e-6)
    assert facts["over_context_limit"]["4096"] == pytest.approx(over, abs=5e-5)


LENGTHS = [
    ("arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", "arxiv-summarization-v2"),
    ("pod_arxiv_sample.csv", "arxiv-pod"),
    ("vattention_arxiv_long_online.csv", "arxiv-long-online"),
    ("sharegpt_8k_filtered_stats_llama2_tokenizer.csv", "sharegpt-8k"),
    ("bwb_stats_llama2_tokenizer_filtered_v2.csv.gz", "bwb"),
    ("AzureLLMInferenceTrace_conv.csv", "azure-conv-2023"),
    ("AzureLLMInferenceTrace_code.csv", "azure-code-2023"),
    ("mooncake_conversation_trace.jsonl.gz", "mooncake-conversation"),
    ("mooncake_synthetic_trace.jsonl.gz", "mooncake-synthetic"),
]


@pytest.mark.parametrize(("file", "name"), LENGTHS)
def test_shipped_tables_are_the_percentiles_of_the_files(file, name):
    trace, table = load(file), quantile_table(name)
    for values, marginal in ((trace.prompt_tokens, table.prompt), (trace.output_tokens, table.output)):
        np.testing.assert_allclose(np.percentile(values, range(101)), marginal.percentiles, atol=0.01)
        assert values.mean() == pytest.approx(marginal.mean, abs=0.001)
    assert describe(trace)["spearman"] == pytest.approx(table.spearman, abs=1e-6)
    if table.per_minute_counts is not None:
        counts = np.bincount((trace.arrival_s / 60).astype(int))[:-1]
        assert tuple(counts) == table.per_minute_counts


@pytest.mark.parametrize("kind", ["conv", "code"])
def test_vidurs_copies_equal_azures(kind):
    azure, vidur = load(f"AzureLLMInferenceTrace_{kind}.csv"), load(f"vidur_splitwise_{kind}.csv")
    np.testing.assert_array_equal(azure.prompt_tokens, vidur.prompt_tokens)
    np.testing.assert_array_equal(azure.output_tokens, vidur.output_tokens)
    np.testing.assert_allclose(azure.arrival_s, vidur.arrival_s, rtol=0, atol=5e-13)


@pytest.mark.parametrize(
    "name", ["mooncake_conversation_trace.jsonl.gz", "mooncake_synthetic_trace.jsonl.gz"]
)
def test_mooncake_has_one_hash_for_every_512_prompt_tokens(name):
    trace = load(name)
    assert trace.prefix_hashes is not None
    assert [len(h) for h in trace.prefix_hashes] == np.ceil(trace.prompt_tokens / 512).astype(int).tolist()


def test_a_whole_trace_becomes_a_workload_at_a_rate():
    spec = {"trace": "AzureLLMInferenceTrace_conv.csv"}
    workload = build_workload(spec, seed=0, request_rate=11.06, context_limit=8192, base_dirs=[TRACES])
    assert (len(workload), workload.rejected_overlength) == (19_365, 1)
    assert workload.request_rate == pytest.approx(11.06)
    assert workload.sha256.startswith("2f1e5b666d4e3055")


def test_spreading_the_three_second_grid_leaves_a_plausible_process():
    spec = {"trace": "mooncake_conversation_trace.jsonl.gz", "spread_s": 3}
    workload = build_workload(spec, seed=0, request_rate=None, context_limit=None, base_dirs=[TRACES])
    gaps = np.diff(workload.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.05, abs=0.1)

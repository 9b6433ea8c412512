"""The workload block: where traces are found, what each key does, and which combinations are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import SimctlError
from sim.workload.build import WORKLOAD_KEYS, build_workload, list_bundled
from sim.workload.peers import peer_workload
from sim.workload.workload import Workload

GENERATED = {"arrivals": "poisson", "num_prompts": 200, "prompt_tokens": 1200, "output_tokens": 60}
ROWS = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n3,300,30\n4,400,40\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t.csv").write_text(ROWS)
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,10\n200,20\n300,30\n400,40\n")
    return tmp_path


def build(spec, folder=Path(), rate=None, limit=None, seed=0, classes=None) -> Workload:
    return build_workload(
        spec, seed=seed, request_rate=rate, context_limit=limit, base_dirs=[folder], slo_classes=classes
    )


def said(workload: Workload, text: str) -> bool:
    return any(text in note for note in workload.notes)


def test_a_trace_runs_at_its_own_stamps(folder):
    workload = build({"trace": "t.csv"}, folder)
    assert workload.arrival_s.tolist() == [0, 1, 3, 4]
    assert workload.prompt_tokens.tolist() == [100, 200, 300, 400]
    assert workload.max_new_tokens.tolist() == workload.output_tokens.tolist() == [10, 20, 30, 40]
    assert workload.slo_classes == ("default",)
    assert workload.name == "t"
    assert workload.arrival_s.flags.writeable


def test_sha256_is_that_of_the_file(folder):
    import hashlib

    expected = hashlib.sha256((folder / "t.csv").read_bytes()).hexdigest()
    assert build({"trace": "t.csv"}, folder).sha256 == expected
    assert build({"trace": "t.csv", "max_requests": 2}, folder, rate=3.0).sha256 == expected


def test_stretch_scales_the_stamps_and_says_so(folder):
    workload = build({"trace": "t.csv"}, folder, rate=1.5)
    assert workload.arrival_s.tolist() == [0, 0.5, 1.5, 2]
    assert workload.request_rate == pytest.approx(1.5)
    assert said(workload, "rescaled by stretch from 0.75 to 1.5 requests/s")


def test_redraw_replaces_the_stamps_and_says_so(folder):
    workload = build({"trace": "t.csv", "rescale": "redraw"}, folder, rate=1.5)
    assert workload.arrival_s.tolist() != [0, 0.5, 1.5, 2]
    assert said(workload, "redrawn as Poisson at 1.5 requests/s")
    bursty = build({"trace": "t.csv", "rescale": "redraw", "burstiness": 0.2}, folder, rate=1.5)
    assert said(bursty, "redrawn as Gamma of burstiness 0.2")


def test_drawn_arrivals_over_a_trace_keep_its_mean_rate_if_none_is_given(folder):
    assert said(build({"trace": "t.csv", "arrivals": "poisson"}, folder), "Poisson at 0.75 requests/s")


def test_window_first_and_subsample(folder):
    window = build({"trace": "t.csv", "window_s": [1, 4]}, folder)
    assert window.arrival_s.tolist() == [0, 2]
    assert window.prompt_tokens.tolist() == [200, 300]
    assert build({"trace": "t.csv", "max_requests": 3}, folder).prompt_tokens.tolist() == [100, 200, 300]
    assert len(build({"trace": "t.csv", "max_requests": 99}, folder)) == 4
    half = [build({"trace": "sample-conv", "subsample": 0.5}, seed=seed) for seed in (0, 0, 1)]
    assert [len(w) for w in half] == [250] * 3
    assert half[0].arrival_s.tolist() == half[1].arrival_s.tolist() != half[2].arrival_s.tolist()
    assert len(build({"trace": "sample-conv", "subsample": 40})) == 40


def test_shuffle_keeps_arrivals_and_the_requests(folder):
    plain, mixed = build({"trace": "sample-conv"}), build({"trace": "sample-conv", "shuffle": True})
    assert mixed.arrival_s.tolist() == plain.arrival_s.tolist()
    pairs = [
        sorted(zip(w.prompt_tokens.tolist(), w.output_tokens.tolist(), strict=True)) for w in (plain, mixed)
    ]
    assert pairs[0] == pairs[1]
    assert mixed.prompt_tokens.tolist() != plain.prompt_tokens.tolist()


def test_spread_undoes_a_logging_grid(tmp_path):
    (tmp_path / "g.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,1,1\n3,1,1\n" * 5)
    stamps = build({"trace": "g.csv", "spread_s": 3}, tmp_path).arrival_s
    assert len(np.unique(stamps)) == 10
    assert np.floor(stamps / 3).tolist() == [0] * 5 + [1] * 5


def test_requests_over_the_context_limit_are_rejected_and_counted(folder):
    workload = build({"trace": "t.csv"}, folder, rate=2.0, limit=330)
    assert workload.prompt_tokens.tolist() == [100, 200, 300]
    assert workload.rejected_overlength == 1
    assert workload.request_rate == pytest.approx(2.0)  # of the requests that are left
    assert said(workload, "1 of 4 requests over the context limit of 330 tokens rejected")
    with pytest.raises(SimctlError, match="all 4 requests exceed the context limit of 50 tokens"):
        build({"trace": "t.csv"}, folder, limit=50)


def test_or_truncated_prompt_first(folder):
    workload = build({"trace": "t.csv", "on_overlength": "truncate"}, folder, limit=330)
    assert workload.prompt_tokens.tolist() == [100, 200, 300, 290]
    assert workload.output_tokens.tolist() == [10, 20, 30, 40]
    assert workload.rejected_overlength == 0
    short = build({"trace": "t.csv", "on_overlength": "truncate"}, folder, limit=30)
    assert short.prompt_tokens.tolist() == [20, 10, 1, 1]
    assert short.output_tokens.tolist() == [10, 20, 29, 29]


@given(st.integers(2, 5000), st.sampled_from(["reject", "truncate"]))
def test_nothing_ever_exceeds_the_limit_and_nothing_is_lost(limit, how):
    spec = {"trace": "sample-conv", "on_overlength": how}
    whole = build({"trace": "sample-conv"})
    if how == "reject" and limit < np.min(whole.prompt_tokens + whole.output_tokens):
        with pytest.raises(SimctlError, match="all 500 requests exceed"):
            build(spec, limit=limit)
        return
    workload = build(spec, limit=limit)
    assert np.all(workload.prompt_tokens + workload.output_tokens <= limit)
    assert np.all(workload.prompt_tokens + workload.max_new_tokens <= limit)
    assert len(workload) + workload.rejected_overlength == 500


def test_what_clients_ask_for(folder):
    def asked(wish, **more):
        workload = build({"trace": "t.csv", "max_new_tokens": wish}, folder, **more)
        return workload.max_new_tokens.tolist(), workload.output_tokens.tolist()

    assert asked("actual") == ([10, 20, 30, 40], [10, 20, 30, 40])
    assert asked({"factor": 1.25}) == ([13, 25, 38, 50], [10, 20, 30, 40])
    assert asked(64) == ([64] * 4, [10, 20, 30, 40])
    assert asked(25) == ([25] * 4, [10, 20, 25, 25])  # nobody gets more than was asked for
    assert asked(64, limit=450) == ([64, 64, 64, 50], [10, 20, 30, 40])
    for wrong in ({"factor": 0.5}, "all", 0, {"fctor": 2}):
        with pytest.raises(SimctlError, match=r"workload\.max_new_tokens"):
            asked(wrong)


def test_a_file_may_hold_what_clients_ask_for(tmp_path):
    (tmp_path / "m.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,max_new_tokens\n0,5,10,16\n1,5,10,8\n"
    )
    workload = build({"trace": "m.csv"}, tmp_path)
    assert workload.max_new_tokens.tolist() == [16, 8]
    assert workload.output_tokens.tolist() == [10, 8]
    assert said(workload, "1 outputs cut")


def test_lengths_alone_need_an_arrival_process(folder):
    with pytest.raises(
        SimctlError, match=r"'lengths' has lengths only and no arrivals to replay; say workload\.arrivals"
    ):
        build({"trace": "lengths.csv"}, folder, rate=4.0)
    with pytest.raises(SimctlError, match="poisson needs a request rate"):
        build({"trace": "lengths.csv", "arrivals": "poisson"}, folder)
    assert len(build({"trace": "lengths.csv", "arrivals": "poisson"}, folder, rate=4.0)) == 4
    with pytest.raises(SimctlError, match="no arrivals to choose by"):
        build({"trace": "lengths.csv", "arrivals": "poisson", "window_s": [0, 1]}, folder, rate=4.0)


def test_common_random_numbers_across_rates_and_processes():
    lengths = {"prompt_tokens": {"quantiles": "bwb"}, "output_tokens": {"quantiles": "bwb"}}
    spec = {**GENERATED, **lengths}
    slow, fast = build(spec, rate=2.0), build(spec, rate=8.0)
    np.testing.assert_allclose(slow.arrival_s, 4 * fast.arrival_s)
    even = build({**spec, "arrivals": "deterministic"}, rate=2.0)
    for other in (fast, even):
        np.testing.assert_array_equal(slow.prompt_tokens, other.prompt_tokens)
        np.testing.assert_array_equal(slow.output_tokens, other.output_tokens)
    assert build(spec, rate=2.0, seed=1).prompt_tokens.tolist() != slow.prompt_tokens.tolist()


def test_generated_workloads_carry_a_fingerprint_of_parameters_and_columns():
    a, b, c = build(GENERATED, rate=2.0), build(GENERATED, rate=2.0), build(GENERATED, rate=3.0)
    assert a.sha256 == b.sha256 != c.sha256
    assert len(a.sha256) == 64


def test_tables_bring_their_own_coupling_unless_told():
    spec = {**GENERATED, "prompt_tokens": {"quantiles": "bwb"}, "output_tokens": {"quantiles": "bwb"}}
    assert said(build(spec, rate=1.0), "rank correlation 0.805333")
    assert not said(build({**spec, "spearman": 0}, rate=1.0), "rank correlation")
    assert not said(
        build({**spec, "output_tokens": {"quantiles": "arxiv-pod"}}, rate=1.0), "rank correlation"
    )


def test_closed_loop():
    spec = {**GENERATED, "arrivals": "closed-loop", "max_concurrency": 8}
    workload = build(spec)
    assert workload.max_concurrency == 8
    assert not workload.arrival_s.any()
    with pytest.raises(SimctlError, match="the request rate 4 has no effect"):
        build(spec, rate=4.0)
    with pytest.raises(SimctlError, match=r"workload\.max_concurrency is missing"):
        build({**GENERATED, "arrivals": "closed-loop"})


def test_bursts():
    spec = {**GENERATED, "arrivals": "bursts"}
    workload = build({**spec, "on_s": 1, "off_s": 9}, rate=4.0)
    assert np.all(workload.arrival_s % 10 <= 1 + 1e-6)
    assert said(workload, "bursts of 1 s every 10 s at 4 requests/s")
    assert said(
        build({**spec, "minute_profile": "azure-code-2023"}, rate=4.0),
        "follow the minutes of azure-code-2023",
    )
    with pytest.raises(SimctlError, match="bursts need either on_s and off_s, or minute_profile"):
        build(spec, rate=4.0)
    with pytest.raises(SimctlError, match="'bwb' has no requests per minute"):
        build({**spec, "minute_profile": "bwb"}, rate=4.0)


CLASSES = {"chat": {"ttft_ms": 300, "priority": 0}, "batch": {"e2el_ms": 60000, "priority": 2}}


def test_slo_classes(tmp_path):
    (tmp_path / "c.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,slo_class\n0,5,5,batch\n1,5,5,chat\n"
    )
    own = build({"trace": "c.csv"}, tmp_path, classes=CLASSES)
    assert own.slo_classes == ("chat", "batch")
    assert own.slo_class.tolist() == [1, 0]
    assert own.priority.tolist() == [2, 0]
    drawn = build(
        {**GENERATED, "num_prompts": 4000, "slo_class": {"chat": 0.75, "batch": 0.25}},
        rate=1,
        classes=CLASSES,
    )
    assert drawn.slo_class.mean() == pytest.approx(0.25, abs=0.03)
    assert build({**GENERATED, "slo_class": "batch"}, rate=1, classes=CLASSES).priority.tolist() == [2] * 200
    only = build(GENERATED, rate=1, classes={"chat": CLASSES["chat"]})
    assert only.slo_classes == ("chat",)
    for wish, message in (
        (None, r"workload\.slo_class is missing: there are the SLO classes chat, batch"),
        ("chatt", "'chatt' is not under slo.classes .*Did you mean 'chat'"),
        ({"chat": 0.9}, "not numbers that sum to 1"),
        (3, "neither a name nor shares"),
    ):
        with pytest.raises(SimctlError, match=message):
            build({**GENERATED, "slo_class": wish}, rate=1, classes=CLASSES)


def test_priority_column_of_a_trace_wins(tmp_path):
    (tmp_path / "p.csv").write_text("arrival_s,prompt_tokens,output_tokens,priority\n0,5,5,7\n1,5,5,-1\n")
    assert build({"trace": "p.csv", "slo_class": "batch"}, tmp_path, classes=CLASSES).priority.tolist() == [
        7,
        -1,
    ]


def test_paths_are_tried_in_order_and_then_bundled_names(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "t.csv").write_text(ROWS.replace("100", "111"))
    for base_dirs, first in (([other, folder], 111), ([folder, other], 100)):
        workload = build_workload(
            {"trace": "t.csv"}, seed=0, request_rate=None, context_limit=None, base_dirs=base_dirs
        )
        assert workload.prompt_tokens[0] == first
    assert build({"trace": str(folder / "t.csv")}, other).prompt_tokens[0] == 100
    assert build({"trace": "sample-conv"}, other).name == "sample-conv"
    with pytest.raises(
        SimctlError, match=r"trace 'x.csv' was not found in .*other, and no bundled .*\(sample-conv\)"
    ):
        build({"trace": "x.csv"}, other)
    with pytest.raises(SimctlError, match=r"Did you mean 'sample-conv'"):
        build({"trace": "sample_conv"}, other)
    with pytest.raises(
        SimctlError, match=r"table of lengths, not a trace; use it as prompt_tokens: \{quantiles: bwb\}"
    ):
        build({"trace": "bwb"}, other)


REFUSED = [
    ({"trase": "t.csv"}, None, r"workload\.trase: unknown key\. Did you mean 'trace'"),
    (
        {"trace": "t.csv", "num_prompts": 5},
        None,
        "num_prompts: has no effect on a trace.*max_requests limits",
    ),
    ({**GENERATED, "window_s": [0, 1]}, 1, "window_s: has no effect without workload.trace"),
    ({**GENERATED, "rescale": "redraw"}, 1, "rescale: has no effect without workload.trace"),
    ({**GENERATED, "num_prompts": None}, 1, r"workload\.num_prompts is missing"),
    ({**GENERATED, "num_prompts": 0}, 1, "not a whole number of at least 1"),
    ({**GENERATED, "arrivals": "poison"}, 1, "is not one of .* Did you mean 'poisson'"),
    ({**GENERATED, "arrivals": "trace"}, 1, "give workload.trace"),
    ({**GENERATED, "arrivals": "gamma"}, 1, r"workload\.burstiness is missing"),
    ({**GENERATED, "burstiness": 0.5}, 1, "is not Poisson .* use arrivals: gamma"),
    (
        {**GENERATED, "arrivals": "deterministic", "burstiness": 1},
        1,
        "has no effect on arrivals: deterministic",
    ),
    ({**GENERATED, "arrivals": "gamma", "burstiness": 0}, 1, "is not a number above 0"),
    ({**GENERATED, "on_s": 1}, 1, r"workload\.on_s: has no effect on arrivals: poisson"),
    ({**GENERATED, "spearman": 1}, 1, "is not a number above -1 and below 1"),
    (GENERATED, None, "needs a request rate"),
    (GENERATED, 0, "is not a positive number of requests per second"),
    (GENERATED, float("nan"), "is not a positive number"),
    ({"trace": "t.csv", "rescale": "redraw"}, None, "rescale: has no effect without a request rate"),
    ({"trace": "t.csv", "burstiness": 0.5}, 1, "burstiness: has no effect on arrivals: trace"),
    ({"trace": "t.csv", "window_s": [5, 2]}, None, r"workload\.window_s\.to: 2 is not a number above 5"),
    (
        {"trace": "t.csv", "window_s": [50, 60]},
        None,
        r"no request of trace 't' arrives in \[50, 60\) s; it spans 0 to 4",
    ),
    ({"trace": "t.csv", "window_s": 5}, None, r"is not \[a, b\]"),
    ({"trace": "t.csv", "on_zero": "keep"}, None, r"workload\.on_zero: 'keep' is not one of drop, clamp"),
    ({"trace": "t.csv", "columns": 5}, None, r"workload\.columns"),
]


@pytest.mark.parametrize(("spec", "rate", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(folder, spec, rate, message):
    with pytest.raises(SimctlError, match=message):
        build(spec, folder, rate=rate)


def test_a_trace_without_time_cannot_be_stretched(tmp_path):
    (tmp_path / "z.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n0,5,5\n")
    assert build({"trace": "z.csv"}, tmp_path).request_rate == np.inf
    with pytest.raises(SimctlError, match="no time between its requests"):
        build({"trace": "z.csv"}, tmp_path, rate=1.0)


def test_written_out_defaults_change_nothing(folder):
    defaults = {"on_overlength": "reject", "rescale": "stretch", "max_new_tokens": "actual", "format": None}
    assert (
        build({**GENERATED, **defaults}, rate=2.0).arrival_s.tolist()
        == build(GENERATED, rate=2.0).arrival_s.tolist()
    )
    assert build({"trace": "t.csv", **defaults}, folder).arrival_s.tolist() == [0, 1, 3, 4]


def test_every_key_is_explained_and_every_bundled_name_has_a_source():
    assert all(WORKLOAD_KEYS.values())
    assert all(entry.source for entry in list_bundled())
    assert {entry.kind for entry in list_bundled()} == {"trace", "quantiles"}


def test_peer_workload_is_the_common_one():
    large = peer_workload(10_000, 12)
    assert large.output_tokens.sum() == 1_932_652
    assert large.arrival_s[0] == 1.0
    assert (len(peer_workload(1000, 11)), large.prompt_tokens.max()) == (1000, 6000)


def test_the_experiment_file_has_the_same_keys():
    from sim.config.schema import WorkloadSpec

    assert set(WorkloadSpec.model_fields) == set(WORKLOAD_KEYS)

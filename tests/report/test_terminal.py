"""The table after a run, and the sentences under it."""

from __future__ import annotations

from typing import Any

from sim.report.notes import notes_of
from sim.report.points import holding_rate, points_of
from sim.report.terminal import WIDTH, summary_table
from sim.report.words import NOTHING, number, per_cent


def row(policy: str, rate: float | None, **other: Any) -> dict[str, Any]:
    """A run's summary with the keys that the table reads."""
    values = {
        "completed": 1000,
        "request_throughput": 7.5,
        "request_goodput": 7.25,
        "output_throughput": 123456.7,
        "slo_attainment": 0.967,
    }
    for k, name in enumerate(("ttft", "tpot", "itl")):
        values |= {f"median_{name}_ms": 12345.6 / 10**k, f"p99_{name}_ms": 98765.4 / 10**k}
    return {"policy": policy, "request_rate": rate, "seed": 0, **values, **other}


def test_a_row_per_policy_and_rate_within_110_columns() -> None:
    runs = [row(name, rate) for name in ("a-policy-with-a-very-long-label", "vllm") for rate in (0.5, 1000.0)]
    lines = summary_table(runs).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines.index("") == 2 + 4
    assert lines[1].split() == [
        "POLICY",
        "RATE",
        "DONE",
        "REQ",
        "GOOD",
        "OUT",
        "TOK",
        "P50",
        "P99",
        "P50",
        "P99",
        "P50",
        "P99",
        "%",
    ]
    assert lines[2].startswith("a-policy-with-a-very-…")
    wanted = "vllm 1,000 1,000 7.50 7.25 123,457 12,346 98,765 1,235 9,877 123 988 96.7"
    assert lines[5].split() == wanted.split()
    # each group's heading ends where its last column does
    for group, columns in (("TTFT, ms", "P99"), ("ITL, ms", "P99")):
        end = lines[0].index(group) + len(group)
        assert lines[1][:end].endswith(columns)


def test_without_rate_or_slo_the_columns_are_left_out() -> None:
    lines = summary_table([row("vllm", None, request_goodput=None, slo_attainment=None)]).splitlines()
    assert "RATE" not in lines[1]
    assert "GOOD" not in lines[1]
    assert "SLO" not in lines[0]


def test_replicates_are_one_row_of_means() -> None:
    runs = [row("vllm", 4.0, seed=s, request_throughput=v) for s, v in enumerate((1.0, 2.0))]
    text = summary_table(runs)
    assert text.splitlines()[2].split()[1:4] == ["4", "2,000", "1.50"]
    assert "Means of 2 replicates" in text


def test_lines_for_saturated_rejected_and_unfinished() -> None:
    runs = [
        row("vllm", 4.0),
        row("vllm", 8.0, saturated=True),
        row("vllm", 16.0, saturated=True, unfinished=7),
        row("sglang", 4.0, rejected=2, rejected_reasons={"longer than the model's context": 2}),
        row("sglang", 8.0, flagged_steps=5, iterations=1000),
        row("sglang", 16.0, saturated=True),
    ]
    text = " ".join(summary_table(runs).split())
    assert "* Saturated: vllm from 8 req/s on; sglang at 16 req/s:" in text
    assert "Rejected: longer than the model's context: 2 requests (sglang at 4 req/s)." in text
    assert "Unfinished: 7 requests (vllm at 16 req/s) still in progress" in text
    assert "coverage: 0.50 % of the steps (sglang at 8 req/s)." in text
    assert "\nvllm *" in summary_table(runs)


def test_by_what_kv_travels_is_told() -> None:
    measured = {"bandwidth_gb_s": 361.4, "latency_us": 10.2, "source": "measured: copy between two GPUs"}
    modelled = {"bandwidth_gb_s": 50.0, "latency_us": 10.0, "source": "GPU table: network card"}
    runs = [row("vllm", 4.0), row("distserve", 4.0, link=measured), row("splitwise", 4.0, link=modelled)]
    text = " ".join(summary_table(runs).split())
    assert "KV travels: at 361 GB/s and 10.2 µs by measured: copy between two GPUs (distserve at 4" in text
    assert "at 50.0 GB/s and 10.0 µs by GPU table: network card (splitwise at 4 req/s)." in text
    assert "KV travels" not in summary_table(runs[:1])
    assert "KV travels" in dict(notes_of(runs))


def test_notes_that_differ_in_numbers_alone_become_one() -> None:
    runs = [
        row("vllm", rate, notes=["read as CSV", f"stretched to {rate:g} requests/s"]) for rate in (4.0, 16.0)
    ]
    runs[0]["notes"].append("odd")
    runs[0]["censored"] = {"ttft": 1}
    assert notes_of(runs) == [
        (
            "Percentiles cut short",
            [
                "TTFT: 1 request (vllm at 4 req/s) had no value yet when the run ended, "
                "so the percentiles may be too low."
            ],
        ),
        (
            "Workload and engine",
            ["read as CSV", "stretched to {4, 16} requests/s", "odd (vllm at 4 req/s)"],
        ),
    ]


def test_the_rate_that_holds_is_below_the_first_failure() -> None:
    shares = {1.0: 1.0, 2.0: 0.99, 4.0: 0.9, 8.0: 1.0}
    points = points_of([row("vllm", rate, slo_attainment=share) for rate, share in shares.items()])
    assert holding_rate(points, "vllm", 0.99) == 2.0
    assert holding_rate(points, "vllm", 0.9) == 8.0
    assert holding_rate(points, "other", 0.9) is None


def test_numbers() -> None:
    assert [number(v) for v in (0, 0.01234, 1.5, 12.345, 123.4, 1234567.0, None, float("inf"))] == [
        "0",
        "0.0123",
        "1.50",
        "12.3",
        "123",
        "1,234,567",
        NOTHING,
        NOTHING,
    ]
    assert [per_cent(v) for v in (1.0, 0.9999, 0.5, 0.0, None)] == ["100", "99.9", "50", "0", NOTHING]


def test_throughputs_are_per_gpu_where_the_rates_are() -> None:
    runs = [
        row("pair", 8.0) | {"num_gpus": 2, "request_rate_per_gpu": 4.0, "request_throughput_per_gpu": 3.21}
    ]
    table = summary_table(runs)
    assert "PER SECOND, GPU" in table
    assert "3.21" in table


def test_reasons_that_differ_in_numbers_are_counted_together_when_many() -> None:
    many = {f"{n} tokens need {n} KV blocks; the pool has 1": 2 for n in range(5, 25)}
    text = " ".join(summary_table([row("vllm", 4.0, rejected=40, rejected_reasons=many)]).split())
    assert "5 tokens need 5 KV blocks; the pool has 1, and the like: 40 requests (vllm at 4 req/s)." in text
    assert text.count("Rejected") == 1
    few = dict(list(many.items())[:2])
    text = summary_table([row("vllm", 4.0, rejected=4, rejected_reasons=few)])
    assert text.count("Rejected") == 2


def test_a_window_without_a_request_is_said() -> None:
    empty = {"completed": 5, "num_prompts": 5, "slo_requests": 0}
    text = " ".join(summary_table([row("vllm", 4.0, **empty), row("sglang", 4.0)]).split())
    assert (
        "Nothing measured: vllm at 4 req/s: every request arrived before `measure.warmup_s` was over" in text
    )
    assert "Nothing measured" not in summary_table([row("vllm", 4.0, **{**empty, "slo_requests": 1})])

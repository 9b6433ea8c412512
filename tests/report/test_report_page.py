"""The report page: complete, offline, honest about what it shows, and right for any shape of experiment."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from result_folder import write_folder

from sim.cli.report import report
from sim.errors import SimctlError
from sim.metrics import Slo
from sim.report.colours import DARK, POLICY, colour, dash, symbol
from sim.report.distributions import curve
from sim.report.html import SCRIPT, write_report
from sim.report.results import read_results

VOID = {"meta", "br", "link", "input"}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies at three rates, two replicates, the highest rate far too high."""
    slo = Slo(ttft_ms=500, tpot_ms=15, attainment=0.9)
    return write_folder(
        tmp_path_factory.mktemp("sweep") / "r",
        ["vllm", "sarathi-512"],
        [2.0, 8.0, 80.0],
        seeds=(0, 1),
        slo=slo,
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies at one rate, with SLO classes, cut off before all have finished."""
    slo = Slo(tpot_ms=15, classes={"chat": Slo(ttft_ms=200), "batch": Slo(e2el_ms=9000)})
    folder = tmp_path_factory.mktemp("single") / "r"
    return write_folder(folder, ["vllm", "sglang-1024"], [8.0], slo=slo, requests=40, drain=False)


class Balance(HTMLParser):
    """Fails on a tag closed out of order; collects texts and addresses that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(page: str) -> Balance:
    """The page, its structure checked."""
    found = Balance()
    found.feed(page)
    assert found.open == []
    return found


def figures(page: str) -> dict[str, Any]:
    """The figures in the page, each accepted by plotly's validators."""
    import plotly.graph_objects as go

    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    for figure in data.values():
        go.Figure(figure)
    return data


def drawn(folder: Path, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The page with its script left out, and its figures."""
    page = write_report(folder, tmp_path / "page.html", shared_script=True).read_text()
    return page, figures(page)


def test_the_page_loads_nothing_and_is_well_formed(sweep: Path) -> None:
    page = write_report(sweep).read_text()
    assert (sweep / "report.html").is_file()
    assert len(page) > 4_000_000  # plotly's script is inside
    assert parsed(page).loads == []
    assert "@import" not in page.split("</style>")[0]


def test_a_shared_script_stands_beside_the_page(sweep: Path, tmp_path: Path) -> None:
    page, _ = drawn(sweep, tmp_path)
    assert parsed(page).loads == [SCRIPT]
    assert (tmp_path / SCRIPT).stat().st_size > 1_000_000
    assert len(page) < 500_000


def test_the_same_results_give_the_same_bytes(sweep: Path, tmp_path: Path) -> None:
    assert drawn(sweep, tmp_path)[0] == drawn(sweep, tmp_path)[0]


def test_what_was_run_stands_on_top(sweep: Path, tmp_path: Path) -> None:
    text = " ".join(parsed(drawn(sweep, tmp_path)[0]).text).replace("\u00a0", " ")
    for wanted in (
        "sample-on-h200",
        "llama-3.1-8b",
        "1 × h200-sxm",
        "trace sample-conv; at most 60 requests",
        "stretch: the trace's stamps times one factor per offered rate",
        "2, 8, 80 req/s",
        "TTFT ≤ 500 ms, TPOT ≤ 15 ms, by 90 % of requests",
        "0, 1 (2 replicates)",
        "All simulated GPU time is extrapolated, none of it measured.",
        "prefill_attention",
    ):
        assert wanted in text


def test_curves_are_the_means_of_the_replicates_with_intervals(sweep: Path, tmp_path: Path) -> None:
    runs = read_results(sweep).runs
    page, found = drawn(sweep, tmp_path)
    ttft = [t for t in found["latency-0"]["data"] if t["meta"] == {"policy": "vllm", "pct": "p99"}]
    assert len(ttft) == 1
    assert ttft[0]["x"] == [2.0, 8.0, 80.0]
    for rate, value in zip(ttft[0]["x"], ttft[0]["y"], strict=True):
        own = [r["p99_ttft_ms"] for r in runs if r["policy"] == "vllm" and r["request_rate"] == rate]
        assert value == pytest.approx(np.mean(own))
    assert len(ttft[0]["error_y"]["array"]) == 3
    assert found["latency-0"]["layout"]["shapes"][0]["y0"] == 500  # the SLO
    assert found["attainment-0"]["layout"]["shapes"][0]["y0"] == 90  # the target
    assert {t["meta"]["rate"] for t in found["cdf-ttft"]["data"]} == {"2 req/s", "8 req/s", "80 req/s"}
    for choice in ("p50", "p90", "p99"):
        assert f'data-value="{choice}"' in page


def test_saturated_points_are_hollow_and_named(sweep: Path, tmp_path: Path) -> None:
    summary = json.loads((sweep / "summary.json").read_text())
    for run in summary["runs"]:
        run["saturated"] = run["policy"] == "vllm" and run["request_rate"] == 80.0
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    page, found = drawn(folder, tmp_path)
    curves = {t["meta"]["policy"]: t["marker"]["symbol"] for t in found["latency-1"]["data"]}
    assert curves["vllm"] == ["circle", "circle", "circle-open"]
    assert curves["sarathi-512"] == ["square"] * 3
    assert "vllm at 80 req/s: the backlog grows" in page
    assert "requests.parquet is missing" in page  # and the page is drawn all the same
    assert "cdf-ttft" not in found


def test_one_rate_is_drawn_as_dots_and_bars(single: Path, tmp_path: Path) -> None:
    page, found = drawn(single, tmp_path)
    assert {t["type"] for t in found["throughput-0"]["data"]} == {"bar"}
    dots = found["latency-0"]["data"][0]
    assert len(dots["x"]) == 3
    assert dots["x"] == sorted(dots["x"])
    assert set(dots["y"]) == {"vllm"}
    assert 'data-key="pct"' not in page  # nothing to select
    assert "At a glance" not in page
    assert "Class chat" in page
    assert "still in progress when the run ended" in page


def test_a_trace_at_its_own_stamps_has_no_rate(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "r", ["vllm"], [None], requests=30, slo=Slo())
    page, found = drawn(folder, tmp_path)
    assert "own arrivals" in page
    assert "rate, req/s" not in page
    assert not [key for key in found if key.startswith("attainment")]  # no SLO, no empty panel
    assert "throughput-0" not in found
    assert found["cdf-e2el"]["data"][0]["y"][-1] == 100


def test_labels_cannot_break_out_of_the_page(single: Path, tmp_path: Path) -> None:
    summary = json.loads((single / "summary.json").read_text())
    for run in summary["runs"]:
        run["policy"] = '</script><b title="'
        run["notes"] = ["<img src=x>"]
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    page, _ = drawn(folder, tmp_path)
    assert parsed(page).loads == [SCRIPT]
    assert "<b title" not in page


def test_a_distribution_stops_where_requests_have_no_value() -> None:
    x, share = curve(np.array([3.0, 1.0, 2.0]), total=4)
    assert x == [1.0, 2.0, 3.0]
    assert share == [25, 50, 75]
    x, share = curve(np.arange(10_000) + 1.0, total=10_000)
    assert len(x) < 250
    assert x[-5:] == [9996, 9997, 9998, 9999, 10_000]  # the tail is whole


def test_a_policy_looks_the_same_everywhere_and_unlike_the_others(sweep: Path, tmp_path: Path) -> None:
    names = [f"p{k}" for k in range(20)]
    looks = {(colour(names, n), symbol(names, n), dash(names, n)) for n in names}
    assert len(looks) == len(names)
    assert set(POLICY) <= set(DARK)
    _, found = drawn(sweep, tmp_path)
    lines = {
        (t["meta"]["policy"], t["line"]["color"])
        for figure in found.values()
        for t in figure["data"]
        if "policy" in t.get("meta", {})
    }
    assert lines == {("vllm", POLICY[0]), ("sarathi-512", POLICY[1])}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "holds no summary.json"),
        ("{", "cannot be read as JSON"),
        ('{"schema_version": 7, "runs": [{}]}', "schema_version is 7"),
        ('{"schema_version": 1, "runs": []}', "at least one run"),
        ('{"schema_version": 1, "runs": [{}]}', r"runs\[0\] must be a mapping with the key 'policy'"),
        ("[]", "schema_version is None"),
    ],
)
def test_an_unfit_folder_is_one_sentence(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(SimctlError, match=says):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_run_with_few_keys_is_drawn(tmp_path: Path) -> None:
    run = {"policy": "vllm", "request_rate": 2.0, "p99_ttft_ms": 10.0}
    (tmp_path / "summary.json").write_text(json.dumps({"schema_version": 1, "runs": [run]}))
    (tmp_path / "requests.parquet").write_text("not parquet")
    page, found = drawn(tmp_path, tmp_path)
    assert list(found) == ["latency-0"]
    assert "does not say what the simulated times rest on" in page
    assert "requests.parquet cannot be read" in page


def test_the_command(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.html"
    done = CliRunner().invoke(report, [str(sweep), "-o", str(target), "--plotlyjs", "shared"])
    assert done.exit_code == 0
    assert done.output.strip() == str(target)
    assert (tmp_path / SCRIPT).is_file()
    from sim.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path / "nowhere")])
    assert stop.value.code == 2
    with pytest.raises(SimctlError, match="cannot be written"):
        write_report(sweep, tmp_path / "no" / "such" / "folder.html")
